"""The audit log: one line of JSON for each authenticated call that may change something, including refused ones, and
for each change of the tokens.

The log is bounded: a file is rotated when it reaches BYTES_MAX bytes, and one older file is kept. A tenant may write
LINES_PER_S lines per second, and its next line says how many were left out, so that one tenant cannot displace the
entries of another.
"""

import os
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from overwinter.api.rates import Rate
from overwinter.core.ids import TenantId
from overwinter.store.tokens import OPEN_FLAGS, hand_over

FILE = "audit.jsonl"
BYTES_MAX = 16 << 20
LINES_PER_S = 20.0
PATH_MAX = 512
TENANTS_MAX = 10_000


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One call, or one change of the tokens."""

    at: str
    """When the request was answered, in UTC."""
    by: str
    """The token's id, or the user who changed the tokens on the node's machine."""
    label: str = ""
    """The label of the token."""
    tenant: TenantId
    """The tenant for which the request acted."""
    caller: str = ""
    """The client's address."""
    method: str
    path: str
    status: int
    left_out: int = 0
    """The number of the tenant's lines that were left out before this one, because it exceeded its rate or they
    could not be written.
    """


class Audit:
    """The audit file. It is written on the event loop: a line takes about ten microseconds, and is rare."""

    def __init__(self, data: Path, log: Callable[[str], None]) -> None:
        self._path = data / FILE
        self._log = log
        self._rates: dict[TenantId, Rate] = {}
        self._left_out: Counter[TenantId] = Counter()
        self._failing = False

    def add(self, line: Line, now: float) -> None:
        """Write a line, unless its tenant has written too many; `now` is on any monotonic clock."""
        tenant = line.tenant
        if len(self._rates) > TENANTS_MAX:
            # Tenants may be unlimited in number, because the operator may act for any name.
            self._rates.clear()
        if self._rates.setdefault(tenant, Rate(LINES_PER_S)).wait_s(now):
            self._left_out[tenant] += 1
            return
        left_out = self._left_out.pop(tenant, 0)
        try:
            write_line(self._path, msgspec.structs.replace(line, path=line.path[:PATH_MAX], left_out=left_out))
            self._failing = False
        except OSError as error:
            self._left_out[tenant] = left_out + 1
            if not self._failing:
                self._log(f"audit lines are lost until {self._path} can be written: {error}")
            self._failing = True


def write_line(path: Path, line: Line) -> None:
    """Append a line, then rotate the file if it is full."""
    encoded = msgspec.json.encode(line) + b"\n"
    with open(os.open(path, os.O_WRONLY | os.O_APPEND | OPEN_FLAGS, 0o600), "ab", buffering=0) as file:
        file.write(encoded)
        written = file.tell()
        if written == len(encoded):
            # The file is new.
            hand_over(file.fileno(), path.parent)
    if written >= BYTES_MAX:
        os.replace(path, path.with_name(f"{path.name}.1"))


def time_text(wall: float) -> str:
    """Format a time for the audit log."""
    return datetime.fromtimestamp(wall, UTC).isoformat(timespec="milliseconds")

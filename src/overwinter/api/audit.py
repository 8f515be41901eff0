"""The audit log: one record, a line of JSON, for each request that may change something, if it has a token, and for
each change of the tokens.

A request that its operation refuses has a record too. One that is refused before its operation is known has none.
Examples are 401, 429, a header that names another tenant, and 503 if the node stops or has too many requests in
progress.

A file is rotated when it reaches BYTES_MAX bytes, and one older file is kept. A tenant may write RECORDS_PER_S records
per second, and in addition UPLOADS_PER_S records of uploads of blocks, so that one tenant cannot displace the records
of others in less than ten minutes. Its next record says how many were left out. Uploads have a rate of their own,
because a deploy sends many blocks before its manifest: with one rate, the record of the manifest would be left out.
"""

import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from overwinter.api.rates import Rate
from overwinter.core.ids import TenantId
from overwinter.store.disk import OPEN_FLAGS, give_to_owner

FILE = "audit.jsonl"
BYTES_MAX = 16 << 20
RECORDS_PER_S = 20.0
UPLOADS_PER_S = 2.0
UPLOADS = "/overwinter/v1/blocks/"
"""The beginning of the path of an upload."""
PATH_MAX = 512
"""The most characters of a path; the rest is left out. A path with characters that take several bytes in JSON may be
cut shorter.
"""
ESCAPED_BYTES = 6
"""The bytes of an escaped character."""
RATES_MAX = 20_000
"""The most rates that are kept: two for each tenant."""


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request, or one change of the tokens."""

    at: str
    """When the answer to the request began, or when the tokens were changed, in UTC."""
    by: str
    """The token's id, or the user who changed the tokens on the node's machine."""
    label: str = ""
    """The label of the token."""
    tenant: TenantId
    """The tenant for which the request acted, or whose tokens or limits were changed."""
    address: str = ""
    """The client's IPv4 address, or its IPv6 network (the first 64 bits of the address)."""
    method: str
    """The HTTP method, or the command that changed the tokens, such as `token create`."""
    path: str
    """The path of the request, or the id of the changed token; for `token limit` the tenant."""
    status: int
    """The status of the answer; 0 for a change of the tokens."""
    left_out: int = 0
    """The number of the tenant's records that were left out before this one, because the tenant exceeded its rate or
    they could not be written.
    """


class Audit:
    """The audit file. It is written on the event loop, because records are rare and one takes about ten µs."""

    def __init__(self, data: Path, log: Callable[[str], None]) -> None:
        """`data`: the data directory; `log`: receives a message when records can no longer be written."""
        self._path = data / FILE
        self._log = log
        self._rates: dict[tuple[TenantId, bool], Rate] = {}
        """The rates by tenant, and by whether they are for uploads."""
        self._left_out: Counter[TenantId] = Counter()
        self._failing = False

    def add(self, record: AuditRecord, now: float) -> None:
        """Write a record, unless its tenant exceeds its rate; `now` is the time of any monotonic clock."""
        tenant = record.tenant
        is_upload = record.method == "PUT" and record.path.startswith(UPLOADS)
        if len(self._rates) > RATES_MAX:
            # The number of tenants is not bounded, because an administrator may act for any name.
            self._rates.clear()
        rate = self._rates.setdefault((tenant, is_upload), Rate(UPLOADS_PER_S if is_upload else RECORDS_PER_S))
        if rate.take(now):
            self._left_out[tenant] += 1
            return
        left_out = self._left_out.pop(tenant, 0)
        try:
            path = record.path[:PATH_MAX]
            if len(msgspec.json.encode(path)) > PATH_MAX + 2:
                path = path[: PATH_MAX // ESCAPED_BYTES]
            write_record(self._path, msgspec.structs.replace(record, path=path, left_out=left_out))
            self._failing = False
        except OSError as error:
            self._left_out[tenant] = left_out + 1
            if not self._failing:
                self._log(f"audit records are lost until {self._path} can be written: {error}")
            self._failing = True


def write_record(path: Path, record: AuditRecord) -> None:
    """Append a record, then rotate the file if it is full."""
    encoded = msgspec.json.encode(record) + b"\n"
    with open(os.open(path, os.O_WRONLY | os.O_APPEND | OPEN_FLAGS, 0o600), "ab", buffering=0) as file:
        before, left = os.fstat(file.fileno()).st_size, memoryview(encoded)
        try:
            while left:
                # If little space is left, a part of the record is written, without an error.
                left = left[file.write(left) :]
        except OSError:
            with suppress(OSError):
                file.truncate(before)
            raise
        written = before + len(encoded)
        if not before:
            # The file is new.
            give_to_owner(file.fileno(), path.parent)
    if written >= BYTES_MAX:
        os.replace(path, path.with_name(f"{path.name}.1"))


def time_text(wall: float) -> str:
    """Format a time for the audit log."""
    return datetime.fromtimestamp(wall, UTC).isoformat(timespec="milliseconds")

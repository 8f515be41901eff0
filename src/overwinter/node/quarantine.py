"""Records the functions on which the scheduler failed, so that the next start does not fail on them again.

The record is a small file in the data directory. It is written when the scheduler failed on an event of a function, and
read at the next start: such a function is deployed, but out of service until it is loaded. An unreadable file counts as
empty: the node may then fail once more, and writes it again.
"""

from pathlib import Path

import msgspec

from overwinter.core.errors import MachineError
from overwinter.core.ids import FunctionId

RECORDS_MAX = 1000
"""The most functions in the file. If the scheduler fails on more of them, the cause is elsewhere."""
REASON_MAX = 500
"""The most characters of a reason."""


class Quarantine:
    """The functions on which the scheduler failed so that the node ended, each with the error. Those on which only a
    policy failed are not here (`scheduler/policy_failures.py`).
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[FunctionId, str] = {}
        try:
            self._known = msgspec.json.decode(path.read_bytes(), type=dict[FunctionId, str])
        except (OSError, msgspec.MsgspecError, UnicodeError):
            return

    def reason(self, function: FunctionId) -> str:
        """Return how the scheduler failed on the function; empty if it did not."""
        return self._known.get(function, "")

    def add(self, function: FunctionId, error: Exception) -> None:
        """Record that the scheduler failed on the function. Failures of the machine are not attributed to a
        function.
        """
        if not isinstance(error, OSError | MemoryError | MachineError) and len(self._known) < RECORDS_MAX:
            self._known[function] = f"{type(error).__name__}: {error}"[:REASON_MAX]
            self._write()

    def forget(self, function: FunctionId) -> None:
        """Remove a function that was loaded or removed."""
        if self._known.pop(function, None) is not None:
            self._write()

    def _write(self) -> None:
        draft = self._path.with_suffix(".draft")
        try:
            draft.write_bytes(msgspec.json.encode(self._known))
            draft.replace(self._path)
        except OSError:
            # The disk may be full. A failure that was not written may occur once more after the next start, and its
            # write is then tried again.
            return

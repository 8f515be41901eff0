"""What did the code of a function print? The last lines of a family's workers, bounded in number and in bytes.

Functions of a family are the same code in the same workers, so that they have one record; each line says which worker
printed it. The record goes with the last function that has it.
"""

from collections import deque
from weakref import WeakValueDictionary

import msgspec

from overwinter.core.ids import FamilyId, WorkerId

LINES_MAX = 500
BYTES_MAX = 32 << 10
"""Of the text of all lines of one record."""


class Line(msgspec.Struct, frozen=True):
    """One line."""

    at: float
    """When the node read it, in seconds since 1970."""
    worker: WorkerId
    text: str


class Printed:
    """The last lines, oldest first. Belongs to the loop's thread."""

    def __init__(self) -> None:
        self._lines: deque[Line] = deque()
        self._bytes = 0

    def add(self, line: Line) -> None:
        """Keep a line, and let the oldest go beyond the bounds."""
        self._lines.append(line)
        self._bytes += len(line.text)
        while len(self._lines) > LINES_MAX or self._bytes > BYTES_MAX:
            self._bytes -= len(self._lines.popleft().text)

    def lines(self) -> list[Line]:
        """All that are kept."""
        return list(self._lines)


class Records:
    """The record of each family that has had a worker, while one of its functions or workers is there."""

    def __init__(self) -> None:
        self._of: WeakValueDictionary[FamilyId, Printed] = WeakValueDictionary()

    def of(self, family: FamilyId) -> Printed:
        """The family's, which stays as long as whoever asks keeps it."""
        return self._of.setdefault(family, Printed())

"""What did the code of a function print? The last lines of a family's workers, bounded in number and in bytes.

Functions of a family are the same code in the same workers, so that they have one record; each line says which worker
printed it. The record goes with the last function that has it. All records together are bounded, too: a tenant may have
thousands of functions.
"""

import sys
from collections import deque
from collections.abc import Callable
from weakref import WeakValueDictionary

import msgspec

from overwinter.core.ids import FamilyId, WorkerId

LINES_MAX = 500
BYTES_MAX = 32 << 10
"""Of the text of all lines of one record."""
RECORDS_BYTES_MAX = 64 << 20
"""Of memory of all records. Beyond it each keeps the last lines of an equal part."""
LOOK_BYTES = 4 << 20
"""So much may be printed between two looks at how much that is."""
LINE_BYTES = 128
"""Of memory that a line takes beside its text."""


class Line(msgspec.Struct, frozen=True):
    """One line."""

    at: float
    """When the node read it, in seconds since 1970."""
    worker: WorkerId
    text: str


class Printed:
    """The last lines, oldest first. Belongs to the loop's thread."""

    def __init__(self, grew: Callable[[int], None] = lambda nbytes: None) -> None:
        """`grew` hears how much memory each line takes."""
        self._lines: deque[Line] = deque()
        self._bytes = 0
        self._grew = grew
        self.nbytes = 0
        """Memory of all lines."""

    def add(self, line: Line) -> None:
        """Keep a line, and drop the oldest beyond the bounds."""
        self._lines.append(line)
        self._bytes += len(line.text)
        self.nbytes += _memory_of(line)
        while len(self._lines) > LINES_MAX or self._bytes > BYTES_MAX:
            self._drop()
        self._grew(_memory_of(line))

    def cut(self, nbytes: int) -> None:
        """Let the oldest go until the rest takes no more memory than that."""
        while self.nbytes > nbytes:
            self._drop()

    def _drop(self) -> None:
        line = self._lines.popleft()
        self._bytes -= len(line.text)
        self.nbytes -= _memory_of(line)

    def lines(self) -> list[Line]:
        """All that are kept."""
        return list(self._lines)


class Records:
    """The record of each family that has had a worker, while one of its functions or workers is there."""

    def __init__(self) -> None:
        self._of: WeakValueDictionary[FamilyId, Printed] = WeakValueDictionary()
        self._grown = 0
        """Bytes that came since all records were last looked at."""

    def of(self, family: FamilyId) -> Printed:
        """The family's record, which exists as long as a caller references it."""
        return self._of.setdefault(family, Printed(self._grew))

    def _grew(self, nbytes: int) -> None:
        self._grown += nbytes
        if self._grown < LOOK_BYTES:
            return
        self._grown = 0
        records = list(self._of.values())
        if sum(each.nbytes for each in records) > RECORDS_BYTES_MAX:
            for each in records:
                each.cut(RECORDS_BYTES_MAX // len(records))


def _memory_of(line: Line) -> int:
    return sys.getsizeof(line.text) + LINE_BYTES

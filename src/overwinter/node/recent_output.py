"""Keeps the last lines that the code of functions printed, bounded in number and in characters.

Functions of a family have the same code in the same workers, so they share one record; each line names the worker. The
record is dropped with the last function and worker of the family. All records together are bounded too, because a
tenant may have thousands of functions.
"""

import sys
from collections import deque
from collections.abc import Callable
from weakref import WeakValueDictionary

import msgspec

from overwinter.core.ids import FamilyId, WorkerId

LINES_MAX = 500
CHARACTERS_MAX = 32 << 10
"""The most characters of text in one record."""
RECORDS_BYTES_MAX = 64 << 20
"""The most memory of all records. Beyond it, each keeps the latest lines in an equal part."""
CHECK_BYTES = 4 << 20
"""The memory of new lines between two checks of that limit."""
LINE_BYTES = 128
"""The memory of a line in addition to its text."""


class OutputLine(msgspec.Struct, frozen=True):
    """One line."""

    at: float
    """The time at which the node read it, in seconds since 1970."""
    worker: WorkerId
    text: str


class RecentOutput:
    """The last lines that a family printed, the oldest first. Used on the event loop's thread only."""

    def __init__(self, grew: Callable[[int], None] = lambda nbytes: None) -> None:
        """Create it. `grew` is called with the memory of each line."""
        self._lines: deque[OutputLine] = deque()
        self._characters = 0
        self._grew = grew
        self.nbytes = 0
        """The memory of all lines."""

    def add(self, line: OutputLine) -> None:
        """Add a line, and drop the oldest lines beyond the limits."""
        self._lines.append(line)
        self._characters += len(line.text)
        self.nbytes += _memory_of(line)
        while len(self._lines) > LINES_MAX or self._characters > CHARACTERS_MAX:
            self._drop()
        self._grew(_memory_of(line))

    def cut(self, nbytes: int) -> None:
        """Drop the oldest lines until the rest takes no more than this much memory."""
        while self.nbytes > nbytes:
            self._drop()

    def _drop(self) -> None:
        line = self._lines.popleft()
        self._characters -= len(line.text)
        self.nbytes -= _memory_of(line)

    def lines(self) -> list[OutputLine]:
        """Return all kept lines."""
        return list(self._lines)


class Records:
    """The record of each family that has had a worker, while one of its functions or workers exists."""

    def __init__(self) -> None:
        self._of: WeakValueDictionary[FamilyId, RecentOutput] = WeakValueDictionary()
        self._grown = 0
        """The memory of the lines added since the last check of all records."""

    def of(self, family: FamilyId) -> RecentOutput:
        """Return the family's record, which exists as long as a caller references it."""
        return self._of.setdefault(family, RecentOutput(self._grew))

    def _grew(self, nbytes: int) -> None:
        self._grown += nbytes
        if self._grown < CHECK_BYTES:
            return
        self._grown = 0
        records = list(self._of.values())
        if sum(each.nbytes for each in records) > RECORDS_BYTES_MAX:
            for each in records:
                each.cut(RECORDS_BYTES_MAX // len(records))


def _memory_of(line: OutputLine) -> int:
    return sys.getsizeof(line.text) + LINE_BYTES

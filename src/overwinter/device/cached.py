"""Places blocks as a cache of freed blocks does: Torpor-Block, a baseline in Torpor's paper (figure 13).

A freed block is kept for the next one of the same size. When a block fits nowhere else, freed blocks are returned to
the free memory until it does. Each block cut out of the free memory stands for a native allocation, each one returned
for a native free.
"""

from bisect import bisect, insort
from collections.abc import Iterable, Sequence

from overwinter.device.allocation import Allocator, Move
from overwinter.device.partitions import rounded


class CachedAllocator(Allocator):
    """The blocks of an arena, the freed ones by size, and the memory that was never cut or was returned."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.native_calls = 0
        """Allocations from the free memory, and returns to it."""
        self._blocks: dict[int, int] = {}
        self._cached: dict[int, list[int]] = {}
        self._free = [(0, nbytes)]
        """Start and stop of each free range, ascending, never adjacent."""

    @property
    def free_bytes(self) -> int:
        """Bytes that no block takes, cached ones included."""
        return self.nbytes - sum(self._blocks.values())

    def place(self, sizes: Sequence[int]) -> list[int] | None:
        """Return the offsets of new blocks. If they do not all fit, return None and place none."""
        placed: list[int] = []
        for size in map(rounded, sizes):
            offset = self._place_block(size)
            if offset is None:
                self.free(placed)
                return None
            self._blocks[offset] = size
            placed.append(offset)
        return placed

    def free(self, offsets: Iterable[int]) -> None:
        """Keep the memory of these blocks for others of their sizes."""
        for offset in offsets:
            self._cached.setdefault(self._blocks.pop(offset), []).append(offset)

    def consolidate(self, largest: int = 0) -> list[Move]:
        """A cache never moves blocks."""
        return []

    def _place_block(self, size: int) -> int | None:
        if self._cached.get(size):
            return self._cached[size].pop(0)
        offset = self._cut(size)
        while offset is None and self._return_one():
            offset = self._cut(size)
        return offset

    def _cut(self, size: int) -> int | None:
        for at, (start, stop) in enumerate(self._free):
            if stop - start >= size:
                self._free[at : at + 1] = [(start + size, stop)] if stop - start > size else []
                self.native_calls += 1
                return start
        return None

    def _return_one(self) -> bool:
        """Return one cached block of the largest size to the free memory; False if there is none."""
        size = max((size for size, offsets in self._cached.items() if offsets), default=0)
        if not size:
            return False
        start = self._cached[size].pop(0)
        stop = start + size
        self.native_calls += 1
        at = bisect(self._free, (start, stop))
        if at < len(self._free) and self._free[at][0] == stop:
            stop = self._free.pop(at)[1]
        if at and self._free[at - 1][1] == start:
            start = self._free.pop(at - 1)[0]
        insort(self._free, (start, stop))
        return True

"""Places blocks within one partition of an arena: in slots of one size, or in buddies.

Offsets count from the start of the partition. Sizes are multiples of `GRANULE_BYTES`.
"""

from bisect import bisect_right
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate, takewhile
from typing import Protocol

GRANULE_BYTES = 4096


def rounded(nbytes: int) -> int:
    """`nbytes` rounded up to whole granules; a block has at least one."""
    return max(1, -(-nbytes // GRANULE_BYTES)) * GRANULE_BYTES


class Partition(Protocol):
    """A part of the arena in which blocks are placed."""

    def take(self, sizes: Sequence[int]) -> list[int]:
        """Return the offsets of new blocks: as many of the given ones, from the first on, as fit here one behind the
        other. An empty list: the first does not fit.
        """
        ...

    def free(self, offset: int, nbytes: int) -> None:
        """Free the memory of a block."""
        ...


class Buddies:
    """A partition in which free memory lies in aligned chunks of powers of two that merge with their buddies.

    A block that is smaller than its chunk returns the rest of it, so that rounding loses at most a granule.
    """

    def __init__(self, nbytes: int, start: int = 0) -> None:
        """`nbytes` is a power of two granules, of which those before `start` are not used."""
        self._top = (nbytes // GRANULE_BYTES).bit_length() - 1
        self._free: list[set[int]] = [set() for _ in range(self._top + 1)]
        self._most = nbytes // GRANULE_BYTES
        """The granules that a range of adjacent free chunks has at most, until a block is freed."""
        self._release(start // GRANULE_BYTES, nbytes // GRANULE_BYTES)

    def take(self, sizes: Sequence[int]) -> list[int]:
        """Place as many of these blocks as fit into one range of free memory: in the lowest of the smallest chunks that
        are large enough for these, or else in the shortest such range of adjacent chunks.

        Hundreds of blocks placed one by one would delay a run by milliseconds.
        """
        stops = self._stops(sizes)
        if stops and not self._chunks_for(stops[-1]):
            self._most = max((stop - start for start, stop in self._ranges()), default=0)
            stops = self._stops(sizes)
        if not stops:
            return []
        begin = self._take(stops[-1])
        return [(begin + start) * GRANULE_BYTES for start in (0, *stops[:-1])]

    def _stops(self, sizes: Sequence[int]) -> list[int]:
        """Return where each block ends, one behind the other, in granules, as long as a range may hold them."""
        if sizes[0] > self._most * GRANULE_BYTES:
            return []
        stops = list(accumulate(size // GRANULE_BYTES for size in sizes))
        return stops[: bisect_right(stops, self._most)]

    def _chunks_for(self, granules: int) -> set[int]:
        """Return the starts of the smallest free chunks that are large enough; empty: there is none."""
        return next(filter(None, self._free[(granules - 1).bit_length() :]), set())

    def _take(self, granules: int) -> int:
        """Take so many granules of a range that has them; return their start."""
        if chunks := self._chunks_for(granules):
            begin = min(chunks)
        else:
            begin = min((stop - start, start) for start, stop in self._ranges() if stop - start >= granules)[1]
        end = begin + granules
        for order, starts in enumerate(self._free):
            for start in [start for start in starts if begin <= start < end]:
                starts.remove(start)
                self._release(end, start + (1 << order))
        return begin

    def _ranges(self) -> list[tuple[int, int]]:
        """Return the start and the stop of each range of adjacent free chunks, ascending."""
        chunks = sorted((start, start + (1 << order)) for order, starts in enumerate(self._free) for start in starts)
        ranges: list[tuple[int, int]] = []
        for start, stop in chunks:
            if ranges and ranges[-1][1] == start:
                start = ranges.pop()[0]
            ranges.append((start, stop))
        return ranges

    def free(self, offset: int, nbytes: int) -> None:
        """Free a block."""
        self._most = 1 << self._top
        self._release(offset // GRANULE_BYTES, (offset + nbytes) // GRANULE_BYTES)

    def _release(self, start: int, stop: int) -> None:
        while start < stop:
            aligned = (start & -start).bit_length() - 1 if start else self._top
            order = min(aligned, (stop - start).bit_length() - 1)
            self._merge(start, order)
            start += 1 << order

    def _merge(self, start: int, order: int) -> None:
        while order < self._top and start ^ (1 << order) in self._free[order]:
            self._free[order].remove(start ^ (1 << order))
            start &= ~(1 << order)
            order += 1
        self._free[order].add(start)


class Slots:
    """A partition for blocks of one size, which leave no gaps of other sizes. Other blocks may lie behind the slots, in
    the rest of the partition.
    """

    def __init__(self, nbytes: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._end = nbytes // slot_bytes * slot_bytes
        self._free = list(range(0, self._end, slot_bytes))
        self._rest = Buddies(nbytes, self._end)

    def take(self, sizes: Sequence[int]) -> list[int]:
        """Place blocks of the slots' size in the lowest free slots, and others, or without a free slot, in the rest."""
        if sizes[0] != self.slot_bytes or not self._free:
            return self._rest.take(sizes)
        fitting = takewhile(lambda size: size == self.slot_bytes, sizes[: len(self._free)])
        return [heappop(self._free) for _ in fitting]

    def free(self, offset: int, nbytes: int) -> None:
        """Free a slot or a place in the rest."""
        if offset >= self._end:
            self._rest.free(offset, nbytes)
            return
        heappush(self._free, offset)


class Whole:
    """A partition that lies entirely inside one block. Such a block is larger than a partition and takes several
    adjacent ones.
    """

    def take(self, sizes: Sequence[int]) -> list[int]:
        """Nothing fits here."""
        return []

    def free(self, offset: int, nbytes: int) -> None:
        """Do nothing: the allocator frees the whole partition."""

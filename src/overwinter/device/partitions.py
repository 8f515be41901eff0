"""Places blocks within one partition of an arena: in slots of one size, or in buddies.

Offsets count from the start of the partition. Sizes are multiples of `GRANULE_BYTES`.
"""

from heapq import heappop, heappush
from math import inf
from typing import Protocol

GRANULE_BYTES = 4096


def rounded(nbytes: int) -> int:
    """`nbytes` rounded up to whole granules; a block has at least one."""
    return max(1, -(-nbytes // GRANULE_BYTES)) * GRANULE_BYTES


class Partition(Protocol):
    """A part of the arena in which blocks are placed."""

    def take(self, nbytes: int) -> int | None:
        """Return the offset of a new block, or None if it does not fit here."""
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
        self._unfit: float = inf
        """The least granules that are known not to fit until a block is freed."""
        self._release(start // GRANULE_BYTES, nbytes // GRANULE_BYTES)

    def take(self, nbytes: int) -> int | None:
        """Return the offset of the lowest of the smallest free chunks that are large enough. If there is none, use the
        start of the shortest range of adjacent free chunks that is large enough; None if there is none either.
        """
        granules = nbytes // GRANULE_BYTES
        if granules >= self._unfit:
            return None
        order = (granules - 1).bit_length()
        found = next((larger for larger in range(order, self._top + 1) if self._free[larger]), None)
        if found is None:
            return self._take_adjacent(granules)
        start = min(self._free[found])
        self._free[found].remove(start)
        self._release(start + granules, start + (1 << found))
        return start * GRANULE_BYTES

    def _take_adjacent(self, granules: int) -> int | None:
        # A plain loop over a list: with generators, placing hundreds of blocks would delay a run by milliseconds.
        free = [(start, start + (1 << order)) for order, starts in enumerate(self._free) for start in starts]
        free.sort()
        shortest, begin = inf, 0
        longest = first = last = 0
        for start, stop in (*free, (-1, -1)):
            if start != last:
                longest = max(longest, last - first)
                if granules <= last - first < shortest:
                    shortest, begin = last - first, first
                first = start
            last = stop
        if shortest == inf:
            self._unfit = longest + 1
            return None
        end = begin + granules
        for start, stop in free:
            if begin <= start < end:
                self._free[(stop - start).bit_length() - 1].remove(start)
                if stop > end:
                    self._release(end, stop)
        return begin * GRANULE_BYTES

    def free(self, offset: int, nbytes: int) -> None:
        """Free a block."""
        self._unfit = inf
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

    def take(self, nbytes: int) -> int | None:
        """Return the lowest free slot, if it is exactly as large as the block, or a place in the rest."""
        if nbytes != self.slot_bytes or not self._free:
            return self._rest.take(nbytes)
        return heappop(self._free)

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

    def take(self, nbytes: int) -> int | None:
        """Nothing fits here."""
        return None

    def free(self, offset: int, nbytes: int) -> None:
        """Do nothing: the allocator frees the whole partition."""

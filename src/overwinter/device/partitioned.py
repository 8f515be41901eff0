"""Places blocks in partitions: the arena of Torpor's paper (appendix A.2).

If a function has several blocks of one size that together fill half a partition, new partitions for these have slots of
that size; other new partitions are buddy partitions. The blocks of one function are placed together where there is
room, so that its eviction frees whole partitions. A block larger than a partition takes several adjacent ones.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby, pairwise

from overwinter.device.allocation import Allocator, Move
from overwinter.device.partitions import Buddies, Partition, Slots, Whole, rounded

PARTITION_BYTES = 32 << 20


class PartitionedAllocator(Allocator):
    """The partitions of an arena and the blocks in them."""

    def __init__(self, nbytes: int, partition_bytes: int = PARTITION_BYTES) -> None:
        """`nbytes` is rounded down to whole partitions, whose size is a power of two granules."""
        self.partition_bytes = partition_bytes
        self.nbytes = nbytes // partition_bytes * partition_bytes
        self._partitions: list[Partition | None] = [None] * (nbytes // partition_bytes)
        """None: free."""
        self._blocks: dict[int, int] = {}
        """The rounded size of the block at each offset."""
        self._inside: list[set[int]] = [set() for _ in self._partitions]
        """The blocks that lie in each partition, wholly or in part."""
        self._used_bytes = [0 for _ in self._partitions]
        """The bytes of the blocks in each partition."""

    @property
    def free_bytes(self) -> int:
        """Bytes that no block takes."""
        return self.nbytes - sum(self._used_bytes)

    def place(self, sizes: Sequence[int]) -> list[int] | None:
        """Return the offsets of new blocks of one function, or None, and nothing is placed, if they do not all fit.

        Blocks are placed in the given order. If they do not fit so, the largest are placed first, because smaller ones
        fill the gaps. If that fails too, no new slots are made, because blocks of other sizes cannot use them.
        """
        sizes = [rounded(size) for size in sizes]
        if sum(sizes) > self.free_bytes:
            return None
        given = range(len(sizes))
        descending = sorted(given, key=lambda at: -sizes[at])
        attempts = ((given, self._common(sizes)), (descending, self._common(sizes)), (descending, set[int]()))
        placed = (self._place_all(sizes, order, common) for order, common in attempts)
        return next((each for each in placed if each is not None), None)

    def _place_all(self, sizes: Sequence[int], order: Sequence[int], common: Collection[int]) -> list[int] | None:
        """Place all blocks or none, in this order. New partitions for blocks of `common` sizes have slots."""
        left = sum(sizes)
        placed: list[int] = []
        own: list[int] = []
        for size, alike in groupby((sizes[at] for at in order), lambda size: size if size in common else None):
            together = list(alike)
            while together:
                offsets = self._place_some(together, size is not None, own, left)
                if not offsets:
                    self.free(placed)
                    return None
                placed += offsets
                left -= sum(together[: len(offsets)])
                together = together[len(offsets) :]
                if offsets[0] // self.partition_bytes not in own:
                    own.append(offsets[0] // self.partition_bytes)
        by_position = dict(zip(order, placed, strict=True))
        return [by_position[at] for at in range(len(sizes))]

    def free(self, offsets: Iterable[int]) -> None:
        """Forget the blocks at these offsets; their partitions are free again if nothing else lies in them."""
        parts: dict[int, list[tuple[int, int]]] = {}
        for start in offsets:
            offset, stop = start, start + self._blocks.pop(start)
            while offset < stop:
                index, inside = divmod(offset, self.partition_bytes)
                part = min(stop - offset, self.partition_bytes - inside)
                self._inside[index].remove(start)
                self._used_bytes[index] -= part
                parts.setdefault(index, []).append((inside, part))
                offset += part
        for index, freed in parts.items():
            partition = self._partitions[index] if self._used_bytes[index] else None
            self._partitions[index] = partition
            if partition is not None:
                for inside, part in freed:
                    partition.free(inside, part)

    def consolidate(self, largest: int = 0) -> list[Move]:
        """Move the blocks out of one partition, the one with least in it that can be vacated; or out of several
        adjacent ones, if a block of `largest` bytes needs several and not as many adjacent ones are free. Called again,
        it goes on, until no move is left.

        The moves are to be carried out in order. The memory that each one writes is free when its turn comes.
        """
        count = -(-rounded(largest) // self.partition_bytes)
        if count > 1 and self._range_start(count) is None:
            starts = range(len(self._partitions) - count + 1)
            ranges = sorted((range(start, start + count) for start in starts), key=self._used)
            return next(filter(None, (self._vacate(each, into_free=True) for each in ranges)), [])
        partial = self._by_use(self._in_use())
        return next(filter(None, (self._vacate((index,), into_free=False) for index in partial)), [])

    def _common(self, sizes: Iterable[int]) -> set[int]:
        """Return the sizes of several blocks that together fill half a partition or more: these get slots."""
        counts = Counter(sizes)
        return {
            size
            for size, count in counts.items()
            if count > 1 and size <= self.partition_bytes and 2 * size * count >= self.partition_bytes
        }

    def _place_some(self, sizes: Sequence[int], slots: bool, own: Sequence[int], left: int) -> list[int]:
        """Place as many of these blocks, from the first on, as fit beside the function's others; if the first does not,
        in a new partition if the rest of the function fills half of one, in the fullest partition that has room, or in
        a new partition after all.
        """
        size = sizes[0]
        if size > self.partition_bytes:
            return self._place_large(size)
        fills = 2 * left >= self.partition_bytes
        beside = (index for index in own if not slots or self._has_slots(index, size))
        return (
            self._place_in(beside, sizes)
            or (self._place_in_free(sizes, slots) if fills else [])
            or self._place_in(self._by_use(self._in_use(size))[::-1], sizes)
            or ([] if fills else self._place_in_free(sizes, slots))
        )

    def _has_slots(self, index: int, size: int) -> bool:
        partition = self._partitions[index]
        return isinstance(partition, Slots) and partition.slot_bytes == size

    def _place_in(self, indices: Iterable[int], sizes: Sequence[int]) -> list[int]:
        """Place some blocks, from the first on, in the first of these partitions that has room for it."""
        for index in indices:
            partition = self._partitions[index]
            inside = [] if partition is None else partition.take(sizes)
            if inside:
                offsets = [index * self.partition_bytes + each for each in inside]
                self._blocks.update(zip(offsets, sizes, strict=False))
                self._inside[index].update(offsets)
                self._used_bytes[index] += sum(sizes[: len(offsets)])
                return offsets
        return []

    def _place_in_free(self, sizes: Sequence[int], slots: bool = False, without: Collection[int] = ()) -> list[int]:
        """Place some blocks, from the first on, in a free partition of the shortest range of free ones, so that larger
        blocks still fit.
        """
        ranges = self._free_ranges(without)
        if not ranges:
            return []
        index = min(ranges, key=len)[0]
        whole = self.partition_bytes
        self._partitions[index] = Slots(whole, sizes[0]) if slots else Buddies(whole)
        return self._place_in((index,), sizes)

    def _place_large(self, size: int) -> list[int]:
        """Place a block in adjacent partitions; others may lie behind its end in the last one."""
        count = -(-size // self.partition_bytes)
        start = self._range_start(count)
        if start is None:
            return []
        end = start + size // self.partition_bytes
        for index in range(start, end):
            self._partitions[index] = Whole()
        if size % self.partition_bytes:
            last = self._partitions[end] = Buddies(self.partition_bytes)
            last.take([size % self.partition_bytes])
        offset = start * self.partition_bytes
        self._blocks[offset] = size
        for index in range(start, start + count):
            self._inside[index].add(offset)
            self._used_bytes[index] = min(self.partition_bytes, size - (index - start) * self.partition_bytes)
        return [offset]

    def _range_start(self, count: int) -> int | None:
        """Return the first of `count` adjacent free partitions, at the end of the shortest range that has this many."""
        enough = [each for each in self._free_ranges() if len(each) >= count]
        return min(enough, key=lambda each: (len(each), -each[0]))[-count] if enough else None

    def _free_ranges(self, without: Collection[int] = ()) -> list[range]:
        """Return the free partitions, in ranges of adjacent ones."""
        taken = [-1, *sorted({*self._in_use(), *without}), len(self._partitions)]
        return [range(before + 1, after) for before, after in pairwise(taken) if after - before > 1]

    def _vacate(self, indices: Sequence[int], into_free: bool) -> list[Move]:
        """Move all blocks out of these partitions; nothing changes, and no move is returned, if one cannot be moved."""
        inside = sorted(
            set().union(*(self._inside[index] for index in indices)), key=lambda at: (-self._blocks[at], at)
        )
        others = self._by_use(set(self._in_use()).difference(indices))[::-1]
        room = sum(self.partition_bytes - self._used_bytes[index] for index in others)
        if not into_free and room < self._used(indices):
            return []
        if any(self._blocks[offset] > self.partition_bytes for offset in inside):
            return []
        moves: list[Move] = []
        for source in inside:
            size = self._blocks[source]
            target = self._place_in(others, [size])
            if not target and into_free:
                target = self._place_in_free([size], without=indices)
                others += [each // self.partition_bytes for each in target]
            if not target:
                self.free(move.target for move in moves)
                return []
            moves.append(Move(source, target[0], size))
        self.free(move.source for move in moves)
        return moves

    def _in_use(self, size: int = 0) -> list[int]:
        """Return the partitions that have blocks, and `size` bytes free; with 0 also full ones."""
        most = self.partition_bytes - size
        return [
            index
            for index, partition in enumerate(self._partitions)
            if partition is not None and self._used_bytes[index] <= most
        ]

    def _by_use(self, indices: Iterable[int]) -> list[int]:
        return sorted(indices, key=lambda index: (self._used_bytes[index], index))

    def _used(self, indices: Iterable[int]) -> int:
        return sum(self._used_bytes[index] for index in indices)


def usable_bytes(nbytes: int) -> int:
    """Return what blocks may take of a device's memory: whole partitions."""
    partition_bytes = _partition_bytes_of(nbytes)
    return nbytes // partition_bytes * partition_bytes


def allocator_of(nbytes: int) -> PartitionedAllocator:
    """Return the allocator of a device with so much memory."""
    return PartitionedAllocator(nbytes, _partition_bytes_of(nbytes))


def _partition_bytes_of(nbytes: int) -> int:
    """Return the size of the partitions: smaller ones only where the device is smaller than one."""
    partition_bytes = PARTITION_BYTES
    while partition_bytes > nbytes:
        partition_bytes //= 2
    return partition_bytes

"""Computes what each holder of shared blocks owes over time, when the holders of a block pay equal parts.

For each block the byte-seconds per holder since it was added are stored. A holder owes, for each of its blocks, the
increase since it joined. So the running time of joining and leaving depends only on the number of the holder's own
blocks, however many holders share them, and the sum of what all holders owe equals the total byte-seconds.
"""

from collections import Counter
from collections.abc import Mapping, Set
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

from overwinter.core.ids import Address

H = TypeVar("H")


class _SharedBlock(NamedTuple):
    """One block. It is replaced as a whole, so that other threads never see a partial change."""

    nbytes: int
    holders: int
    per_holder: float
    """The byte-seconds for each holder since the block was added, until `at`."""
    at: float

    def per_holder_until(self, now: float) -> float:
        return self.per_holder + self.nbytes / self.holders * (now - self.at)


class _Holding(NamedTuple):
    sizes: Mapping[Address, int]
    per_holder: float
    """The sum of `per_holder` of all these blocks when this holder joined."""


class SharedBlocks(Generic[H]):
    """The holders of blocks in one place. One thread changes them; other threads may read meanwhile."""

    def __init__(self) -> None:
        self._blocks: dict[Address, _SharedBlock] = {}
        self._holdings: dict[H, _Holding] = {}
        self.nbytes = 0
        """The bytes of all blocks that are held, each counted once."""

    def hold(self, holder: H, sizes: Mapping[Address, int], now: float) -> None:
        """Record that `holder` needs these blocks from now on; it must not hold any yet."""
        per_holder = 0.0
        for address, nbytes in sizes.items():
            block = self._blocks.get(address)
            if block is None:
                block = _SharedBlock(nbytes, 0, 0.0, now)
                self.nbytes += nbytes
            before = block.per_holder_until(now) if block.holders else block.per_holder
            self._blocks[address] = _SharedBlock(nbytes, block.holders + 1, before, now)
            per_holder += before
        self._holdings[holder] = _Holding(sizes, per_holder)

    def release(self, holder: H, now: float) -> float:
        """Remove `holder`, and return the byte-seconds that it owes; 0 if it held no blocks."""
        holding = self._holdings.pop(holder, None)
        if holding is None:
            return 0.0
        per_holder = 0.0
        for address in holding.sizes:
            block = self._blocks[address]
            until = block.per_holder_until(now)
            per_holder += until
            if block.holders > 1:
                self._blocks[address] = _SharedBlock(block.nbytes, block.holders - 1, until, now)
            else:
                del self._blocks[address]
                self.nbytes -= block.nbytes
        return max(0.0, per_holder - holding.per_holder)

    def release_all(self, now: float) -> dict[H, float]:
        """Remove all holders, and return the byte-seconds that each owes."""
        until = {address: block.per_holder_until(now) for address, block in self._blocks.items()}
        holdings, self._holdings, self._blocks, self.nbytes = self._holdings, {}, {}, 0
        return {
            holder: max(0.0, sum(map(until.__getitem__, holding.sizes)) - holding.per_holder)
            for holder, holding in holdings.items()
        }

    def uncharged(self, holder: H, now: float) -> float:
        """Return the byte-seconds that `holder` owes until now."""
        holding = self._holdings.get(holder)
        if holding is None:
            return 0.0
        blocks = (self._blocks.get(address) for address in holding.sizes)
        per_holder = sum(block.per_holder_until(now) for block in blocks if block)
        return max(0.0, per_holder - holding.per_holder)

    def held(self, *holders: H) -> int:
        """Return the bytes of all blocks that these holders need, each counted once."""
        sizes: dict[Address, int] = {}
        for holder in holders:
            holding = self._holdings.get(holder)
            if holding is not None:
                sizes.update(holding.sizes)
        return sum(sizes.values())

    def addresses(self, holder: H) -> Set[Address]:
        """Return the blocks that `holder` needs."""
        holding = self._holdings.get(holder)
        return set() if holding is None else holding.sizes.keys()

    def exclusive(self, *holders: H) -> int:
        """Return the bytes that only these holders need, which would be free without them."""
        blocks, among = self._blocks, Counter(chain.from_iterable(map(self.addresses, holders)))
        return sum(
            block.nbytes
            for address, count in among.items()
            if (block := blocks.get(address)) and block.holders == count
        )

"""Computes what each holder of shared blocks owes over time, when the holders of a block pay equal parts.

A block stores the byte-seconds that one holder of it has paid since the block was added. A holder owes, for each of its
blocks, the increase since it joined. So joining and leaving cost time for the holder's own blocks only, however many
share them, and the sum of all debts equals the total byte-seconds.
"""

from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

from overwinter.core.ids import Address

H = TypeVar("H")


class _Share(NamedTuple):
    """The share of a block. It is replaced as a whole, so that other threads never see a partial change."""

    nbytes: int
    holders: int
    paid: float
    """The byte-seconds of one holder since the block appeared, until `at`."""
    at: float

    def paid_until(self, now: float) -> float:
        return self.paid + self.nbytes / self.holders * (now - self.at)


class _Holding(NamedTuple):
    sizes: Mapping[Address, int]
    nbytes: int
    paid: float
    """The byte-seconds per holder of all these blocks when this holder joined."""


class Shares(Generic[H]):
    """The holders of blocks in one place. One thread changes them; other threads may read meanwhile."""

    def __init__(self) -> None:
        self._blocks: dict[Address, _Share] = {}
        self._holdings: dict[H, _Holding] = {}
        self.nbytes = 0
        """The bytes of all blocks that are held, each counted once."""

    def hold(self, holder: H, sizes: Mapping[Address, int], now: float) -> None:
        """Record that `holder` needs these blocks from now on; it must not hold any yet."""
        paid = 0.0
        for address, nbytes in sizes.items():
            share = self._blocks.get(address)
            if share is None:
                share = _Share(nbytes, 0, 0.0, now)
                self.nbytes += nbytes
            before = share.paid_until(now) if share.holders else share.paid
            self._blocks[address] = _Share(nbytes, share.holders + 1, before, now)
            paid += before
        self._holdings[holder] = _Holding(sizes, sum(sizes.values()), paid)

    def release(self, holder: H, now: float) -> float:
        """Remove `holder`, and return the byte-seconds that it owes; 0 if it held no blocks."""
        holding = self._holdings.pop(holder, None)
        if holding is None:
            return 0.0
        paid = 0.0
        for address in holding.sizes:
            share = self._blocks[address]
            until = share.paid_until(now)
            paid += until
            if share.holders > 1:
                self._blocks[address] = _Share(share.nbytes, share.holders - 1, until, now)
            else:
                del self._blocks[address]
                self.nbytes -= share.nbytes
        return max(0.0, paid - holding.paid)

    def uncharged(self, holder: H, now: float) -> float:
        """Return the byte-seconds that `holder` owes until now."""
        holding = self._holdings.get(holder)
        if holding is None:
            return 0.0
        paid = sum(share.paid_until(now) for address in holding.sizes if (share := self._blocks.get(address)))
        return max(0.0, paid - holding.paid)

    def held(self, holder: H) -> int:
        """Return the bytes of all blocks that `holder` needs."""
        holding = self._holdings.get(holder)
        return 0 if holding is None else holding.nbytes

    def exclusive(self, holder: H) -> int:
        """Return the bytes that only this holder needs, which would be free without it."""
        holding = self._holdings.get(holder)
        if holding is None:
            return 0
        blocks = self._blocks
        return sum(share.nbytes for address in holding.sizes if (share := blocks.get(address)) and share.holders == 1)

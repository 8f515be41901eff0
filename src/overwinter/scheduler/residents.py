"""The blocks that a host store holds or is loading, and for how many functions."""

from collections import Counter
from collections.abc import Mapping

import msgspec

from overwinter.core.ids import Address


class Residents(msgspec.Struct):
    """The blocks that one host store holds, or will hold, for the functions kept there."""

    sharers: Counter[Address] = msgspec.field(default_factory=Counter)
    """How many functions hold a block, or wait for it."""
    sizes: dict[Address, int] = msgspec.field(default_factory=dict)
    nbytes: int = 0

    def missing(self, sizes: Mapping[Address, int]) -> int:
        """Bytes of these that the store neither has nor awaits."""
        return sum(nbytes for address, nbytes in sizes.items() if address not in self.sizes)

    def exclusive(self, sizes: Mapping[Address, int]) -> int:
        """The bytes of these blocks that are freed if the one function that holds them leaves."""
        return sum(nbytes for address, nbytes in sizes.items() if self.sharers[address] == 1)

    def hold(self, sizes: Mapping[Address, int]) -> None:
        """One more function is kept with these."""
        self.nbytes += self.missing(sizes)
        self.sizes.update(sizes)
        self.sharers.update(sizes.keys())

    def release(self, sizes: Mapping[Address, int]) -> None:
        """One function fewer holds these blocks; `unshared` returns those to drop."""
        self.sharers.subtract(sizes.keys())

    def unshared(self, addresses: set[Address]) -> tuple[Address, ...]:
        """Remove those of these blocks that no function holds, and return them."""
        free = sorted(address for address in addresses if self.sharers[address] <= 0)
        for address in free:
            del self.sharers[address]
            self.nbytes -= self.sizes.pop(address, 0)
        return tuple(free)

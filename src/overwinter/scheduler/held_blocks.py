"""The blocks that a host store or a device holds or is loading, and for how many functions."""

from collections import Counter
from collections.abc import Mapping

import msgspec

from overwinter.core.ids import Address


class HeldBlocks(msgspec.Struct):
    """The blocks that one host store or device holds or is loading for functions."""

    holders: Counter[Address] = msgspec.field(default_factory=Counter)
    """The number of functions that have or await each block."""
    sizes: dict[Address, int] = msgspec.field(default_factory=dict)
    nbytes: int = 0

    def missing(self, sizes: Mapping[Address, int]) -> int:
        """Return the bytes of these blocks that it neither holds nor is loading."""
        return sum(nbytes for address, nbytes in sizes.items() if address not in self.sizes)

    def exclusive(self, sizes: Mapping[Address, int]) -> int:
        """The bytes of these blocks that are freed if the one function that holds them leaves."""
        return sum(nbytes for address, nbytes in sizes.items() if self.holders[address] == 1)

    def hold(self, sizes: Mapping[Address, int]) -> None:
        """Add a function with these blocks."""
        self.nbytes += self.missing(sizes)
        self.sizes.update(sizes)
        self.holders.update(sizes.keys())

    def release(self, sizes: Mapping[Address, int]) -> None:
        """Remove a function with these blocks; `remove_unused` then returns those to drop."""
        self.holders.subtract(sizes.keys())

    def remove_unused(self, addresses: set[Address]) -> tuple[Address, ...]:
        """Remove those of these blocks that no function holds, and return them."""
        free = sorted(address for address in addresses if self.holders[address] <= 0)
        for address in free:
            del self.holders[address]
            self.nbytes -= self.sizes.pop(address, 0)
        return tuple(free)

"""The blocks that a host store or a device holds or is loading, and for which functions.

A change takes time in proportion to the blocks of one function, and `exclusive` and `sole_holder` take constant time,
however many functions share the blocks. For this, functions have numbers, and each block the sum of the numbers of its
holders: while it has one holder, the sum is that holder's number.
"""

from collections import Counter
from collections.abc import Mapping

import msgspec

from overwinter.core.ids import Address, FunctionId


class HeldBlocks(msgspec.Struct):
    """The blocks that one host store or device holds or is loading for functions."""

    holders: Counter[Address] = msgspec.field(default_factory=Counter)
    """The number of functions that have or await each block."""
    sizes: dict[Address, int] = msgspec.field(default_factory=dict)
    nbytes: int = 0
    references: int = 0
    """The number of blocks of all functions, a shared block counted for each of its holders."""
    _sums: dict[Address, int] = msgspec.field(default_factory=dict)
    _numbers: dict[FunctionId, int] = msgspec.field(default_factory=dict)
    _exclusive: dict[int, int] = msgspec.field(default_factory=dict)
    """The exclusive bytes of the function with each number."""
    _functions: dict[int, FunctionId] = msgspec.field(default_factory=dict)
    _last: int = 0

    def missing(self, sizes: Mapping[Address, int]) -> int:
        """Return the bytes of these blocks that it neither holds nor is loading."""
        return sum(nbytes for address, nbytes in sizes.items() if address not in self.sizes)

    def exclusive(self, function: FunctionId) -> int:
        """The bytes that are freed if this function leaves: those of the blocks that it alone holds."""
        return self._exclusive.get(self._numbers.get(function, 0), 0)

    def sole_holder(self, address: Address) -> FunctionId | None:
        """The function that alone holds this block; None: no function or several hold it."""
        return self._functions[self._sums[address]] if self.holders[address] == 1 else None

    def hold(self, function: FunctionId, sizes: Mapping[Address, int]) -> None:
        """Add a function with these blocks; it must not hold any yet."""
        assert function not in self._numbers, f"{function} holds its blocks already"
        self._last += 1
        number, holders, sums, exclusive = self._last, self.holders, self._sums, 0
        for address, nbytes in sizes.items():
            count = holders[address]
            if count == 0:
                exclusive += nbytes
                if address not in self.sizes:
                    self.sizes[address] = nbytes
                    self.nbytes += nbytes
            elif count == 1:
                self._exclusive[sums[address]] -= nbytes
            holders[address] = count + 1
            sums[address] = sums.get(address, 0) + number
        self.references += len(sizes)
        self._numbers[function], self._functions[number], self._exclusive[number] = number, function, exclusive

    def release(self, function: FunctionId, sizes: Mapping[Address, int]) -> None:
        """Remove a function with these blocks; `remove_unused` then returns those to drop."""
        number, holders, sums = self._numbers.pop(function), self.holders, self._sums
        for address, nbytes in sizes.items():
            holders[address] = count = holders[address] - 1
            sums[address] -= number
            if count == 1:
                self._exclusive[sums[address]] += nbytes
        self.references -= len(sizes)
        del self._functions[number], self._exclusive[number]

    def remove_unused(self, addresses: set[Address]) -> tuple[Address, ...]:
        """Remove those of these blocks that no function holds, and return them."""
        free = sorted(address for address in addresses if self.holders[address] <= 0)
        for address in free:
            del self.holders[address]
            self._sums.pop(address, None)
            self.nbytes -= self.sizes.pop(address, 0)
        return tuple(free)

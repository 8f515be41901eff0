"""The blocks of a function as a device sees them."""

from collections.abc import Sequence

from overwinter.core.ids import Address
from overwinter.model.structure import Weight

WeightPosition = tuple[Address, int]
"""The block of a weight, and its offset there."""


def block_bytes(
    weights: Sequence[Weight], first_uses: Sequence[int], positions: Sequence[WeightPosition]
) -> dict[Address, int]:
    """Return the bytes of each block up to the end of its last weight, in the order in which the program first uses
    them.
    """
    found: dict[Address, int] = {}
    ordered = sorted(zip(first_uses, weights, positions, strict=True), key=lambda each: each[0])
    for _, weight, (address, offset) in ordered:
        found[address] = max(found.get(address, 0), offset + weight.nbytes)
    return found

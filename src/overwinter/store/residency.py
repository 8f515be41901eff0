"""Missing bytes: the cost of bringing something to a place.

    missing(x, place) = sum of nbytes(b) over the blocks b that x needs and that place does not hold

The scheduler chooses devices and configurations by the same quantity, which it computes from its own tables. A
fine-tuned variant of a resident model misses only the blocks that differ, on every tier.
"""

from collections.abc import Iterable
from typing import Protocol

from overwinter.core.ids import Address


class Sized(Protocol):
    """Anything with an address and a size: a blob, a block, the scheduler's record of one."""

    @property
    def address(self) -> Address:
        """BLAKE3 of the content."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the content."""
        ...


class Place(Protocol):
    """Something that can hold blocks: repository, host store, device arena."""

    def holds(self, address: Address) -> bool:
        """Whether the whole block is here."""
        ...


def distinct(blobs: Iterable[Sized]) -> dict[Address, int]:
    """Return the bytes by address, each address once, in the order of first mention."""
    return {blob.address: blob.nbytes for blob in blobs}


def missing_bytes(blobs: Iterable[Sized], place: Place) -> int:
    """Return the bytes of `blobs` that `place` lacks; each address counts once."""
    return sum(nbytes for address, nbytes in distinct(blobs).items() if not place.holds(address))

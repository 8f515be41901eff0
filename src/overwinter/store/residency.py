"""Missing bytes: the cost of bringing something to a place.

    missing(x, place) = sum of nbytes(b) over the blocks b that x needs and that place does not hold

Placement, heaviness, eviction and billing all use this one quantity. A fine-tuned sibling of a resident model misses
only its own delta, on every tier.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import Protocol, TypeVar

from overwinter.core.ids import Address

Key = TypeVar("Key", bound=Hashable)


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
    """Bytes by address, each address once, in the order of first mention."""
    return {blob.address: blob.nbytes for blob in blobs}


def missing_bytes(blobs: Iterable[Sized], place: Place) -> int:
    """Bytes that `place` lacks of `blobs`; each address counts once."""
    return sum(nbytes for address, nbytes in distinct(blobs).items() if not place.holds(address))


def exclusive_bytes(blobs: Iterable[Sized], others: Iterable[Iterable[Sized]]) -> int:
    """Bytes of `blobs` that none of the `others` needs: what removing their owner would free."""
    shared = {blob.address for other in others for blob in other}
    return sum(nbytes for address, nbytes in distinct(blobs).items() if address not in shared)


def split_bytes(owners: Mapping[Key, Iterable[Sized]]) -> dict[Key, float]:
    """Each owner's bytes when the owners of a block pay equal parts of it; the sum is what all hold together."""
    needs = {owner: distinct(blobs) for owner, blobs in owners.items()}
    sharers = Counter(address for blobs in needs.values() for address in blobs)
    return {
        owner: sum(nbytes / sharers[address] for address, nbytes in blobs.items()) for owner, blobs in needs.items()
    }

"""Which blocks lie in a device's memory, where, and who holds them.

A block lies here once, and any number of functions hold it. A function's eviction forgets the blocks that it alone
held. Nothing is copied back, because the host store has every block. There are no tensors here, only offsets.
"""

from collections.abc import Mapping

from overwinter.core.ids import Address
from overwinter.device.allocation import Allocator, Extent, Move


class Arena:
    """The table of blocks over an allocator."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._extents: dict[Address, Extent] = {}
        self._at: dict[int, Address] = {}
        self._holders: dict[Address, set[str]] = {}
        self._held: dict[str, set[Address]] = {}
        self._placed_at: dict[str, int] = {}
        """The last change that may have moved blocks of a holder."""
        self._changes = 0

    @property
    def nbytes(self) -> int:
        """The memory for blocks, which is reserved when the executor starts."""
        return self._allocator.nbytes

    @property
    def free_bytes(self) -> int:
        """Bytes that no block takes. A block fits only if enough of them are adjacent."""
        return self._allocator.free_bytes

    def missing(self, blocks: Mapping[Address, int]) -> dict[Address, int]:
        """Return those of these blocks that do not lie here, with their bytes."""
        return {address: nbytes for address, nbytes in blocks.items() if address not in self._extents}

    def hold(self, holder: str, blocks: Mapping[Address, int]) -> tuple[Address, ...] | None:
        """Give each block a place and a further holder. Return the new blocks, in the given order, whose bytes are to
        be copied; or None, and nothing has changed, if they do not all fit.
        """
        if blocks.keys() <= self._held.get(holder, set()):
            # It may be a function without blocks, which is new here.
            self._placed_at.setdefault(holder, self._changes)
            return ()
        missing = self.missing(blocks)
        offsets = self._allocator.place(list(missing.values()))
        if offsets is None:
            return None
        for (address, nbytes), offset in zip(missing.items(), offsets, strict=True):
            self._extents[address] = Extent(offset, nbytes)
            self._at[offset] = address
        for address in blocks:
            self._holders.setdefault(address, set()).add(holder)
        self._held.setdefault(holder, set()).update(blocks)
        self._changes += 1
        self._placed_at[holder] = self._changes
        return tuple(missing)

    def evict(self, holder: str) -> tuple[Address, ...]:
        """Forget a holder, and the blocks that nobody else holds; return those."""
        freed: list[Address] = []
        offsets: list[int] = []
        self._placed_at.pop(holder, None)
        for address in sorted(self._held.pop(holder, ())):
            self._holders[address].remove(holder)
            if not self._holders[address]:
                del self._holders[address]
                offset = self._extents.pop(address).offset
                del self._at[offset]
                offsets.append(offset)
                freed.append(address)
        self._allocator.free(offsets)
        return tuple(freed)

    def extent(self, address: Address) -> Extent:
        """Where a block lies now; it may lie elsewhere after `consolidate`."""
        return self._extents[address]

    def consolidate(self, blocks: Mapping[Address, int]) -> list[Move]:
        """Bring some free memory together for these blocks; return the moves of memory that must follow, in order.
        Called again, it goes on; without a move, nothing is left to do.
        """
        moves = self._allocator.consolidate(max(self.missing(blocks).values(), default=0))
        for move in moves:
            address = self._at.pop(move.source)
            self._at[move.target] = address
            self._extents[address] = Extent(move.target, self._extents[address].nbytes)
        if moves:
            self._changes += 1
            self._placed_at = dict.fromkeys(self._placed_at, self._changes)
        return moves

    def placement_version(self, holder: str) -> int:
        """Return a number that changes whenever blocks of the holder may have been moved."""
        return self._placed_at[holder]

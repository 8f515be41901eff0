"""What all devices have in common: an arena over memory that was reserved at the start."""

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch

from overwinter.core.ids import Address, TenantId
from overwinter.device.allocation import Allocator, Extent, Move
from overwinter.device.arena import Arena
from overwinter.device.interface import Device, UnusableDeviceError
from overwinter.device.memory_owners import MemoryOwners
from overwinter.device.partitions import GRANULE_BYTES

CONSOLIDATE_FACTOR = 2
"""Blocks are moved only if the free memory is at least this many times as large as the blocks to be placed. Otherwise
it costs less to evict one more function and to load it again (benchmarks.allocation).
"""


class ReservedDevice(Device):
    """A device whose blocks lie in a tensor of bytes."""

    def __init__(self, name: str, allocator: Allocator, memory: torch.Tensor) -> None:
        """`memory`: all zeros, as many bytes as the allocator has."""
        self.name = name
        self.torch_device = memory.device
        self._arena = Arena(allocator)
        self._owners = MemoryOwners(allocator.nbytes)
        self._memory = memory

    def placement_version(self, holder: str) -> int:
        """Return a number that changes whenever blocks of the holder may have been moved."""
        return self._arena.placement_version(holder)

    def missing(self, blocks: Mapping[Address, int]) -> dict[Address, int]:
        """Return those of these blocks that do not lie here, with their bytes."""
        return self._arena.missing(blocks)

    def hold(self, holder: str, tenant: TenantId, blocks: Mapping[Address, int]) -> tuple[Address, ...] | None:
        """Give each block a place. If they do not fit and much is free, first move others to join the free memory.
        Clear what another tenant left.
        """
        new = self._arena.hold(holder, blocks)
        if new is None and self._arena.free_bytes >= CONSOLIDATE_FACTOR * sum(self._arena.missing(blocks).values()):
            while new is None and (moves := self._arena.consolidate(blocks)):
                self._carry_out(moves)
                new = self._arena.hold(holder, blocks)
        for extent in _joined(self._arena.extent(address) for address in new or ()):
            self._clear(extent, tenant)
        return new

    def evict(self, holder: str) -> tuple[Address, ...]:
        """Forget a holder, and the blocks that nobody else holds; return those."""
        return self._arena.evict(holder)

    def fault(self) -> str | None:
        """Return None: this device remains usable after every error."""
        return None

    def storage(self, address: Address) -> torch.UntypedStorage:
        """Return the memory of a block as a separate storage: `as_strided` on a view could reach the whole arena."""
        offset, nbytes = self._arena.extent(address)
        pointer = self._memory.data_ptr() + offset
        storage = torch._C._construct_storage_from_data_pointer(pointer, self.torch_device, nbytes)
        return cast(torch.UntypedStorage, storage)  # PyTorch declares another type than it returns.

    def _bytes(self, address: Address) -> torch.Tensor:
        offset, nbytes = self._arena.extent(address)
        return self._memory[offset : offset + nbytes]

    def _clear(self, extent: Extent, tenant: TenantId) -> None:
        offset, nbytes = extent
        for start, stop in self._owners.others(offset, offset + nbytes, tenant):
            self._memory[start:stop] = 0
        self._owners.give(offset, offset + nbytes, tenant)

    def _carry_out(self, moves: Sequence[Move]) -> None:
        """Carry out moves that the arena has recorded already."""
        try:
            self._move(moves)
        except Exception as error:
            raise UnusableDeviceError(f"blocks of device {self.name} could not be moved: {error}") from error

    def _move(self, moves: Sequence[Move]) -> None:
        """Move the bytes of blocks to their new positions. Subclasses first wait for copies that use the old ones."""
        for source, target, nbytes in moves:
            kept = list(self._owners.ranges(source, source + nbytes))
            self._memory[target : target + nbytes] = self._memory[source : source + nbytes]
            for start, stop, tenant in kept:
                if tenant is not None:
                    self._owners.give(start - source + target, stop - source + target, tenant)


def _joined(extents: Iterable[Extent]) -> list[Extent]:
    """Join extents between which no block fits: few remain, because a function's blocks lie together."""
    joined: list[Extent] = []
    for extent in sorted(extents):
        last = joined[-1] if joined else Extent(-GRANULE_BYTES, 0)
        if extent.offset - (last.offset + last.nbytes) < GRANULE_BYTES:
            joined[-1] = Extent(last.offset, extent.offset + extent.nbytes - last.offset)
        else:
            joined.append(extent)
    return joined

"""A virtual accelerator: an arena over CPU memory, a thread as its copy stream, and programs that run on the CPU."""

import mmap
import os
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import torch

from overwinter.core.errors import StoreError
from overwinter.core.ids import Address, TenantId
from overwinter.device.allocation import Allocator, Extent, Move
from overwinter.device.arena import Arena
from overwinter.device.interface import Copy, Device, Event, Way
from overwinter.device.link import Link
from overwinter.device.scrubbing import Tenancy
from overwinter.device.shared import Table
from overwinter.model.compile import Compiled, Waiting

FRAGMENTED = 2
"""Blocks are moved together only if so many times the bytes to be placed are free. Otherwise more bytes would be moved
than evicting one function more would cost (benchmarks.allocation).
"""


class CopyEvent(Event):
    """The end of a transfer in the copy thread."""

    def __init__(self, future: Future[list[int]]) -> None:
        self._future = future

    def wait(self) -> None:
        """Return when the transfer is done; raise what made it fail."""
        self._future.result()

    def moved(self) -> Sequence[int] | None:
        """Return, when the transfer is over, the bytes that came each way; None: it failed."""
        return None if self._future.exception() else self._future.result()


class VirtualDevice(Device):
    """A device whose memory and processor are the CPU's."""

    torch_device = torch.device("cpu")

    def __init__(self, name: str, allocator: Allocator, shared: int | None = None) -> None:
        """Reserve all of the allocator's memory. `shared`: a file for it (`shared.shared_memory`), out of which other
        processes may copy blocks.
        """
        self.name = name
        self._arena = Arena(allocator)
        self._tenancy = Tenancy(allocator.nbytes)
        if shared is None:
            private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
            reserved = mmap.mmap(-1, allocator.nbytes, private)
        else:
            reserved = mmap.mmap(shared, os.fstat(shared).st_size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._memory = torch.frombuffer(reserved, dtype=torch.uint8, count=allocator.nbytes)
        self._table = None if shared is None else Table(memoryview(reserved))
        self._stream = ThreadPoolExecutor(1, thread_name_prefix=f"copies to {name}")

    def close(self) -> None:
        """Wait for the copies and end the copy thread. No tensor in the arena may be used afterwards."""
        self._stream.shutdown()

    @property
    def epoch(self) -> int:
        """Counts the changes after which a block may lie elsewhere than before."""
        return self._arena.epoch

    def missing(self, blocks: Mapping[Address, int]) -> dict[Address, int]:
        """Return those of these blocks that do not lie here, with their bytes."""
        return self._arena.missing(blocks)

    def hold(self, holder: str, tenant: TenantId, blocks: Mapping[Address, int]) -> tuple[Address, ...] | None:
        """Give each block a place, after moving others together if much is free; clear what another tenant left."""
        new = self._arena.hold(holder, blocks)
        if new is None and self._arena.free_bytes >= FRAGMENTED * sum(self._arena.missing(blocks).values()):
            while new is None and (moves := self._arena.consolidate(blocks)):
                self._move(moves)
                new = self._arena.hold(holder, blocks)
        for address in new or ():
            self._clear(self._arena.extent(address), tenant)
        return new

    def evict(self, holder: str) -> tuple[Address, ...]:
        """Forget a holder, and the blocks that nobody else holds; return those."""
        freed = self._arena.evict(holder)
        if self._table is not None:
            for address in freed:
                self._table.clear(address)
        return freed

    def storage(self, address: Address) -> torch.UntypedStorage:
        """Return the memory of a block. Views of the arena would share one storage: `as_strided` reaches all of it."""
        offset, nbytes = self._arena.extent(address)
        pointer = self._memory.data_ptr() + offset
        storage = torch._C._construct_storage_from_data_pointer(pointer, self.torch_device, nbytes)
        return cast(torch.UntypedStorage, storage)  # PyTorch declares another type than it returns.

    def copy(self, copies: Sequence[Copy], ways: Sequence[Way]) -> CopyEvent:
        """Copy parts of blocks as one transfer, after all copies that were asked for before. What does not come the
        first way, because its source has evicted it meanwhile, comes the next.
        """
        return CopyEvent(self._stream.submit(self._transfer, copies, ways))

    def run(
        self, program: Compiled | Waiting, weights: Sequence[torch.Tensor], *arguments: Any
    ) -> tuple[torch.Tensor, ...]:
        """Run a compiled program in the calling thread. An output that is a part of a weight is copied."""
        with torch.inference_mode():
            outputs = program(weights, *arguments)
            return tuple(output.clone() if self._lies_in_arena(output) else output for output in outputs)

    def _lies_in_arena(self, tensor: torch.Tensor) -> bool:
        start = self._memory.data_ptr()
        return start <= tensor.untyped_storage().data_ptr() < start + self._arena.nbytes

    def _clear(self, extent: Extent, tenant: TenantId) -> None:
        offset, nbytes = extent
        for start, stop in self._tenancy.others(offset, offset + nbytes, tenant):
            self._memory[start:stop] = 0
        self._tenancy.give(offset, offset + nbytes, tenant)

    def _move(self, moves: Sequence[Move]) -> None:
        self._stream.submit(bool).result()  # Copies that were asked for use the old places.
        entered = [] if self._table is None else self._table.clear_moved(self._arena.extent)
        for source, target, nbytes in moves:
            kept = list(self._tenancy.ranges(source, source + nbytes))
            self._memory[target : target + nbytes] = self._memory[source : source + nbytes]
            for start, stop, tenant in kept:
                if tenant is not None:
                    self._tenancy.give(start - source + target, stop - source + target, tenant)
        self._enter(entered)

    def _enter(self, blocks: Sequence[Address]) -> None:
        """Let other devices copy these blocks, whose bytes have arrived."""
        if self._table is not None:
            for address in blocks:
                self._table.enter(address, self._arena.extent(address))

    def _bytes(self, address: Address) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8).set_(self.storage(address))

    def _transfer(self, copies: Sequence[Copy], ways: Sequence[Way]) -> list[int]:
        """Copy each part the first way that it can come; return the bytes that came each way."""
        left, moved = list(copies), []
        for loan, link in ways:
            here = [copy for copy in left if copy.address in loan.blocks] if left else []
            self._copy(here, loan.blocks, link)
            came = {copy for copy in here if not loan.has_changed(copy.address)}
            moved.append(sum(copy.nbytes for copy in came))
            left = [copy for copy in left if copy not in came]
        if left:
            raise StoreError(f"block {left[0].address} was evicted from its device, and lies nowhere else")
        self._enter([each.address for each in copies if each[1:] == (0, self._arena.extent(each.address).nbytes)])
        return moved

    def _copy(self, copies: Sequence[Copy], blocks: Mapping[Address, torch.Tensor], link: Link) -> None:
        """Copy piece by piece, as fast as the link would."""
        parts = deque(
            (self._bytes(address)[offset : offset + nbytes], blocks[address][offset : offset + nbytes])
            for address, offset, nbytes in copies
        )
        for start, stop in link.transfer(sum(copy.nbytes for copy in copies)):
            left = stop - start
            while left:
                target, found = parts.popleft()
                target[:left] = found[:left]
                if len(target) > left:
                    parts.appendleft((target[left:], found[left:]))
                left -= min(left, len(target))

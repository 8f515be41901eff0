"""A virtual accelerator: an arena over CPU memory, a thread as its copy stream, and programs that run on the CPU."""

import mmap
import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import Any, cast

import torch

from overwinter.core.ids import Address, TenantId
from overwinter.device.allocation import Allocator, Extent, Move
from overwinter.device.arena import Arena
from overwinter.device.interface import Copy, Device, Event
from overwinter.device.link import Link
from overwinter.device.scrubbing import Tenancy
from overwinter.model.compile import Compiled, Waiting

FRAGMENTED = 2
"""Blocks are moved together only if so many times the bytes to be placed are free. Otherwise more bytes would be moved
than evicting one function more would cost (benchmarks.allocation).
"""


class CopyEvent(Event):
    """The end of a transfer in the copy thread."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        """Return when the transfer is done; raise what made it fail."""
        self._future.result()

    def succeeded(self) -> bool:
        """Return, when the transfer is over, whether it did not fail."""
        return self._future.exception() is None


class VirtualDevice(Device):
    """A device whose memory and processor are the CPU's."""

    torch_device = torch.device("cpu")

    def __init__(self, name: str, allocator: Allocator) -> None:
        """Reserve all of the allocator's memory."""
        self.name = name
        self._arena = Arena(allocator)
        self._tenancy = Tenancy(allocator.nbytes)
        reserved = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        self._memory = torch.frombuffer(mmap.mmap(-1, allocator.nbytes, reserved), dtype=torch.uint8)
        self._lock = threading.Lock()
        """Other devices borrow blocks from other threads."""
        self._lent = 0
        self._loans = count()
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
        with self._lock:
            new = self._arena.hold(holder, blocks)
            if new is None and self._arena.free_bytes >= FRAGMENTED * sum(self._arena.missing(blocks).values()):
                while new is None and not self._lent and (moves := self._arena.consolidate(blocks)):
                    self._move(moves)
                    new = self._arena.hold(holder, blocks)
            for address in new or ():
                self._clear(self._arena.extent(address), tenant)
            return new

    def evict(self, holder: str) -> tuple[Address, ...]:
        """Forget a holder, and the blocks that nobody else holds; return those."""
        with self._lock:
            return self._arena.evict(holder)

    @contextmanager
    def lend(self, blocks: Collection[Address]) -> Iterator[Mapping[Address, torch.Tensor]]:
        """Give another device the bytes of those of these blocks that lie here. It holds them meanwhile."""
        with self._lock:
            self._lent += 1
            loan = f"loan {next(self._loans)}"
            here = {address: self._arena.extent(address).nbytes for address in blocks if self._arena.lies_here(address)}
            self._arena.hold(loan, here)
            lent = {address: self._bytes(address) for address in here}
        try:
            yield lent
        finally:
            with self._lock:
                self._lent -= 1
                self._arena.evict(loan)

    def storage(self, address: Address) -> torch.UntypedStorage:
        """Return the memory of a block. Views of the arena would share one storage: `as_strided` reaches all of it."""
        offset, nbytes = self._arena.extent(address)
        pointer = self._memory.data_ptr() + offset
        storage = torch._C._construct_storage_from_data_pointer(pointer, self.torch_device, nbytes)
        return cast(torch.UntypedStorage, storage)  # PyTorch declares another type than it returns.

    def copy(self, copies: Sequence[Copy], lent: Mapping[Address, torch.Tensor], link: Link) -> CopyEvent:
        """Copy parts of blocks as one transfer, after all copies that were asked for before."""
        return CopyEvent(self._stream.submit(self._transfer, copies, lent, link))

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
        for source, target, nbytes in moves:
            kept = list(self._tenancy.ranges(source, source + nbytes))
            self._memory[target : target + nbytes] = self._memory[source : source + nbytes]
            for start, stop, tenant in kept:
                if tenant is not None:
                    self._tenancy.give(start - source + target, stop - source + target, tenant)

    def _bytes(self, address: Address) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8).set_(self.storage(address))

    def _transfer(self, copies: Sequence[Copy], lent: Mapping[Address, torch.Tensor], link: Link) -> None:
        """Copy piece by piece, as fast as the link would."""
        parts = deque(
            (self._bytes(address)[offset : offset + nbytes], lent[address][offset : offset + nbytes])
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

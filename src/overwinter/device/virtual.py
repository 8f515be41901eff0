"""A virtual accelerator: an arena over CPU memory, a thread as its copy stream, and programs that run on the CPU."""

import mmap
import os
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from overwinter.core.errors import StoreError
from overwinter.core.ids import Address
from overwinter.device.allocation import Allocator, Move
from overwinter.device.host import HostBlocks
from overwinter.device.interface import Copy, CopyPath, Event
from overwinter.device.link import Link
from overwinter.device.reserved import ReservedDevice
from overwinter.device.shared import Table
from overwinter.model.compile import Compiled, Waiting


class CopyEvent(Event):
    """The end of a transfer in the copy thread."""

    def __init__(self, future: Future[list[int]]) -> None:
        self._future = future

    def wait(self) -> None:
        """Return when the transfer is done; raise the error if it failed."""
        self._future.result()

    def bytes_by_path(self) -> Sequence[int] | None:
        """Wait for the transfer, and return the bytes that came over each path; None: it failed."""
        return None if self._future.exception() else self._future.result()


class VirtualDevice(ReservedDevice):
    """A device whose memory and processor are the CPU's."""

    def __init__(self, name: str, allocator: Allocator, shared: int | None = None) -> None:
        """Reserve all of the allocator's memory. `shared`: a file for it (`shared.shared_memory`), out of which other
        processes may copy blocks.
        """
        reserved = self._reserve(allocator.nbytes, shared)
        super().__init__(name, allocator, torch.frombuffer(reserved, dtype=torch.uint8, count=allocator.nbytes))
        self._table = None if shared is None else Table(memoryview(reserved))
        self._stream = ThreadPoolExecutor(1, thread_name_prefix=f"copies to {name}")

    def close(self) -> None:
        """Wait for the copies and end the copy thread. No tensor in the arena may be used afterwards."""
        self._stream.shutdown()

    def evict(self, holder: str) -> tuple[Address, ...]:
        """Forget a holder, and the blocks that nobody else holds; return those."""
        freed = super().evict(holder)
        if self._table is not None:
            for address in freed:
                self._table.clear(address)
        return freed

    def host(self, blocks: Mapping[Address, torch.Tensor]) -> HostBlocks:
        """Return these blocks as a source."""
        return HostBlocks(blocks)

    def copy(self, copies: Sequence[Copy], paths: Sequence[CopyPath]) -> CopyEvent:
        """Copy parts of blocks as one transfer, after all copies that were asked for before. What does not come
        over the first path, because its source has evicted or moved it meanwhile, comes over the next.
        """
        return CopyEvent(self._stream.submit(self._transfer, copies, paths))

    def bring(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Return the inputs as they are."""
        return inputs

    def run(
        self, program: Compiled | Waiting, weights: Sequence[torch.Tensor], *arguments: Any
    ) -> tuple[torch.Tensor, ...]:
        """Run a compiled program in the calling thread. An output that is a part of a weight is copied."""
        with torch.inference_mode():
            outputs = program(weights, *arguments)
            return tuple(output.clone() if self._lies_in_arena(output) else output for output in outputs)

    def _reserve(self, nbytes: int, shared: int | None) -> mmap.mmap:
        """Return memory of zeros. Raises OSError."""
        if shared is not None:
            return mmap.mmap(shared, os.fstat(shared).st_size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        return mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)

    def _lies_in_arena(self, tensor: torch.Tensor) -> bool:
        start = self._memory.data_ptr()
        return start <= tensor.untyped_storage().data_ptr() < start + self._arena.nbytes

    def _move(self, moves: Sequence[Move]) -> None:
        """Move the bytes of blocks to their new positions."""
        self._stream.submit(bool).result()  # Copies that were asked for use the old positions.
        entered = [] if self._table is None else self._table.clear_moved(self._arena.extent)
        super()._move(moves)
        self._enter(entered)

    def _enter(self, blocks: Sequence[Address]) -> None:
        """Let other devices copy these blocks, whose bytes have arrived."""
        if self._table is not None:
            for address in blocks:
                self._table.enter(address, self._arena.extent(address))

    def _transfer(self, copies: Sequence[Copy], paths: Sequence[CopyPath]) -> list[int]:
        """Copy each part over the first path that has it; return the bytes that came over each."""
        left, bytes_by_path = list(copies), []
        for found, link in paths:
            here = [copy for copy in left if copy.address in found.blocks] if left else []
            self._copy(here, found.blocks, link)
            came = {copy for copy in here if not found.has_changed(copy.address)}
            bytes_by_path.append(sum(copy.nbytes for copy in came))
            left = [copy for copy in left if copy not in came]
        if left:
            raise StoreError(f"block {left[0].address} was evicted from its device, and lies nowhere else")
        # Only blocks that one transfer brings as a whole: after other transfers a part of the block may be missing.
        self._enter([each.address for each in copies if each[1:] == (0, self._arena.extent(each.address).nbytes)])
        return bytes_by_path

    def _copy(self, copies: Sequence[Copy], blocks: Mapping[Address, torch.Tensor], link: Link) -> None:
        """Copy piece by piece, as fast as the link would."""
        parts = deque(
            (self._bytes(address)[offset : offset + nbytes], blocks[address][offset : offset + nbytes])
            for address, offset, nbytes in copies
        )
        for start, stop in link.transfer(sum(copy.nbytes for copy in copies)):
            targets, sources = list[torch.Tensor](), list[torch.Tensor]()
            left = stop - start
            while left:
                target, source = parts.popleft()
                if len(target) > left:
                    parts.appendleft((target[left:], source[left:]))
                    target, source = target[:left], source[:left]
                targets.append(target)
                sources.append(source)
                left -= len(target)
            # One call: after each, this thread waits for the GIL, which delays the run.
            torch._foreach_copy_(targets, sources)

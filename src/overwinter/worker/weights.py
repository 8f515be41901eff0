"""Maps blocks of the host store read-only, and creates tensors that view the weights in them.

A process maps a block once for all functions, unless the node sends it again. The block stays mapped as long as it or a
tensor in it is in use: by a run, by a bound function, or by a handler that keeps outputs of a program. The mapping of
the file that was sent last also stays as long as an earlier mapping of the block does.
"""

import os
import weakref
from collections.abc import Mapping, Sequence
from math import prod

import torch

from overwinter.core.errors import StoreError
from overwinter.core.ids import SHARED, Address, StoreName
from overwinter.model.closeness import equal_bits
from overwinter.model.program import Weight
from overwinter.model.weight_layout import shaped
from overwinter.store.blocks import address_of
from overwinter.store.mapping import mapped_buffer
from overwinter.store.packing import LARGE_BYTES

_StoredBlock = tuple[StoreName, Address]


class MappedBlock:
    """One block in this process's memory."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Map the block; raise StoreError if the file is shorter, or the system refuses."""
        if os.fstat(fd).st_size < nbytes:
            raise StoreError(f"a block of {nbytes} bytes has only {os.fstat(fd).st_size} in the host store")
        self.nbytes = nbytes
        # Every tensor in the block references the buffer. The mapping ends with the last of them.
        self._buffer = mapped_buffer(fd, nbytes)
        self._tensors: dict[tuple[Weight, int], torch.Tensor] = {}
        self.newest: Newest | None = None
        """Keeps the mapping of the same block that was sent last; None: it is this one."""

    def tensor(self, weight: Weight, offset: int) -> torch.Tensor:
        """Return the weight as a tensor with a separate storage that ends where the weight ends.

        Functions with the weight at the same position share it.
        """
        key = weight, offset
        found = self._tensors.get(key)
        # Two binds may make it at the same time: both get the first.
        return self._tensors.setdefault(key, self._view(weight, offset)) if found is None else found

    def content(self) -> torch.Tensor:
        """Return all bytes of the block."""
        return torch.frombuffer(self._buffer, dtype=torch.uint8)

    def _view(self, weight: Weight, offset: int) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, weight.dtype)
        count = prod(weight.shape)
        if count == 0:
            return torch.empty(weight.shape, dtype=dtype)
        flat = torch.frombuffer(self._buffer, dtype=dtype, count=count, offset=offset)
        return shaped(flat, weight)


class Newest:
    """The mapping of a block that was sent last. All earlier ones of the block keep it."""

    def __init__(self, block: MappedBlock) -> None:
        self.block = block


class Blocks:
    """The mapped blocks of a worker or an executor, by host store and address, as long as they are in use."""

    def __init__(self) -> None:
        self._mapped: weakref.WeakValueDictionary[_StoredBlock, MappedBlock] = weakref.WeakValueDictionary()
        self._newest: weakref.WeakValueDictionary[_StoredBlock, Newest] = weakref.WeakValueDictionary()

    def take(
        self, blocks: Sequence[tuple[Address, int]], handed: Mapping[int, int], store: StoreName = SHARED
    ) -> list[MappedBlock | StoreError]:
        """Return these blocks. `handed`: the descriptors of those that were sent, by index in `blocks`; the others are
        mapped already. `store`: their host store. A worker has blocks of one only, and need not name it.

        A failed block is represented by its error, so that later binds can use the others.
        """
        return [self._block((store, address), nbytes, handed.get(at)) for at, (address, nbytes) in enumerate(blocks)]

    def _block(self, key: _StoredBlock, nbytes: int, fd: int | None) -> MappedBlock | StoreError:
        former = self._mapped.get(key)
        if fd is None:
            return former or StoreError(
                f"a block of {nbytes} bytes that was sent for an earlier function is not mapped any more"
            )
        try:
            block = self._mapped[key] = MappedBlock(fd, nbytes)
        except StoreError as error:
            return error
        if former is not None:
            # The node sends a block that a function here still has only if the file of the block was dropped.
            newest = self._newest.get(key) or Newest(block)
            # They share it, so that a mapping between the first and the last ends with its functions.
            self._newest[key] = former.newest = newest
            newest.block = block
        return block


def weight_tensors(
    weights: Sequence[Weight], pieces: Sequence[tuple[int, int]], blocks: Sequence[MappedBlock | StoreError]
) -> list[torch.Tensor]:
    """Return the weights of a program, each in its block; raise the StoreError of a missing block."""
    for block in blocks:
        if isinstance(block, StoreError):
            raise block
    tensors = []
    for weight, (number, offset) in zip(weights, pieces, strict=True):
        block = blocks[number]
        assert isinstance(block, MappedBlock), "errors were raised"
        tensors.append(block.tensor(weight, offset))
    return tensors


def differing_weights(weights: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> frozenset[int]:
    """Return the numbers of the weights in which two functions of a family differ.

    A large weight has its own block: if it is not the same tensor, it counts as different. A small one may be equal in
    another block, next to a different weight, so its bytes are compared.
    """
    pairs = enumerate(zip(weights, others, strict=True))
    return frozenset(number for number, (own, other) in pairs if own is not other and not _are_equal(own, other))


def _are_equal(own: torch.Tensor, other: torch.Tensor) -> bool:
    return own.nbytes < LARGE_BYTES and own.element_size() <= 8 and equal_bits(own, other)


def read_all(fd: int, nbytes: int) -> bytes:
    """Return the whole content of a blob; raise StoreError if the file is shorter."""
    data = os.pread(fd, nbytes, 0)
    # One call reads 2 GiB at most, and an asset may be larger.
    while len(data) < nbytes and (more := os.pread(fd, nbytes - len(data), len(data))):
        data += more
    if len(data) != nbytes:
        raise StoreError(f"a blob of {nbytes} bytes has only {len(data)} in the host store")
    return data


def read_program(fd: int, nbytes: int, address: Address) -> bytes:
    """Return the content of a program; raise StoreError if it changed in memory. It is verified here because
    what is compiled from it may be used after the program has left the host store, and the background verification
    reads only what is there.
    """
    content = read_all(fd, nbytes)
    if address_of(content) != address:
        remedy = "try again soon, or unload all functions with this program and load them"
        raise StoreError(f"its program changed in memory: {remedy}")
    return content

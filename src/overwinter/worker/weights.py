"""Blocks of the host store, mapped read-only, and the weights that lie in them."""

import ctypes
import os
from collections.abc import Sequence
from math import prod

import torch

from overwinter.core.errors import StoreError
from overwinter.model.program import Weight
from overwinter.store.mapping import map_read_only, unmap


class MappedBlock:
    """One block in this process's memory. Unmapped by `close`, never by the collector: tensors point into it."""

    def __init__(self, fd: int, nbytes: int) -> None:
        if os.fstat(fd).st_size < nbytes:
            raise StoreError(f"a block of {nbytes} bytes has only {os.fstat(fd).st_size} in the host store")
        self._address = map_read_only(fd, nbytes)
        self.nbytes = nbytes
        self.buffer = (ctypes.c_char * nbytes).from_address(self._address)

    def close(self) -> None:
        """Unmap; no tensor in it may be used any more."""
        unmap(self._address, self.nbytes)


def weight_tensors(
    weights: Sequence[Weight], pieces: Sequence[tuple[int, int]], blocks: Sequence[MappedBlock]
) -> list[torch.Tensor]:
    """Each weight as a tensor in its block, with a storage of its own that ends where the weight ends."""
    tensors = []
    for weight, (block, offset) in zip(weights, pieces, strict=True):
        dtype: torch.dtype = getattr(torch, weight.dtype)
        count = prod(weight.shape)
        if count == 0:
            tensors.append(torch.empty(weight.shape, dtype=dtype))
            continue
        flat = torch.frombuffer(blocks[block].buffer, dtype=dtype, count=count, offset=offset)
        order = weight.order or tuple(range(len(weight.shape)))
        stored = flat.view([weight.shape[dim] for dim in order])
        tensors.append(stored.permute([order.index(dim) for dim in range(len(order))]))
    return tensors


def read_all(fd: int, nbytes: int) -> bytes:
    """The whole of a small blob."""
    data = os.pread(fd, nbytes, 0)
    if len(data) != nbytes:
        raise StoreError(f"a blob of {nbytes} bytes has only {len(data)} in the host store")
    return data

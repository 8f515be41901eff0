"""Assigns weights to blocks.

A weight of 32 KiB or more is its own block. Smaller ones, most tensors of a CNN, join an open pack in first-use order.
A pack closes when the next small weight would make it larger than 1 MiB, or when more than 4 MiB of weights (large ones
included) would lie from its first to its last weight. Boundaries depend on sizes only, so variants of one model
align: changed norms affect only packs, never a large weight, and a new head only its weight and the
pack with its bias.
"""

from collections.abc import Iterable
from math import prod
from typing import Protocol

import msgspec

from overwinter.core.datatypes import DTYPE_BYTES
from overwinter.core.errors import ProgramError

ALIGNMENT_BYTES = 64
"""Every weight starts on a cache line, as with PyTorch's own allocator."""
LARGE_BYTES = 32 << 10
PACK_BYTES = 1 << 20
SPAN_BYTES = 4 << 20


class Shaped(Protocol):
    """The properties of a weight that packing needs."""

    @property
    def dtype(self) -> str:
        """A key of `DTYPE_BYTES`."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes, outermost first."""
        ...


class PlannedPiece(msgspec.Struct, frozen=True):
    """The position of one weight in its block; `weight` counts from 0 in first-use order."""

    weight: int
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class BlockPlan(msgspec.Struct, frozen=True):
    """The pieces of one block, in the order of their offsets; `nbytes` without the trailer."""

    pieces: tuple[PlannedPiece, ...]
    nbytes: int


def weight_bytes(weight: Shaped) -> int:
    """Bytes of a weight; raises ProgramError when its dtype is unknown or a size is negative."""
    item = DTYPE_BYTES.get(weight.dtype)
    if item is None:
        raise ProgramError(f"a weight has unknown dtype {weight.dtype!r}; known: {', '.join(DTYPE_BYTES)}")
    if any(size < 0 for size in weight.shape):
        raise ProgramError(f"a weight has a negative size in shape {list(weight.shape)}")
    return item * prod(weight.shape)


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment of a weight."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def plan_block(weights: Iterable[tuple[int, Shaped]]) -> BlockPlan:
    """Place numbered weights one after the other, each aligned."""
    pieces: list[PlannedPiece] = []
    stop = 0
    for number, weight in weights:
        offset = aligned(stop)
        stop = offset + weight_bytes(weight)
        pieces.append(PlannedPiece(number, weight.dtype, tuple(weight.shape), offset, stop - offset))
    return BlockPlan(tuple(pieces), stop)


def pack(weights: Iterable[Shaped]) -> tuple[BlockPlan, ...]:
    """Plan the blocks of a program's weights, in first-use order; every weight is in exactly one block."""
    groups: list[list[tuple[int, Shaped]]] = []
    open_pack: list[tuple[int, Shaped]] = []
    pack_bytes = span_bytes = PACK_BYTES + SPAN_BYTES  # full, so the first small weight opens a new pack
    for entry in enumerate(weights):
        nbytes = weight_bytes(entry[1])
        span_bytes += nbytes
        if nbytes >= LARGE_BYTES:
            groups.append([entry])
            continue
        pack_bytes = aligned(pack_bytes) + nbytes
        if pack_bytes > PACK_BYTES or span_bytes > SPAN_BYTES:
            open_pack = []
            groups.append(open_pack)
            pack_bytes = span_bytes = nbytes
        open_pack.append(entry)
    return tuple(plan_block(group) for group in groups)

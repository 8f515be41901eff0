"""Compares the weights of a manifest with the layouts of its blocks in the repository."""

from collections.abc import Sequence

from overwinter.core.errors import CallerError, ConflictError, StoreError
from overwinter.store.manifest import Block, Manifest
from overwinter.store.packing import Shaped, weight_bytes
from overwinter.store.repository import Repository


def check_weights(repository: Repository, manifest: Manifest, weights: Sequence[Shaped]) -> None:
    """Raise CallerError unless the positions of the program's weights in the manifest match the layouts of the blocks,
    or ConflictError if a block was damaged on disk, and its tenant has to send it again.
    """
    placed = sum(len(block.pieces) for block in manifest.blocks)
    if placed != len(weights):
        raise CallerError(f"the program of {manifest.name!r} has {len(weights)} weights, its blocks {placed}")
    for block in manifest.blocks:
        try:
            _check_block(repository, manifest, block, weights)
        except (CallerError, StoreError):
            if not repository.set_aside(block.address):
                raise
            raise ConflictError(
                f"block {block.address} of {manifest.name!r} was damaged on disk and is missing now; upload it, then "
                "register again"
            ) from None


def _check_block(repository: Repository, manifest: Manifest, block: Block, weights: Sequence[Shaped]) -> None:
    layout = repository.layout(block.address).pieces
    if len(layout) != len(block.pieces):
        raise CallerError(f"block {block.address} has {len(layout)} weights, the manifest {len(block.pieces)}")
    for piece, held in zip(block.pieces, layout, strict=True):
        weight = weights[piece.weight]
        said = (piece.offset, piece.nbytes, weight.dtype, tuple(weight.shape), weight_bytes(weight))
        if said != (held.offset, held.nbytes, held.dtype, held.shape, held.nbytes):
            raise CallerError(
                f"weight {piece.weight} of {manifest.name!r} should be {weight.dtype} {list(weight.shape)} at "
                f"{piece.offset}; block {block.address} has {held.dtype} {list(held.shape)} at {held.offset}"
            )

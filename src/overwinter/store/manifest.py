"""The manifest of a deployed function.

A manifest names a function's blobs by address, and gives the position of each weight in them. The deployer sends it
after the blobs, and the repository keeps it. It is encoded as readable JSON. `decode_manifest` checks all that the
manifest alone shows. The repository compares it with the sizes of the blobs, and layouts.py with the program and the
layouts of the blocks.
"""

from collections import Counter
from collections.abc import Iterable
from math import prod
from typing import Annotated

import msgspec
from msgspec import Meta

from overwinter.core.agreement import Agreement
from overwinter.core.datatypes import DATATYPE_BYTES
from overwinter.core.errors import CallerError
from overwinter.core.function import Settings
from overwinter.core.ids import NAME_PATTERN, Address, FunctionName, TenantId
from overwinter.core.tensor import (
    BYTES,
    ELEMENTS_MAX,
    RANK_MAX,
    TENSORS_MAX,
    Tensor,
    TensorName,
    TensorSpec,
    check_inputs,
    check_size,
)
from overwinter.store.packing import ALIGNMENT_BYTES

# A `$` instead of \Z would accept a trailing newline.
ADDRESS_PATTERN = r"\A[0-9a-f]{64}\Z"
ASSET_PATTERN = r"\A[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z"

SAMPLES_MAX = 8
ALL_SAMPLES_BYTES_MAX = 1 << 20
"""The most bytes of all samples of a function: manifests are kept in memory."""

BlobAddress = Annotated[Address, Meta(pattern=ADDRESS_PATTERN)]
Count = Annotated[int, Meta(ge=0, le=(1 << 53) - 1)]
"""A count or a size in bytes, exact in any JSON reader."""


class Blob(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Immutable bytes in the repository."""

    address: BlobAddress
    nbytes: Count


class Piece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The position of one weight (its number in the program's first-use order) in its block."""

    weight: Count
    offset: Count
    nbytes: Count


class Block(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A block file and the program's weights in it; two blocks of equal content have one address."""

    address: BlobAddress
    nbytes: Count
    pieces: tuple[Piece, ...]

    @property
    def weights_end(self) -> int:
        """The end of its last listed weight, in bytes."""
        return max((piece.offset + piece.nbytes for piece in self.pieces), default=0)


def weight_positions(blocks: Iterable[Block]) -> list[tuple[Address, int]]:
    """Return the block of each weight and its offset there, in the order of the weights."""
    places = {piece.weight: (block.address, piece.offset) for block in blocks for piece in block.pieces}
    return [places[weight] for weight in range(len(places))]


class Handler(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The function's own code, a single Python source file, and its named files."""

    source: Blob
    assets: dict[Annotated[str, Meta(pattern=ASSET_PATTERN)], Blob] = {}


class SampleTensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One input of a sample request, with its data as in a request; base64 in JSON."""

    name: TensorName
    datatype: str
    shape: Annotated[tuple[Count, ...], Meta(max_length=RANK_MAX)]
    data: bytes

    def to_tensor(self) -> Tensor:
        """Return the input in the format of a request."""
        return Tensor(self.name, self.datatype, self.shape, self.data)


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The description of a function: everything except its bytes."""

    name: Annotated[FunctionName, Meta(pattern=NAME_PATTERN)]
    tenant: Annotated[TenantId, Meta(pattern=NAME_PATTERN)]
    program: Blob
    blocks: tuple[Block, ...]
    inputs: Annotated[tuple[TensorSpec, ...], Meta(max_length=TENSORS_MAX)]
    outputs: Annotated[tuple[TensorSpec, ...], Meta(max_length=TENSORS_MAX)]
    handler: Handler | None = None
    settings: Settings = Settings()
    agreement: Agreement | None = None
    """How the program compared with the model from which it was exported; None if they were not compared."""
    samples: tuple[tuple[SampleTensor, ...], ...] = ()
    """The requests that it must answer before it is deployed."""

    def blobs(self) -> tuple[Blob, ...]:
        """Return all blobs that the function needs, each address once: program, handler, assets, blocks in order."""
        every = [self.program]
        if self.handler is not None:
            every += [self.handler.source, *self.handler.assets.values()]
        every += [Blob(block.address, block.nbytes) for block in self.blocks]
        return tuple({blob.address: blob for blob in every}.values())


class Deployment(msgspec.Struct, frozen=True):
    """One registered version of a function; `created` in seconds since 1970."""

    name: FunctionName
    version: int
    manifest: Manifest
    created: float
    limited: tuple[str, ...] = ()
    """Messages about settings of an old manifest that were brought within the current bounds."""


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode the manifest as JSON, without checks."""
    return msgspec.json.encode(manifest)


def decode_manifest(data: bytes) -> Manifest:
    """Decode a manifest from JSON; CallerError names the first error."""
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CallerError(f"the manifest is not valid: {error}") from None
    _check_sizes(manifest)
    for block in manifest.blocks:
        _check_pieces(block)
    _check_weights_once(manifest)
    _check_tensors("input", manifest.inputs)
    _check_tensors("output", manifest.outputs)
    _check_samples(manifest)
    return manifest


def _check_samples(manifest: Manifest) -> None:
    nbytes = sum(len(tensor.data) for sample in manifest.samples for tensor in sample)
    if len(manifest.samples) > SAMPLES_MAX or nbytes > ALL_SAMPLES_BYTES_MAX:
        raise CallerError(
            f"the manifest has {len(manifest.samples)} samples with {nbytes} bytes in total; it may have {SAMPLES_MAX} "
            f"with {ALL_SAMPLES_BYTES_MAX} bytes in total"
        )
    for number, sample in enumerate(manifest.samples, 1):
        inputs = [tensor.to_tensor() for tensor in sample]
        try:
            check_inputs(inputs, manifest.inputs)
            for tensor in inputs:
                _check_sample_elements(tensor)
                check_size(tensor)
        except CallerError as error:
            raise CallerError(f"sample {number}: {error}") from None


def _check_sample_elements(tensor: Tensor) -> None:
    # The limit for requests is a setting, but a manifest must be valid on every node.
    if tensor.datatype == BYTES and (count := prod(tensor.shape)) > ELEMENTS_MAX:
        raise CallerError(
            f"BYTES tensor {tensor.name!r} has {count} elements, and in a sample it may have {ELEMENTS_MAX}: deploy "
            "with a smaller sample"
        )


def _check_sizes(manifest: Manifest) -> None:
    sizes = {blob.address: blob.nbytes for blob in manifest.blobs()}
    named: list[Blob | Block] = [manifest.program, *manifest.blocks]
    if manifest.handler is not None:
        named += [manifest.handler.source, *manifest.handler.assets.values()]
    for blob in named:
        if blob.nbytes != sizes[blob.address]:
            raise CallerError(
                f"the manifest gives two sizes for blob {blob.address}: {blob.nbytes} and {sizes[blob.address]} bytes"
            )


def _check_pieces(block: Block) -> None:
    stop = 0
    for piece in block.pieces:
        where = f"weight {piece.weight} at {piece.offset} of block {block.address}"
        if piece.offset % ALIGNMENT_BYTES:
            raise CallerError(f"{where} is not aligned to {ALIGNMENT_BYTES} bytes")
        if piece.offset < stop:
            raise CallerError(f"{where} overlaps or precedes the weight listed before it, which ends at {stop}")
        stop = piece.offset + piece.nbytes
        if stop > block.nbytes:
            raise CallerError(f"{where} ends at {stop}, outside the block's {block.nbytes} bytes")


def _check_weights_once(manifest: Manifest) -> None:
    numbers = Counter(piece.weight for block in manifest.blocks for piece in block.pieces)
    for number, times in numbers.items():
        if times > 1:
            raise CallerError(f"weight {number} lies in {times} places; each weight must lie in exactly one")
        if number >= len(numbers):
            raise CallerError(f"weight {number} is given, but only {len(numbers)} weights lie in the blocks")


def _check_tensors(kind: str, specs: tuple[TensorSpec, ...]) -> None:
    for name, times in Counter(spec.name for spec in specs).items():
        if times > 1:
            raise CallerError(f"{kind} {name!r} is given {times} times")
    for spec in specs:
        if spec.datatype != BYTES and spec.datatype not in DATATYPE_BYTES:
            known = ", ".join([*DATATYPE_BYTES, BYTES])
            raise CallerError(f"{kind} {spec.name!r} has unknown datatype {spec.datatype!r}; known: {known}")
        if any(isinstance(size, int) and size < 0 for size in spec.shape):
            raise CallerError(f"{kind} {spec.name!r} has a negative size in shape {list(spec.shape)}")

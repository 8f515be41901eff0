"""The format of a block file, and its address.

    weight | zeros to a multiple of 64 bytes | weight | ... | layout text | its length, 4 bytes little-endian

The layout has one line `dtype[size,size,...]` for each weight, in order; the offsets follow from it. The layout text
and its length are the trailer. Weights have no names here, so that the same bytes under two names are one block. The
address is the BLAKE3 of the whole file including the trailer: equal addresses mean equal types and shapes, not merely
equal bytes. The order of a weight's dimensions in memory is in the program only (`Weight.order`). Other blobs (a
program, a handler's source, an asset) are raw bytes with the same addressing.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from blake3 import blake3

from overwinter.core.datatypes import DTYPE_BYTES
from overwinter.core.errors import CallerError
from overwinter.core.ids import Address
from overwinter.core.tensor import RANK_MAX, Buffer
from overwinter.store.manifest import ADDRESS_PATTERN, Block, Piece
from overwinter.store.packing import ALIGNMENT_BYTES, PACK_BYTES, BlockPlan, plan_block

LENGTH_BYTES = 4
WEIGHTS_MAX = 2 * PACK_BYTES // ALIGNMENT_BYTES
"""The most weights in one block: twice as many as fit in a pack of scalars."""
MAX_LAYOUT_BYTES = 4 << 20
"""The most bytes of a layout. A pack of one-element weights with 64 dimensions each needs up to 2.2 MiB."""
_LINE = re.compile(r"([a-z0-9_]+)\[((?:(?:0|[1-9]\d{0,17})(?:,(?:0|[1-9]\d{0,17}))*)?)\]", re.ASCII)
_ADDRESS = re.compile(ADDRESS_PATTERN)
_NAMED = re.compile(r"(?:\b(?:block|blob) )?\b[0-9a-f]{64}\b")


class _Described(NamedTuple):
    """A weight read back from a layout."""

    dtype: str
    shape: tuple[int, ...]


def address_of(data: Buffer) -> Address:
    """The address of some bytes."""
    return Address(blake3(data).hexdigest())


def check_address(text: str) -> Address:
    """Return `text` as an address; raise CallerError unless it is 64 lower-case hexadecimal digits."""
    if not _ADDRESS.search(text):
        raise CallerError(f"{text[:80]!r} is not a block address: 64 lower-case hexadecimal digits are needed")
    return Address(text)


def without_addresses(text: str) -> str:
    """Remove block addresses from a message for callers: only the sender of a block and the node's log may see its
    address.
    """
    return _NAMED.sub("a block", text)


def layout_text(plan: BlockPlan) -> bytes:
    """Return the trailer's text: one line for each weight."""
    lines = (f"{piece.dtype}[{','.join(map(str, piece.shape))}]\n" for piece in plan.pieces)
    return "".join(lines).encode()


def block_chunks(plan: BlockPlan, tensors: Sequence[Buffer]) -> Iterator[Buffer]:
    """Yield the block's file as consecutive pieces of bytes, without a copy of the tensors.

    `tensors` has the bytes of each weight of the program, by weight number. Elements are in the memory order that the
    program gives, without gaps. Raises CallerError for a tensor without the bytes that its dtype and shape need.
    """
    stop = 0
    for piece in plan.pieces:
        data = memoryview(tensors[piece.weight])
        if data.nbytes != piece.nbytes:
            raise CallerError(
                f"weight {piece.weight} of {piece.dtype} {list(piece.shape)} needs {piece.nbytes} bytes, "
                f"got {data.nbytes}"
            )
        yield bytes(piece.offset - stop)
        if data.nbytes:
            yield data.cast("B")
        stop = piece.offset + piece.nbytes
    text = layout_text(plan)
    yield text + len(text).to_bytes(LENGTH_BYTES, "little")


def build_block(plan: BlockPlan, tensors: Sequence[Buffer]) -> bytes:
    """The block's whole file; see `block_chunks`."""
    return b"".join(block_chunks(plan, tensors))


def name_block(plan: BlockPlan, tensors: Sequence[Buffer]) -> Block:
    """Return the block's entry in a manifest: its address, size and pieces."""
    hasher = blake3()
    nbytes = 0
    for chunk in block_chunks(plan, tensors):
        hasher.update(chunk)
        nbytes += len(chunk)
    pieces = tuple(Piece(piece.weight, piece.offset, piece.nbytes) for piece in plan.pieces)
    return Block(Address(hasher.hexdigest()), nbytes, pieces)


def layout_bytes(last: Buffer, file_bytes: int) -> int:
    """Return the length of the layout text from a file's last 4 bytes; raise CallerError if it is impossible."""
    length = int.from_bytes(last, "little")
    if len(last) != LENGTH_BYTES or length > min(file_bytes - LENGTH_BYTES, MAX_LAYOUT_BYTES):
        raise CallerError(f"a file of {file_bytes} bytes is not a block: it does not end in a layout and its length")
    return length


def parse_layout(text: Buffer, body_bytes: int) -> BlockPlan:
    """Parse a layout text; raise CallerError unless its pieces are well-formed and fill `body_bytes` exactly."""
    try:
        lines = bytes(text).decode("ascii").split("\n")
    except UnicodeDecodeError:
        raise CallerError("a block's layout is not ASCII text") from None
    if len(lines) - 1 > WEIGHTS_MAX:
        raise CallerError(f"a block's layout has {len(lines) - 1} weights; it may have {WEIGHTS_MAX}")
    weights: list[tuple[int, _Described]] = []
    for line in lines[:-1]:
        if line.count(",") >= RANK_MAX:
            raise CallerError(f"a block's layout has a weight with more than {RANK_MAX} dimensions")
        match = _LINE.fullmatch(line)
        if match is None or match[1] not in DTYPE_BYTES:
            raise CallerError(f"a block's layout has the line {line[:80]!r}; dtype[size,...] is needed")
        shape = tuple(map(int, match[2].split(","))) if match[2] else ()
        weights.append((len(weights), _Described(match[1], shape)))
    plan = plan_block(weights)
    if lines[-1] or plan.nbytes != body_bytes:
        raise CallerError(f"a block's layout describes {plan.nbytes} bytes, its body has {body_bytes}")
    return plan

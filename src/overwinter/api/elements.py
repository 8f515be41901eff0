"""Reads the elements of a tensor from JSON.

Many elements are read in pieces, because as Python objects they would take thirty times their bytes.
"""

import re
import struct
from itertools import chain
from math import prod
from typing import Any

import msgspec

from overwinter.api.floats import decode_slow, has_exponents, is_slow
from overwinter.api.steps import STEP_BYTES, Steps
from overwinter.core.datatypes import DATATYPE_BYTES, FORMATS
from overwinter.core.errors import CallerError
from overwinter.core.tensor import BYTES, ELEMENTS_MAX, Buffer, check_elements, pack_bytes

DEPTH_MAX = 8
"""The most levels of nested lists. A flat list works for any rank."""

LISTS_MAX = 1024
"""The most nested lists that are decoded to Python lists. In a text with more, the brackets are compared with the
shape, and the elements are read as flat lists.
"""

EXPONENTS_STEP_BYTES = STEP_BYTES // 4
"""The bytes of numbers with exponents that one step reads."""

_LEADING = re.compile(rb"[\[ \t\r\n]*")


def _decoders(kind: type) -> tuple[msgspec.json.Decoder[Any], ...]:
    """One strict decoder for each depth of nested lists, from 1."""
    decoders = []
    nested: Any = kind
    for _ in range(DEPTH_MAX):
        nested = list[nested]
        decoders.append(msgspec.json.Decoder(nested))
    return tuple(decoders)


_BY_KIND = {kind: _decoders(kind) for kind in (bool, int, float, str)}
_DECODERS = {
    name: _BY_KIND[bool if name == "BOOL" else float if name.startswith("FP") else int] for name in FORMATS
} | {BYTES: _BY_KIND[str]}


_SPACE = b" \t\r\n"
_STRUCTURE = b"[],"
_NO_STRUCTURE = bytes(set(range(256)) - set(_STRUCTURE))
_FLAT = bytes.maketrans(b"[]", b"  ")


def parse_elements(
    name: str, datatype: str, shape: tuple[int, ...], raw: msgspec.Raw, elements_max: int = ELEMENTS_MAX
) -> Steps[Buffer]:
    """Convert the JSON elements `raw` of a tensor, flat or nested as its shape, to bytes; raise CallerError."""
    if datatype not in _DECODERS:
        raise CallerError(_datatype_error(name, datatype))
    view = memoryview(raw)
    leading = _LEADING.match(view)
    depth = leading.group().count(b"[") if leading else 0
    if depth != 1 and not 0 < depth == len(shape) <= DEPTH_MAX:
        raise CallerError(
            f"data of input {name!r} must be one flat list, or lists nested as its shape {list(shape)} says "
            f"(at most {DEPTH_MAX} deep); it is nested {depth} deep"
        )
    try:
        if datatype == BYTES:
            check_elements(name, prod(shape), elements_max)
        if _is_read_in_steps(datatype, view):
            if datatype == BYTES:
                return (yield from _parse_strings(name, shape, view, depth, elements_max))
            return (yield from _parse_numbers(name, datatype, shape, view, depth))
        return _parse_whole(name, datatype, shape, view, depth)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise CallerError(f"data of input {name!r} is not a list of {datatype}: {error}") from error
    except (struct.error, OverflowError) as error:
        raise CallerError(f"data of input {name!r} has an element outside the range of {datatype}: {error}") from error


def _parse_whole(name: str, datatype: str, shape: tuple[int, ...], view: memoryview, depth: int) -> Buffer:
    """Convert elements that are read at once."""
    values = _DECODERS[datatype][depth - 1].decode(view)
    for size in shape[1:depth]:
        if set(map(len, values)) - {size}:
            raise CallerError(f"data of input {name!r} has a list whose length is not {size}: shape {list(shape)}")
        values = list(chain.from_iterable(values))
    if len(values) != prod(shape):
        raise CallerError(f"data of input {name!r} has {len(values)} elements; shape {list(shape)} needs {prod(shape)}")
    return _pack(datatype, values)


def _is_read_in_steps(datatype: str, view: memoryview) -> bool:
    """Whether this text must be read in pieces."""
    if len(view) > STEP_BYTES:
        return True
    text = bytes(view)
    return text.count(b"[") > LISTS_MAX or len(text) > _step_bytes(datatype, text) or _is_slow(datatype, text)


def _step_bytes(datatype: str, text: bytes) -> int:
    """The bytes of this text that one step reads."""
    return EXPONENTS_STEP_BYTES if datatype.startswith("FP") and has_exponents(text) else STEP_BYTES


def _is_slow(datatype: str, text: bytes) -> bool:
    return datatype.startswith("FP") and is_slow(text)


def _parse_strings(name: str, shape: tuple[int, ...], view: memoryview, depth: int, elements_max: int) -> Steps[Buffer]:
    """Convert strings that are read in steps. Their number, and all that is between them, are first checked against
    the shape; then they are read as flat lists.
    """
    text = bytes(view)
    if b"\0" in text or b"\1" in text:
        raise CallerError(f"data of input {name!r} has control characters: JSON requires escapes for them")
    yield
    # Without escaped quotes, each quote begins or ends a string. `_strings` restores them.
    text = text.replace(rb"\\", b"\0").replace(rb"\"", b"\1")
    yield
    check_elements(name, text.count(b'"') // 2, elements_max)
    yield
    parts = text.split(b'"')
    yield
    sizes = _sizes(shape, depth)
    skeleton = b'"'.join(parts[::2]).translate(None, _SPACE)
    if not len(parts) % 2 or len(skeleton) != _skeleton_bytes(sizes, 1) or skeleton != _skeleton(sizes, b'"'):
        raise _shape_error(name, shape, depth)
    packed = bytearray()
    group: list[bytes] = []
    nbytes = 0
    for part in parts[1::2]:
        group.append(part)
        nbytes += len(part) + 3
        if nbytes >= STEP_BYTES:
            packed += _pack(BYTES, _strings(group))
            group, nbytes = [], 0
            yield
    return packed + _pack(BYTES, _strings(group) if group else [])


def _strings(parts: list[bytes]) -> list[str]:
    """Decode the contents of strings."""
    text = b'["%s"]' % b'","'.join(parts)
    strings: list[str] = _DECODERS[BYTES][0].decode(text.replace(b"\0", rb"\\").replace(b"\1", rb"\""))
    return strings


def _sizes(shape: tuple[int, ...], depth: int) -> tuple[int, ...]:
    """The sizes of lists nested `depth` deep for this shape."""
    sizes = shape if depth > 1 else (prod(shape),)
    # A list of size 0 contains no lists, so the further sizes are not checked.
    return sizes[: sizes.index(0) + 1] if 0 in sizes else sizes


def _shape_error(name: str, shape: tuple[int, ...], depth: int) -> CallerError:
    if depth > 1:
        return CallerError(f"data of input {name!r} is not nested as its shape {list(shape)} requires")
    return CallerError(
        f"data of input {name!r} does not have the {prod(shape)} elements that its shape {list(shape)} needs"
    )


def _parse_numbers(name: str, datatype: str, shape: tuple[int, ...], view: memoryview, depth: int) -> Steps[Buffer]:
    """Convert numbers that are read in steps. Their brackets and commas are first checked against the shape; then they
    are read as one flat list, piece by piece.
    """
    sizes = _sizes(shape, depth)
    skeleton = bytearray()
    for at in range(0, len(view), STEP_BYTES):
        skeleton += bytes(view[at : at + STEP_BYTES]).translate(None, _NO_STRUCTURE)
        yield
    if len(skeleton) != _skeleton_bytes(sizes) or skeleton != _skeleton(sizes):
        raise _shape_error(name, shape, depth)
    decode = _DECODERS[datatype][0].decode
    packed = bytearray()
    if 0 in shape and not bytes(view).translate(None, b"[], \t\r\n"):
        return packed
    at = 0
    while at < len(view):
        piece = bytes(view[at : at + STEP_BYTES])
        piece = piece[: _step_bytes(datatype, piece)]
        # Cut the piece at a comma, unless it is the last piece.
        stop = len(piece) if at + len(piece) == len(view) else piece.rfind(b",")
        if stop <= 0:
            raise CallerError(f"data of input {name!r} has an element of {len(piece)} characters or more")
        flat = b"[%s]" % piece[:stop].translate(_FLAT)
        packed += _pack(datatype, decode_slow(flat) if _is_slow(datatype, flat) else decode(flat))
        at += stop + 1
        yield
    if len(packed) != prod(shape) * DATATYPE_BYTES[datatype]:
        raise _shape_error(name, shape, depth)
    return packed


def _skeleton_bytes(sizes: tuple[int, ...], nbytes: int = 0) -> int:
    """The length of `_skeleton`, where an element has this length."""
    for size in reversed(sizes):
        nbytes = 2 + size * nbytes + max(size - 1, 0)
    return nbytes


def _skeleton(sizes: tuple[int, ...], text: bytes = b"") -> bytes:
    """The brackets and commas of lists nested by these sizes, with this text for each element."""
    for size in reversed(sizes):
        text = b"[%s]" % ((text + b",") * (size - 1) + text if size else b"")
    return text


def _pack(datatype: str, values: list[Any]) -> bytes:
    if datatype == BYTES:
        return pack_bytes([item.encode() for item in values])
    return struct.pack(f"<{len(values)}{FORMATS[datatype]}", *values)


def _datatype_error(name: str, datatype: str) -> str:
    if datatype in DATATYPE_BYTES:
        return f"input {name!r} is {datatype}, which has no JSON form: use the binary tensor extension"
    return f"input {name!r} has unknown datatype {datatype!r}; known: {', '.join([*DATATYPE_BYTES, BYTES])}"

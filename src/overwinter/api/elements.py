"""Converts the elements of a tensor between JSON and bytes.

Many elements are read and written in pieces, because as Python objects they would take thirty times their bytes.
"""

import re
import struct
from itertools import chain
from math import isfinite, prod
from typing import Any

import msgspec

from overwinter.api.steps import STEP_BYTES, Steps
from overwinter.core.datatypes import DATATYPE_BYTES, FORMATS
from overwinter.core.errors import CallerError, TooLargeError
from overwinter.core.tensor import BYTES, ELEMENTS_MAX, Buffer, Tensor, check_elements, pack_bytes, unpack_bytes

DEPTH_MAX = 8
"""The most levels of nested lists. A flat list works for any rank."""

LISTS_PER_ELEMENT = 2
"""The most lists in the data of a BYTES tensor, for each allowed element."""

STEP_ELEMENTS = 8192
"""The elements that are encoded as JSON in one step."""

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


_STRUCTURE = b"[],"
_NO_STRUCTURE = bytes(set(range(256)) - set(_STRUCTURE))
_FLAT = bytes.maketrans(b"[]", b"  ")


def parse_elements(
    name: str, datatype: str, shape: tuple[int, ...], raw: msgspec.Raw, elements_max: int = ELEMENTS_MAX
) -> Steps[Buffer]:
    """Convert the JSON elements `raw` of a tensor, flat or nested as its shape, to bytes; raise CallerError."""
    decoders = _DECODERS.get(datatype)
    if decoders is None:
        raise CallerError(_no_json("input", name, datatype))
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
            _check_strings(name, view, elements_max)
            _check_lists(name, view, elements_max)
        elif len(view) > STEP_BYTES:
            return (yield from _parse_long(name, datatype, shape, view, depth))
        values = decoders[depth - 1].decode(view)
        for size in shape[1:depth]:
            if set(map(len, values)) - {size}:
                raise CallerError(f"data of input {name!r} has a list whose length is not {size}: shape {list(shape)}")
            values = list(chain.from_iterable(values))
        if len(values) != prod(shape):
            raise CallerError(
                f"data of input {name!r} has {len(values)} elements; shape {list(shape)} needs {prod(shape)}"
            )
        return _pack(datatype, values)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise CallerError(f"data of input {name!r} is not a list of {datatype}: {error}") from error
    except (struct.error, OverflowError) as error:
        raise CallerError(f"data of input {name!r} has an element outside the range of {datatype}: {error}") from error


def _check_strings(name: str, view: memoryview, elements_max: int) -> None:
    """Raise TooLargeError when there are certainly too many strings; up to twice the allowed number pass."""
    if len(view) <= 2 * elements_max:
        return
    text = bytes(view)
    # Every string has an opening quote without a backslash before it. The closing quote may follow a backslash.
    quotes = text.count(b'"') - text.count(b'\\"')
    if quotes > 2 * elements_max:
        check_elements(name, quotes // 2 + 1, elements_max)


def _check_lists(name: str, view: memoryview, elements_max: int) -> None:
    """Raise TooLargeError when there are more lists than the strings can need; a shape with a 0 does not bound them."""
    most = LISTS_PER_ELEMENT * elements_max
    if len(view) <= most:
        return
    text = bytes(view)
    if text.count(b"[") <= most:
        return
    # Exclude brackets inside of strings.
    plain = text.replace(rb"\\", b"").replace(rb"\"", b"")
    if sum(part.count(b"[") for part in plain.split(b'"')[::2]) > most:
        raise TooLargeError(f"data of input {name!r} has more than {most} lists: send its strings as one flat list")


def _parse_long(name: str, datatype: str, shape: tuple[int, ...], view: memoryview, depth: int) -> Steps[Buffer]:
    """Convert numbers in a long text. Its brackets and commas are first checked against the shape; then it is read as
    one flat list, piece by piece.
    """
    sizes = shape if depth > 1 else (prod(shape),)
    if 0 in sizes:
        # Inside a size of 0 there are no lists, so the further sizes are not checked.
        sizes = sizes[: sizes.index(0) + 1]
    skeleton = bytearray()
    for at in range(0, len(view), STEP_BYTES):
        skeleton += bytes(view[at : at + STEP_BYTES]).translate(None, _NO_STRUCTURE)
        yield
    if len(skeleton) != _skeleton_bytes(sizes) or skeleton != _skeleton(sizes):
        raise CallerError(
            f"data of input {name!r} is {'not nested' if depth > 1 else 'not as long'} as its shape {list(shape)} "
            "requires"
        )
    decode = _DECODERS[datatype][0].decode
    packed = bytearray()
    if 0 in shape and not bytes(view).translate(None, b"[], \t\r\n"):
        return packed
    at = 0
    while at < len(view):
        piece = bytes(view[at : at + STEP_BYTES])
        # Cut the piece at a comma, unless it is the last one.
        stop = len(piece) if at + len(piece) == len(view) else piece.rfind(b",")
        if stop <= 0:
            raise CallerError(f"data of input {name!r} has an element of {STEP_BYTES} characters or more")
        packed += _pack(datatype, decode(b"[%s]" % piece[:stop].translate(_FLAT)))
        at += stop + 1
        yield
    if len(packed) != prod(shape) * DATATYPE_BYTES[datatype]:
        raise CallerError(f"data of input {name!r} lacks elements: shape {list(shape)} needs {prod(shape)}")
    return packed


def _skeleton_bytes(sizes: tuple[int, ...]) -> int:
    """The number of brackets and commas in lists nested by these sizes."""
    nbytes = 0
    for size in reversed(sizes):
        nbytes = 2 + size * nbytes + max(size - 1, 0)
    return nbytes


def _skeleton(sizes: tuple[int, ...]) -> bytes:
    """The brackets and commas of lists nested by these sizes."""
    text = b""
    for size in reversed(sizes):
        text = b"[%s]" % ((text + b",") * (size - 1) + text if size else b"")
    return text


def list_elements(tensor: Tensor, bytes_max: int) -> Steps[list[Any] | msgspec.Raw]:
    """Return a tensor's elements as a flat list, or as the JSON text of that list.

    Raises CallerError when JSON cannot represent them, TooLargeError when they exceed `bytes_max` bytes.
    """
    if len(tensor.data) > bytes_max:
        raise _too_long(tensor.name, bytes_max)
    if tensor.datatype == BYTES:
        try:
            return [item.decode() for item in unpack_bytes(tensor.data, prod(tensor.shape))]
        except UnicodeDecodeError as error:
            raise CallerError(_ask_binary(tensor.name, "holds bytes that are not UTF-8")) from error
    code = FORMATS.get(tensor.datatype)
    if code is None:
        raise CallerError(_no_json("output", tensor.name, tensor.datatype))
    items = memoryview(tensor.data).cast("B").cast(code)  # type: ignore[call-overload]
    if len(items) <= STEP_ELEMENTS:
        return _numbers(tensor.name, code, items)
    text = bytearray(b"[")
    for at in range(0, len(items), STEP_ELEMENTS):
        text += msgspec.json.encode(_numbers(tensor.name, code, items[at : at + STEP_ELEMENTS]))[1:-1]
        text += b","
        if len(text) > bytes_max:
            raise _too_long(tensor.name, bytes_max)
        yield
    text[-1:] = b"]"
    return msgspec.Raw(bytes(text))


def _numbers(name: str, code: str, items: memoryview) -> list[Any]:
    values: list[Any] = items.tolist()
    # One sum is far cheaper than a check of each element. It is finite unless an element is not, or the sum overflows.
    if code in "fd" and not isfinite(sum(values)) and not all(map(isfinite, values)):
        raise CallerError(_ask_binary(name, "holds NaN or infinity, which JSON cannot represent"))
    return values


def _too_long(name: str, bytes_max: int) -> TooLargeError:
    return TooLargeError(_ask_binary(name, f"takes more than the {bytes_max} bytes that an answer in JSON may have"))


def _pack(datatype: str, values: list[Any]) -> bytes:
    if datatype == BYTES:
        return pack_bytes([item.encode() for item in values])
    return struct.pack(f"<{len(values)}{FORMATS[datatype]}", *values)


def _no_json(side: str, name: str, datatype: str) -> str:
    if datatype in DATATYPE_BYTES:
        return f"{side} {name!r} is {datatype}, which has no JSON form: use the binary tensor extension"
    return f"{side} {name!r} has unknown datatype {datatype!r}; known: {', '.join([*DATATYPE_BYTES, BYTES])}"


def _ask_binary(name: str, why: str) -> str:
    return f'output {name!r} {why}: ask for it with parameters {{"binary_data": true}}'

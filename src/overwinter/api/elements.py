"""How do the elements of a tensor look in JSON, and how do they become bytes again?"""

import re
import struct
from itertools import chain
from math import isfinite, prod
from typing import Any

import msgspec

from overwinter.core.errors import CallerError
from overwinter.core.tensor import BYTES, ITEM_BYTES, Tensor, pack_bytes, unpack_bytes

FORMATS = {
    "BOOL": "?",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP32": "f",
    "FP64": "d",
}
"""The struct character of each datatype that has a JSON form. FP16 and BF16 have none: they travel as binary."""

DEPTH_MAX = 8
"""Levels of nested lists; a flat list serves any rank."""

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


def parse_elements(name: str, datatype: str, shape: tuple[int, ...], raw: msgspec.Raw) -> bytes:
    """The bytes of a tensor whose JSON elements are `raw`, flat or nested exactly as its shape; CallerError."""
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


def list_elements(tensor: Tensor) -> list[Any]:
    """A tensor's elements as a flat list for JSON; CallerError when JSON cannot carry them."""
    if tensor.datatype == BYTES:
        try:
            return [item.decode() for item in unpack_bytes(tensor.data, prod(tensor.shape))]
        except UnicodeDecodeError as error:
            raise CallerError(_ask_binary(tensor.name, "holds bytes that are not UTF-8")) from error
    code = FORMATS.get(tensor.datatype)
    if code is None:
        raise CallerError(_no_json("output", tensor.name, tensor.datatype))
    values: list[Any] = memoryview(tensor.data).cast("B").cast(code).tolist()  # type: ignore[call-overload]
    # One sum is far cheaper than a look at each element, and it is finite unless an element is not, or it overflows.
    if code in "fd" and not isfinite(sum(values)) and not all(map(isfinite, values)):
        raise CallerError(_ask_binary(tensor.name, "holds NaN or infinity, which JSON has no word for"))
    return values


def _pack(datatype: str, values: list[Any]) -> bytes:
    if datatype == BYTES:
        return pack_bytes([item.encode() for item in values])
    return struct.pack(f"<{len(values)}{FORMATS[datatype]}", *values)


def _no_json(side: str, name: str, datatype: str) -> str:
    if datatype in ITEM_BYTES:
        return f"{side} {name!r} is {datatype}, which has no JSON form: use the binary tensor extension"
    return f"{side} {name!r} has unknown datatype {datatype!r}; known: {', '.join([*ITEM_BYTES, BYTES])}"


def _ask_binary(name: str, why: str) -> str:
    return f'output {name!r} {why}: ask for it with parameters {{"binary_data": true}}'

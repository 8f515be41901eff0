"""Tensors as the wire knows them: a datatype, a shape, little-endian row-major bytes."""

from collections.abc import Sequence
from math import prod

import msgspec

from overwinter.core.errors import CallerError

Buffer = bytes | bytearray | memoryview

ITEM_BYTES: dict[str, int] = {
    "BOOL": 1,
    "UINT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "UINT64": 8,
    "INT8": 1,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
    "FP16": 2,
    "BF16": 2,
    "FP32": 4,
    "FP64": 8,
}
"""Bytes of one element of each Open Inference Protocol datatype of fixed size."""

DATATYPES: dict[str, str] = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "bfloat16": "BF16",
    "float32": "FP32",
    "float64": "FP64",
}
"""What PyTorch and NumPy call an element type, and its datatype in the protocol."""

BYTES = "BYTES"
"""The datatype whose elements are each a 4-byte little-endian length and that many bytes."""


class TensorSpec(msgspec.Struct, frozen=True):
    """What a function takes or gives: a named datatype and a shape; a str in it is a dynamic size."""

    name: str
    datatype: str
    shape: tuple[int | str, ...]


class TensorMeta(msgspec.Struct, frozen=True, array_like=True):
    """One tensor's name, datatype, shape and the bytes it takes, without the bytes."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    nbytes: int


class Tensor(msgspec.Struct):
    """A named tensor with its bytes."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Buffer

    @property
    def meta(self) -> TensorMeta:
        """The tensor without its bytes."""
        return TensorMeta(self.name, self.datatype, self.shape, len(self.data))


def pack_bytes(elements: list[bytes]) -> bytes:
    """Encode the elements of a BYTES tensor."""
    return b"".join(len(item).to_bytes(4, "little") + item for item in elements)


def unpack_bytes(data: Buffer, count: int) -> list[bytes]:
    """Decode `count` elements of a BYTES tensor; CallerError when they do not fill `data` exactly."""
    view = memoryview(data).cast("B")
    elements: list[bytes] = []
    at = 0
    for _ in range(count):
        stop = at + 4 + int.from_bytes(view[at : at + 4], "little")
        if at + 4 > len(view) or stop > len(view):
            raise CallerError(f"BYTES tensor ends inside element {len(elements)} of {count}")
        elements.append(bytes(view[at + 4 : stop]))
        at = stop
    if at != len(view):
        raise CallerError(f"BYTES tensor has {len(view) - at} bytes after its {count} elements")
    return elements


def check_size(tensor: Tensor) -> None:
    """CallerError unless the datatype is known and the bytes fill the shape exactly."""
    if any(size < 0 for size in tensor.shape):
        raise CallerError(f"tensor {tensor.name!r} has a negative size in shape {list(tensor.shape)}")
    count = prod(tensor.shape)
    if tensor.datatype == BYTES:
        unpack_bytes(tensor.data, count)
        return
    item = ITEM_BYTES.get(tensor.datatype)
    if item is None:
        known = ", ".join([*ITEM_BYTES, BYTES])
        raise CallerError(f"tensor {tensor.name!r} has unknown datatype {tensor.datatype!r}; known: {known}")
    if len(tensor.data) != count * item:
        raise CallerError(
            f"tensor {tensor.name!r} of {tensor.datatype} {list(tensor.shape)} needs {count * item} bytes, "
            f"got {len(tensor.data)}"
        )


def check_inputs(inputs: Sequence[Tensor], specs: Sequence[TensorSpec]) -> None:
    """CallerError unless `inputs` are exactly the `specs`: names, datatypes, ranks, sizes; equal sizes where a name of
    a dimension occurs twice.
    """
    wanted = {spec.name: spec for spec in specs}
    sizes: dict[str, int] = {}
    for tensor in inputs:
        spec = wanted.pop(tensor.name, None)
        if spec is None:
            known = ", ".join(repr(each.name) for each in specs)
            raise CallerError(f"unknown or repeated input {tensor.name!r}; the inputs are {known or 'none'}")
        if tensor.datatype != spec.datatype:
            raise CallerError(f"input {tensor.name!r} is {spec.datatype}, not {tensor.datatype}")
        if len(tensor.shape) != len(spec.shape):
            raise _misfit(tensor, spec)
        for size, expected in zip(tensor.shape, spec.shape, strict=True):
            if size != (expected if isinstance(expected, int) else sizes.setdefault(expected, size)):
                raise _misfit(tensor, spec)
    if wanted:
        raise CallerError(f"input {next(iter(wanted))!r} is missing")


def _misfit(tensor: Tensor, spec: TensorSpec) -> CallerError:
    return CallerError(f"input {tensor.name!r} has shape {list(tensor.shape)}; the function takes {list(spec.shape)}")

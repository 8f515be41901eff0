"""Tensors in the format of the wire: a datatype, a shape, little-endian row-major bytes."""

from collections.abc import Iterator, Sequence
from math import prod
from struct import Struct
from typing import Annotated

import msgspec
from msgspec import Meta

from overwinter.core.datatypes import DATATYPE_BYTES
from overwinter.core.errors import CallerError, TooLargeError

Buffer = bytes | bytearray | memoryview

BYTES = "BYTES"
"""The datatype whose elements each consist of a 4-byte little-endian length and that many bytes."""

RANK_MAX = 64
"""The most dimensions of a shape, as in PyTorch's operators."""
SIZES_PRODUCT_MAX = 1 << 59
"""The most elements of a shape, with ones in place of its zeros: PyTorch computes the strides of empty tensors too."""
TENSORS_MAX = 1024
"""The most inputs, and the most outputs, of a function or a pipeline."""
TENSOR_NAME_MAX = 256
"""The most characters in the name of a tensor or of a dynamic size."""
RUN_TENSORS_MAX = 4096
"""The most inputs and outputs of one run: the event loop handles those of a run without a pause."""
RUN_SIZES_MAX = 16_384
"""The most sizes in the shapes of these, if the run has several requests."""
ELEMENTS_MAX = 65_536
"""The most elements of the BYTES tensors that a function returns for one request, and the default for its inputs."""
ELEMENTS_OF_STEP = 1024
"""The elements of a BYTES tensor that one step of a check reads: about 0.2 ms."""
ANSWER_BYTES_MAX = 64 << 20
"""The most bytes that a function returns for one request, in all outputs together."""

# A `$` instead of \Z would accept a trailing newline.
PRINTABLE = r"\A[^\x00-\x1f\x7f-\x9f]*\Z"
"""Names contain no control characters, which could control a terminal."""

TensorName = Annotated[str, Meta(max_length=TENSOR_NAME_MAX, pattern=PRINTABLE)]
SizeName = Annotated[str, Meta(max_length=TENSOR_NAME_MAX, pattern=PRINTABLE)]

_length = Struct("<I").unpack_from


class TensorSpec(msgspec.Struct, frozen=True, gc=False):
    """An input or output of a function: its name, datatype and shape; a str in the shape is a dynamic size."""

    name: TensorName
    datatype: str
    shape: Annotated[tuple[int | SizeName, ...], Meta(max_length=RANK_MAX)]


class TensorMeta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The name, datatype, shape and number of bytes of a tensor, without the bytes."""

    name: str
    datatype: str
    shape: Annotated[tuple[int, ...], Meta(max_length=RANK_MAX)]
    nbytes: int


TensorMetas = Annotated[tuple[TensorMeta, ...], Meta(max_length=TENSORS_MAX)]
"""The tensors of one request in a message. More of them are refused before any is decoded."""


def requests_of_run_max(specs: Sequence[TensorSpec]) -> int:
    """Return the most requests with these inputs and outputs that a run may have; at least 1."""
    sizes = sum(len(spec.shape) for spec in specs)
    return max(1, min(RUN_TENSORS_MAX // max(1, len(specs)), RUN_SIZES_MAX // max(1, sizes)))


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
    """Decode `count` elements of a BYTES tensor; raises CallerError when they do not fill `data` exactly."""
    view = memoryview(data).cast("B")
    stops = _stops(view, count)
    return [bytes(view[start + 4 : stop]) for start, stop in zip([0, *stops], stops, strict=False)]


def _stops(view: memoryview, count: int) -> list[int]:
    """Return the end of each element of a BYTES tensor; raise CallerError unless they fill it exactly."""
    # Each element takes at least the bytes of its length, so a false count costs nothing.
    stops = _stops_from(view, 0, count if 4 * count <= len(view) else 0)
    _check_end(view, count, stops[-1] if stops else 0, len(stops))
    return stops


def _stops_from(view: memoryview, at: int, count: int) -> list[int]:
    """Return the end of each of the next `count` elements; fewer if the bytes end before."""
    stops: list[int] = []
    for _ in range(count):
        if at + 4 > len(view):
            break
        at += 4 + _length(view, at)[0]
        stops.append(at)
    return stops


def _check_end(view: memoryview, count: int, at: int, found: int) -> None:
    """Raise CallerError unless all `count` elements were found and end where the bytes end."""
    if found < count or at > len(view):
        raise CallerError(f"BYTES tensor of {len(view)} bytes ends inside its {count} elements")
    if at != len(view):
        raise CallerError(f"BYTES tensor has {len(view) - at} bytes after its {count} elements")


def check_size(tensor: Tensor, elements_max: int = ELEMENTS_MAX) -> None:
    """Raise CallerError unless the datatype is known, the shape is valid and the bytes fill it exactly; TooLargeError
    if a BYTES tensor has more than `elements_max` elements.
    """
    for _ in check_steps(tensor, elements_max):
        pass


def check_steps(tensor: Tensor, elements_max: int = ELEMENTS_MAX) -> Iterator[None]:
    """Check as `check_size` does, in steps of ELEMENTS_OF_STEP elements."""
    if len(tensor.shape) > RANK_MAX:
        raise CallerError(f"tensor {tensor.name!r} has {len(tensor.shape)} sizes in its shape; at most {RANK_MAX}")
    if min(tensor.shape, default=0) < 0:
        raise CallerError(f"tensor {tensor.name!r} has a negative size in shape {list(tensor.shape)}")
    count = prod(tensor.shape)
    if tensor.datatype == BYTES:
        check_elements(tensor.name, count, elements_max)
        yield from _element_steps(memoryview(tensor.data).cast("B"), count)
        return
    item = DATATYPE_BYTES.get(tensor.datatype)
    if item is None:
        known = ", ".join([*DATATYPE_BYTES, BYTES])
        raise CallerError(f"tensor {tensor.name!r} has unknown datatype {tensor.datatype!r}; known: {known}")
    if len(tensor.data) != count * item:
        raise CallerError(
            f"tensor {tensor.name!r} of {tensor.datatype} {list(tensor.shape)} needs {count * item} bytes, "
            f"got {len(tensor.data)}"
        )


def _element_steps(view: memoryview, count: int) -> Iterator[None]:
    at = found = 0
    left = count if 4 * count <= len(view) else 0
    while left > 0:
        stops = _stops_from(view, at, min(left, ELEMENTS_OF_STEP))
        at, found, left = stops[-1] if stops else at, found + len(stops), left - ELEMENTS_OF_STEP
        if left > 0:
            yield
    _check_end(view, count, at, found)


def check_elements(name: str, count: int, elements_max: int) -> None:
    """Raise TooLargeError when a BYTES tensor has too many elements."""
    if count > elements_max:
        raise TooLargeError(
            f"BYTES tensor {name!r} has {count} elements, and the limit for a request leaves {elements_max} for it: "
            "send fewer, one element that holds them all, or start the node with a larger --elements-max"
        )


def check_inputs(inputs: Sequence[Tensor], specs: Sequence[TensorSpec]) -> None:
    """Raise CallerError unless `inputs` are exactly the `specs`: names, datatypes, ranks, sizes; equal sizes where a
    name of a dimension occurs twice.
    """
    wanted = {spec.name: spec for spec in specs}
    sizes: dict[str, tuple[int, str]] = {}
    for tensor in inputs:
        if prod(max(1, size) for size in tensor.shape) > SIZES_PRODUCT_MAX:
            raise CallerError(f"input {tensor.name!r} has the impossible shape {list(tensor.shape)}")
        spec = wanted.pop(tensor.name, None)
        if spec is None:
            known = ", ".join(repr(each.name) for each in specs)
            raise CallerError(f"unknown or repeated input {tensor.name!r}; the inputs are {known or 'none'}")
        if tensor.datatype != spec.datatype:
            raise CallerError(f"input {tensor.name!r} is {spec.datatype}, not {tensor.datatype}")
        _check_shape(tensor, spec, sizes)
    if wanted:
        raise CallerError(f"input {next(iter(wanted))!r} is missing")


def _check_shape(tensor: Tensor, spec: TensorSpec, sizes: dict[str, tuple[int, str]]) -> None:
    """Raise CallerError unless the shape fits. `sizes`: each named size so far, and the input where it occurred."""
    if len(tensor.shape) != len(spec.shape):
        raise _misfit(tensor, spec)
    for size, expected in zip(tensor.shape, spec.shape, strict=True):
        if isinstance(expected, int):
            if size != expected:
                raise _misfit(tensor, spec)
        elif (known := sizes.setdefault(expected, (size, tensor.name)))[0] != size:
            raise _misfit(tensor, spec, f", and {expected!r} is {known[0]} in input {known[1]!r}")


def _misfit(tensor: Tensor, spec: TensorSpec, why: str = "") -> CallerError:
    return CallerError(
        f"input {tensor.name!r} has shape {list(tensor.shape)}; the function takes {list(spec.shape)}{why}"
    )

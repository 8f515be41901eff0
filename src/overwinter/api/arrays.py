"""Converts a Python user's arrays to tensors and back.

Arrays of PyTorch and NumPy are recognized by their attributes, so that neither needs to be installed.
"""

import ctypes
import struct
from collections.abc import Callable, Iterable
from itertools import chain
from math import prod
from typing import Any

from overwinter.core.datatypes import DATATYPES, DTYPES, FORMATS
from overwinter.core.errors import CallerError
from overwinter.core.tensor import BYTES, Tensor, TensorSpec, pack_bytes, unpack_bytes

ArrayLike = Any
"""A PyTorch tensor, a NumPy array or scalar, a number, a str, bytes, or (nested) lists or tuples of scalars, str or
bytes.
"""

_STRUCT_FORMATS = {**FORMATS, "FP16": "e"}


def to_tensor(name: str, value: ArrayLike, spec_of: Callable[[], TensorSpec]) -> Tensor:
    """Convert a value to a named tensor; `spec_of` is called only if the value has no datatype. Raises CallerError."""
    if hasattr(value, "data_ptr"):
        return _from_torch(name, value)
    if hasattr(value, "tobytes") and hasattr(value, "dtype"):
        return _from_numpy(name, value)
    return _from_lists(name, value, spec_of().datatype)


def from_tensor(tensor: Tensor) -> Any:
    """Convert a tensor to a NumPy array, or to nested lists without NumPy. BF16 becomes float32, exactly; elements of
    BYTES become bytes.
    """
    try:
        import numpy
    except ImportError:
        return _to_lists(tensor)
    if tensor.datatype == BYTES:
        elements = numpy.empty(prod(tensor.shape), dtype=object)
        elements[:] = unpack_bytes(tensor.data, elements.size)
        return elements.reshape(tensor.shape)
    if tensor.datatype == "BF16":
        return (numpy.frombuffer(tensor.data, "<u2").astype("<u4") << 16).view("<f4").reshape(tensor.shape)
    dtype = numpy.dtype(DTYPES[tensor.datatype]).newbyteorder("<")
    return numpy.frombuffer(tensor.data, dtype).reshape(tensor.shape)


def _from_torch(name: str, value: Any) -> Tensor:
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in DATATYPES:
        raise CallerError(f"input {name!r} is a tensor of {dtype}; known: {', '.join(DATATYPES)}")
    # `contiguous` does not copy a tensor of one element, so it would not apply a negation that PyTorch has deferred.
    whole = value.detach().cpu().resolve_neg().contiguous()
    # PyTorch's own fast access to a tensor's bytes needs NumPy, which may not be installed.
    data = ctypes.string_at(whole.data_ptr(), whole.numel() * whole.element_size())
    return Tensor(name, DATATYPES[dtype], tuple(whole.shape), data)


def _from_numpy(name: str, value: Any) -> Tensor:
    if value.dtype.kind in "OSU":
        return Tensor(name, BYTES, tuple(value.shape), pack_bytes([_as_bytes(name, x) for x in value.ravel().tolist()]))
    dtype = value.dtype.name
    if dtype not in DATATYPES:
        raise CallerError(f"input {name!r} is an array of {dtype}; known: {', '.join(DATATYPES)}")
    little = value.astype(value.dtype.newbyteorder("<"), copy=False)
    return Tensor(name, DATATYPES[dtype], tuple(value.shape), little.tobytes())


def _from_lists(name: str, value: Any, datatype: str) -> Tensor:
    shape: list[int] = []
    items = [value]
    while items and isinstance(items[0], list | tuple):
        sizes = {len(item) if isinstance(item, list | tuple) else -1 for item in items}
        if len(sizes) > 1:
            raise CallerError(f"input {name!r} has lists of different lengths at depth {len(shape)}, or not only lists")
        shape.append(sizes.pop())
        items = list(chain.from_iterable(items))
    if datatype == BYTES:
        return Tensor(name, BYTES, tuple(shape), pack_bytes([_as_bytes(name, item) for item in items]))
    code = _STRUCT_FORMATS.get(datatype)
    if code is None:
        raise CallerError(f"input {name!r} is {datatype}, which lists cannot represent: pass a PyTorch tensor")
    # For BOOL, `struct` packs the truth value of any object.
    if datatype == "BOOL" and any(isinstance(item, str | bytes) or item not in (False, True) for item in items):
        raise CallerError(f"input {name!r} is BOOL: its elements must be true or false")
    try:
        return Tensor(name, datatype, tuple(shape), struct.pack(f"<{len(items)}{code}", *items))
    except (struct.error, OverflowError) as error:
        raise CallerError(f"input {name!r} is not {datatype}: {error}") from error


def _as_bytes(name: str, item: Any) -> bytes:
    if isinstance(item, bytes):
        return item
    if isinstance(item, str):
        try:
            return item.encode()
        except UnicodeEncodeError as error:
            raise CallerError(f"input {name!r} has text that is not valid Unicode: {error}") from None
    raise CallerError(f"input {name!r} is BYTES: it takes str and bytes, not {type(item).__name__}")


def _to_lists(tensor: Tensor) -> Any:
    count = prod(tensor.shape)
    values: Iterable[Any]
    if tensor.datatype == BYTES:
        values = unpack_bytes(tensor.data, count)
    elif tensor.datatype == "BF16":
        halves = struct.unpack(f"<{count}H", tensor.data)
        values = struct.unpack(f"<{count}f", struct.pack(f"<{count}I", *(half << 16 for half in halves)))
    else:
        values = struct.unpack(f"<{count}{_STRUCT_FORMATS[tensor.datatype]}", tensor.data)
    return _nest(list(values), tensor.shape)


def _nest(values: list[Any], shape: tuple[int, ...]) -> Any:
    if not shape:
        return values[0]
    if len(shape) == 1:
        return values
    step = prod(shape[1:])
    return [_nest(values[at * step : (at + 1) * step], shape[1:]) for at in range(shape[0])]

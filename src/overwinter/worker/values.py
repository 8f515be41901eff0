"""Converts between the bytes of a buffer and the tensors of a program."""

import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod

import torch

from overwinter.core.datatypes import DTYPES
from overwinter.core.errors import HandlerError
from overwinter.core.tensor import ANSWER_BYTES_MAX, BYTES, ELEMENTS_MAX, TensorMeta, pack_bytes, unpack_bytes
from overwinter.worker.buffer import SharedBuffer, offsets

Value = torch.Tensor | list[bytes] | list[list[bytes]]
"""A tensor; BYTES as a list: of an input's elements, or of the elements or rows of an output of rank 1 or 2."""

TORCH_DTYPES: dict[str, torch.dtype] = {datatype: getattr(torch, dtype) for datatype, dtype in DTYPES.items()}
TORCH_DATATYPES: dict[torch.dtype, str] = {dtype: datatype for datatype, dtype in TORCH_DTYPES.items()}


def read(buffer: SharedBuffer, meta: TensorMeta, offset: int) -> Value:
    """Return the tensor at `offset`, without a copy; a BYTES tensor as a list of its elements, row-major."""
    if meta.datatype == BYTES:
        return unpack_bytes(buffer.view[offset : offset + meta.nbytes], prod(meta.shape))
    dtype = TORCH_DTYPES[meta.datatype]
    count = prod(meta.shape)
    if count == 0:
        return torch.empty(meta.shape, dtype=dtype)
    return torch.frombuffer(buffer.map, dtype=dtype, count=count, offset=offset).view(meta.shape)


def read_requests(buffer: SharedBuffer, requests: Iterable[Sequence[TensorMeta]]) -> list[dict[str, Value]]:
    """Return the inputs of requests, which are in a buffer in this order."""
    requests = list(requests)
    *places, nbytes = offsets(meta for metas in requests for meta in metas)
    buffer.grow(nbytes)
    at = iter(places)
    return [{meta.name: read(buffer, meta, next(at)) for meta in metas} for metas in requests]


def plain(name: str, value: torch.Tensor) -> torch.Tensor:
    """Return a separate tensor object with the same memory, which later changes of the object `value` do not affect.

    Raises HandlerError, naming it, for a tensor that is not a plain one of the CPU, and for any subclass but Parameter,
    because others may report anything about themselves.
    """
    if type(value) not in _PLAIN:
        raise HandlerError(f"{name!r} is of type {type(value).__name__}: give value.as_subclass(torch.Tensor)")
    if value.is_cpu and value.layout is torch.strided and not (value.is_nested or value.is_quantized):
        return value.detach()
    kind = next((word for word, is_kind in _KINDS if is_kind(value)), "on another device")
    raise HandlerError(f"{name!r} is {kind}: give a plain tensor of the CPU")


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_KINDS: tuple[tuple[str, Callable[[torch.Tensor], bool]], ...] = (
    ("a meta tensor, which has no elements", lambda value: value.is_meta),
    ("a nested tensor", lambda value: value.is_nested),
    ("quantized", lambda value: value.is_quantized),
    ("a sparse tensor", lambda value: value.layout is not torch.strided),
)


class NoRows(list[list[bytes]]):
    """BYTES of two dimensions without rows. Its list alone does not show that there are two."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width


class EncodedTensor:
    """A tensor to be written into a buffer: its description and the source of its bytes."""

    def __init__(self, name: str, value: Value) -> None:
        self._elements: list[bytes] | None = None
        self._tensor: torch.Tensor | None = None
        if isinstance(value, torch.Tensor):
            value = self._tensor = plain(name, value)
            if value.dtype not in TORCH_DATATYPES:
                raise HandlerError(f"output {name!r} is of {value.dtype}, which cannot be sent to a client")
            self.meta = TensorMeta(name, TORCH_DATATYPES[value.dtype], tuple(value.shape), value.nbytes)
        else:
            rows = [item for item in value if isinstance(item, list)]
            elements = [element for row in rows for element in row] or [e for e in value if isinstance(e, bytes)]
            if len(elements) > ELEMENTS_MAX:
                raise HandlerError(f"output {name!r} has {len(elements)} elements; BYTES may have {ELEMENTS_MAX}")
            shape: tuple[int, ...] = (len(rows), len(rows[0])) if rows else (len(value),)
            if isinstance(value, NoRows):
                shape = (0, value.width)
            # They are packed when they are written. Before, their limits are checked: a list may name one large object
            # many times, and would take far more memory than the handler did.
            self._elements = elements
            self.meta = TensorMeta(name, BYTES, shape, sum(4 + len(element) for element in elements))

    def write(self, target: mmap.mmap | bytearray, offset: int) -> None:
        """Copy the bytes to their place; raise HandlerError if that is impossible."""
        if self._elements is not None:
            target[offset : offset + self.meta.nbytes] = pack_bytes(self._elements)
        elif self._tensor is not None and self._tensor.numel():
            count = self._tensor.numel()
            place = torch.frombuffer(target, dtype=self._tensor.dtype, count=count, offset=offset)
            try:
                place.view(self._tensor.shape).copy_(self._tensor)
            except (RuntimeError, NotImplementedError) as error:
                raise HandlerError(f"tensor {self.meta.name!r} cannot be sent: {error}") from error


def encode_outputs(values: Mapping[str, Value]) -> list[EncodedTensor]:
    """Encode each value, in order; raise HandlerError if one cannot be sent, or together they exceed the limits of an
    answer.
    """
    made = [EncodedTensor(name, value) for name, value in values.items()]
    nbytes = sum(encoded.meta.nbytes for encoded in made)
    if nbytes > ANSWER_BYTES_MAX:
        raise HandlerError(f"the answer has {nbytes} bytes; it may have {ANSWER_BYTES_MAX}")
    elements = sum(prod(encoded.meta.shape) for encoded in made if encoded.meta.datatype == BYTES)
    if elements > ELEMENTS_MAX:
        raise HandlerError(f"the answer has {elements} elements of BYTES; it may have {ELEMENTS_MAX}")
    return made

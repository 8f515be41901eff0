"""Writes the elements of an answer's tensors as JSON: in steps, within a limit, and in memory reserved for the request.

The text may be much longer than the tensors: a byte may take six characters.
"""

from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator, Sequence
from math import isfinite, prod
from typing import Any

import msgspec

from overwinter.api.steps import STEP_BYTES, Steps
from overwinter.core.datatypes import FORMATS
from overwinter.core.errors import CallerError, TooLargeError
from overwinter.core.tensor import BYTES, Tensor

STEP_ELEMENTS = 8192
"""The elements that are written in one step."""
ELEMENT_BYTES = STEP_BYTES // STEP_ELEMENTS
"""The bytes of a string that take as long to write as a number."""

_encode = msgspec.json.Encoder().encode
_utf8 = getincrementaldecoder("utf-8")


class ElementWriter:
    """Writes the elements of all tensors of one answer."""

    def __init__(self, bytes_max: int, grow: Callable[[int], object]) -> None:
        """`grow` reserves memory for so many bytes more; it may raise an error."""
        self._bytes_max = self._left = bytes_max
        self._grow = grow
        self._in_step = 0
        """The elements written in this step."""

    def write(self, tensor: Tensor) -> Steps[msgspec.Raw]:
        """Return the JSON of a tensor's elements as a flat list. Raises CallerError when JSON cannot represent them,
        TooLargeError when the JSON of all tensors together exceeds the limit, or this tensor has more bytes than the
        limit still allows, and what `grow` raises.
        """
        if len(tensor.data) > self._left:
            raise self._too_long(tensor)
        text = bytearray(b"[")
        yield from self._strings(tensor, text) if tensor.datatype == BYTES else self._numbers(tensor, text)
        if len(text) == 1:
            text += b"]"
        # Every element is followed by a comma.
        text[-1:] = b"]"
        return msgspec.Raw(text)

    def _numbers(self, tensor: Tensor, text: bytearray) -> Steps[None]:
        code = FORMATS.get(tensor.datatype)
        if code is None:
            raise CallerError(_ask_binary(tensor.name, f"is {tensor.datatype}, which has no JSON form"))
        items = memoryview(tensor.data).cast("B").cast(code)  # type: ignore[call-overload]
        for at in range(0, len(items), STEP_ELEMENTS):
            piece = items[at : at + STEP_ELEMENTS]
            yield from self._pause(len(piece))
            self._add(tensor, text, _encode(_listed(tensor.name, code, piece))[1:-1] + b",")

    def _strings(self, tensor: Tensor, text: bytearray) -> Steps[None]:
        try:
            for batch in _batches(memoryview(tensor.data).cast("B"), prod(tensor.shape)):
                nbytes = sum(map(len, batch))
                if nbytes > STEP_BYTES:
                    yield from self._long_string(tensor, text, batch[0])
                else:
                    yield from self._pause(len(batch) + nbytes // ELEMENT_BYTES)
                    self._add(tensor, text, _encode([str(item, "utf-8") for item in batch])[1:-1] + b",")
        except UnicodeDecodeError as error:
            raise CallerError(_ask_binary(tensor.name, "holds bytes that are not UTF-8")) from error

    def _long_string(self, tensor: Tensor, text: bytearray, item: memoryview) -> Steps[None]:
        decoder = _utf8()
        self._add(tensor, text, b'"')
        for at in range(0, len(item), STEP_BYTES):
            yield from self._pause(STEP_ELEMENTS)
            piece = decoder.decode(bytes(item[at : at + STEP_BYTES]), at + STEP_BYTES >= len(item))
            self._add(tensor, text, _encode(piece)[1:-1])
        self._add(tensor, text, b'",')

    def _pause(self, elements: int) -> Steps[None]:
        """End the step if this many elements more are too many for it. A short answer has only one step."""
        if self._in_step and self._in_step + elements > STEP_ELEMENTS:
            self._in_step = 0
            yield
        self._in_step += elements

    def _add(self, tensor: Tensor, text: bytearray, piece: bytes) -> None:
        self._left -= len(piece)
        if self._left < 0:
            raise self._too_long(tensor)
        self._grow(len(piece))
        text += piece

    def _too_long(self, tensor: Tensor) -> TooLargeError:
        why = f"is too large for an answer in JSON, which may have {self._bytes_max} bytes"
        return TooLargeError(_ask_binary(tensor.name, why))


def _batches(view: memoryview, count: int) -> Iterator[Sequence[memoryview]]:
    """Cut a BYTES tensor into lists of elements that are written in one step; a longer element comes alone."""
    batch: list[memoryview] = []
    at = nbytes = 0
    for _ in range(count):
        stop = at + 4 + int.from_bytes(view[at : at + 4], "little")
        if batch and (len(batch) == STEP_ELEMENTS or nbytes + stop - at > STEP_BYTES):
            yield batch
            batch, nbytes = [], 0
        batch.append(view[at + 4 : stop])
        nbytes += stop - at
        at = stop
    if batch:
        yield batch


def _listed(name: str, code: str, items: memoryview) -> list[Any]:
    values: list[Any] = items.tolist()
    # One sum is far cheaper than a check of each element. It is finite unless an element is not, or the sum overflows.
    if code in "fd" and not isfinite(sum(values)) and not all(map(isfinite, values)):
        raise CallerError(_ask_binary(name, "holds NaN or infinity, which JSON cannot represent"))
    return values


def _ask_binary(name: str, why: str) -> str:
    return f'output {name!r} {why}: ask for it with parameters {{"binary_data": true}}'

"""Encodes and decodes programs.

A program is encoded as msgpack. A decoder blocks all threads of the process until it returns, and so does freeing what
it returned. The long lists of a program are therefore decoded in steps of a bounded number of bytes, and no further
when they have too many parts.
"""

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw
from msgspec.msgpack import Decoder

from overwinter.core.errors import ProgramError
from overwinter.core.tensor import TensorSpec
from overwinter.model.structure import FORMAT_VERSION, Call, Layer, Program, Value, Weight, count_parts

MAX_PROGRAM_BYTES = 64 << 20
STEP_BYTES = 256 << 10
"""The most bytes of calls, values, weights or layers that are decoded at once, and so the most bytes of one of them."""
SPEC_STEP_BYTES = 16 << 10
"""The same for inputs and outputs: each name in them takes half a microsecond."""
MAX_CALLS = 32_768
MAX_WEIGHTS = 100_000
MAX_VALUES = 131_072
MAX_TENSORS = 1_000
"""The most inputs, and the most outputs."""
MAX_DIMENSIONS = 16
MAX_PARTS = 131_072
"""The most parts of the arguments of all calls. No model of `benchmarks.zoo` has a twentieth as many."""
MAX_ALL_TERMS = 262_144
"""The most terms of the sizes of all values. No model of `benchmarks.zoo` has a hundredth as many."""


class _Outline(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A program whose fields, except `version`, are not decoded yet. A field that is given twice thus costs nothing."""

    version: int = FORMAT_VERSION
    inputs: Raw
    outputs: Raw
    weights: Raw
    calls: Raw
    values: Raw
    output_slots: Raw
    layers: Raw
    dimensions: Raw
    example: Raw


class _List:
    """Decodes a list: at once if it is short, else entry by entry."""

    def __init__(
        self,
        kind: type,
        most: int,
        step_bytes: int = STEP_BYTES,
        count: Callable[[Any], int] = lambda entry: 0,
        parts_max: int = 0,
    ) -> None:
        length = Meta(max_length=most)
        self._step_bytes = step_bytes
        self._count = count
        self._parts_max = parts_max
        self._decode_all = Decoder(Annotated[tuple[kind, ...], length]).decode  # type: ignore[valid-type]
        self._decode_entry = Decoder[Any](kind).decode
        self._split = Decoder(Annotated[tuple[Raw, ...], length]).decode

    def __call__(self, data: Raw) -> tuple[object, ...]:
        """Return the entries. For a list that takes several steps, raise ValueError if an entry is too long for one
        step, or if the entries together have too many parts.
        """
        if len(memoryview(data)) <= self._step_bytes:
            return tuple(self._decode_all(data))
        entries: list[object] = []
        parts = 0
        for index, part in enumerate(self._split(data)):
            nbytes = len(memoryview(part))
            if nbytes > self._step_bytes:
                raise ValueError(f"entry {index} has {nbytes} bytes, the limit is {self._step_bytes}")
            entry = self._decode_entry(part)
            parts += self._count(entry)
            if parts > self._parts_max:
                raise ValueError(f"entries 0 to {index} have {parts} parts, the limit for all is {self._parts_max}")
            entries.append(entry)
        return tuple(entries)


_decode_outline = Decoder(_Outline).decode
_FIELDS: dict[str, Callable[[Raw], Any]] = {
    "inputs": _List(TensorSpec, MAX_TENSORS, SPEC_STEP_BYTES),
    "outputs": _List(TensorSpec, MAX_TENSORS, SPEC_STEP_BYTES),
    "weights": _List(Weight, MAX_WEIGHTS),
    "calls": _List(Call, MAX_CALLS, count=count_parts, parts_max=MAX_PARTS),
    "values": _List(Value, MAX_VALUES, count=lambda value: len(value.nbytes), parts_max=MAX_ALL_TERMS),
    "output_slots": Decoder(Annotated[tuple[int, ...], Meta(max_length=MAX_TENSORS)]).decode,
    "layers": _List(Layer, MAX_CALLS),
    "dimensions": Decoder(Annotated[dict[str, tuple[int, int]], Meta(max_length=MAX_DIMENSIONS)]).decode,
    "example": Decoder(Annotated[dict[str, int], Meta(max_length=MAX_DIMENSIONS)]).decode,
}


def encode_program(program: Program) -> bytes:
    """Encode the program; the same program always gives the same bytes."""
    return msgspec.msgpack.encode(program)


def decode_program(data: bytes) -> Program:
    """Decode the program in `data` without validation; raise ProgramError if it cannot be decoded."""
    if len(data) > MAX_PROGRAM_BYTES:
        raise ProgramError(f"a program of {len(data)} bytes is over the limit of {MAX_PROGRAM_BYTES}")
    field = "outline"
    try:
        outline = _decode_outline(data)
        fields = {}
        for field, decode in _FIELDS.items():
            fields[field] = decode(getattr(outline, field))
        return Program(version=outline.version, **fields)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise ProgramError(f"not a program: {field}: {error}") from error

"""The data types of a program.

A program is a flat list of operator calls over numbered slots. The weights have the first slots, in the order in which
the calls of the exported program first use them (slices keep this order); the inputs follow; then each result of each
call, in the order of the calls. A slot is assigned once. `frees` of a call lists the results that are not needed after
it.
"""

import re
from collections.abc import Mapping
from math import prod

import msgspec

from overwinter.core.datatypes import DTYPE_BYTES
from overwinter.core.tensor import TensorSpec

FORMAT_VERSION = 1

BATCH = "batch"
"""The dynamic size that counts the rows of a request. Requests can be joined along it."""

_WORD = re.compile(r"\w+")

SYMBOLIC_KINDS = frozenset({"symint", "symfloat", "symbool"})
"""The types of values that are Python numbers instead of tensors."""

MEMORY_FORMATS = frozenset({"contiguous_format", "preserve_format", "channels_last", "channels_last_3d"})


class Slot(msgspec.Struct, frozen=True, gc=False, tag="s", tag_field="k", rename={"number": "n"}):
    """An argument that is a weight, an input or an earlier result."""

    number: int


class Dtype(msgspec.Struct, frozen=True, gc=False, tag="t", tag_field="k", rename={"name": "n"}):
    """An argument that is an element type, by PyTorch's name."""

    name: str


class MemoryFormat(msgspec.Struct, frozen=True, gc=False, tag="m", tag_field="k", rename={"name": "n"}):
    """An argument that is a memory format, by PyTorch's name."""

    name: str


class Device(msgspec.Struct, frozen=True, gc=False, tag="d", tag_field="k"):
    """An argument that is the device on which the program runs."""


SingleArgument = None | bool | int | float | str | Slot | Dtype | MemoryFormat | Device
Argument = SingleArgument | tuple[SingleArgument, ...]


class Weight(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """One parameter, buffer or constant, by its module path.

    `order` lists its dimensions from the outermost to the innermost in memory, if they are not stored in the order of
    the shape (channels last, transposed): some operators give different last bits for another order, and some views
    need it. Whatever the order, there are no gaps between the elements.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


class Call(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """One operator overload, its arguments, the slots of its results, and the slots to free after it."""

    operator: str
    args: tuple[Argument, ...]
    kwargs: dict[str, Argument]
    outputs: tuple[int, ...]
    frees: tuple[int, ...] = ()


class Term(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """A coefficient times a power of each dimension, in the order of `Program.dimensions`."""

    coefficient: float
    powers: tuple[int, ...]


class Value(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """The description of one result: its type, and its bytes as a sum of terms over the dimensions.

    If a size is rounded (`sequence // 2`), the terms omit the rounding. `base` is the slot whose memory the value
    shared at export, or -1 if it has its own memory. A number has a symbolic kind as its dtype and no bytes. `shape` is
    that of a tensor in row-major order with memory of its own, each size fixed or a dimension; None for any other
    value.
    """

    dtype: str
    nbytes: tuple[Term, ...] = ()
    base: int = -1
    shape: tuple[int | str, ...] | None = None


class Layer(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """Consecutive calls made by one module: calls `start` up to but not including `stop`.

    Sizes are at the program's `example`: multiply-accumulates, bytes of the weights first used here, and bytes of
    all results that must be kept or sent if the program is cut after this layer.
    """

    path: str
    start: int
    stop: int
    macs: int
    weight_bytes: int
    output_bytes: int


class Program(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model as data."""

    version: int = FORMAT_VERSION
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    weights: tuple[Weight, ...]
    calls: tuple[Call, ...]
    values: tuple[Value, ...]
    """One for each result of each call, in slot order."""
    output_slots: tuple[int, ...]
    layers: tuple[Layer, ...]
    dimensions: dict[str, tuple[int, int]]
    """The range of each dynamic size."""
    example: dict[str, int]
    """The dynamic sizes for which `layers` is computed: those of the example inputs, except that the batch has its
    smallest value if the model's conditions on sizes allow that.
    """

    @property
    def first_input(self) -> int:
        """The slot of the first input."""
        return len(self.weights)

    @property
    def first_value(self) -> int:
        """The slot of the first call's first result."""
        return len(self.weights) + len(self.inputs)

    @property
    def batching_obstacle(self) -> str:
        """Why requests cannot share a run, judged by shapes; empty if they may."""
        for kind, specs in (("input", self.inputs), ("output", self.outputs)):
            for spec in specs:
                if spec.shape[:1] != (BATCH,):
                    return f"{kind} {spec.name!r} of shape {list(spec.shape)} has no {BATCH!r} as its first dimension"
                if any(BATCH in _WORD.findall(str(size)) for size in spec.shape[1:]):
                    return f"{kind} {spec.name!r} of shape {list(spec.shape)} has {BATCH!r} in a later dimension"
        return "" if self.inputs else "it takes no input"

    def slot_name(self, slot: int) -> str:
        """Return the name of a slot in messages."""
        if slot < self.first_input:
            return f"weight {self.weights[slot].name!r}"
        if slot < self.first_value:
            return f"input {self.inputs[slot - self.first_input].name!r}"
        return f"value {slot}"


def slots_of(call: Call) -> list[int]:
    """Return every slot that a call reads, in the order of its arguments, with repetitions."""
    found: list[int] = []
    for argument in (*call.args, *call.kwargs.values()):
        parts = argument if isinstance(argument, tuple) else (argument,)
        found.extend(part.number for part in parts if isinstance(part, Slot))
    return found


def count_parts(call: Call) -> int:
    """Return the number of parts of a call's arguments: a list has one for each of its elements."""
    return sum(len(each) if isinstance(each, tuple) else 1 for each in (*call.args, *call.kwargs.values()))


def evaluate(terms: tuple[Term, ...], dimensions: Mapping[str, int]) -> int:
    """Return the sum of terms as a whole number, and 0 for a negative sum. `dimensions`: the sizes, in the program's
    order.
    """
    sizes = list(dimensions.values())
    total = sum(
        term.coefficient * prod(size**power for size, power in zip(sizes, term.powers, strict=True)) for term in terms
    )
    return max(0, int(total))

"""Makes a program of one operator call, as a node would run it, on tensors between guard pages.

The tensors of the call are weights. A tensor that the call writes to is a copy of a weight, and some integers are read
from tensors by earlier calls; the results of these are passed in, so that they too are between guard pages.
"""

from math import prod
from random import Random
from typing import Any, NamedTuple

import torch

from benchmarks.guard_pages import GuardedMemory
from benchmarks.operator_calls import OperatorCall, Tensor
from overwinter.core.tensor import TensorSpec
from overwinter.model.compile import resolve
from overwinter.model.liveness import live_in
from overwinter.model.operators import MUTATING
from overwinter.model.structure import Call, Layer, Program, Slot, Value, Weight

MOST_ELEMENTS = 20_000
FROM_TENSORS = 0.2
"""How often a call's whole numbers come from tensors rather than from the program."""
MOST_RESULTS = 8
_DRAWN = 16
"""The random elements of a tensor; larger tensors repeat them."""


class CallProgram(NamedTuple):
    """A program, the call of it that is run, its weights, and the earlier values that the call takes."""

    program: Program
    start: int
    weights: list[torch.Tensor]
    given: list[Any]


class _Early(NamedTuple):
    """The result of a call that precedes the tested one."""

    operator: str
    weight: int
    kind: str
    value: Any


class _Writer:
    def __init__(self, memory: GuardedMemory, rng: Random) -> None:
        self.memory = memory
        self.rng = rng
        self.weights: list[Weight] = []
        self.tensors: list[torch.Tensor] = []
        self.early: list[_Early] = []

    def part(self, part: Any, reads_numbers: bool) -> Any:
        """Return an argument: a tensor as its slot, an early result for a number that is read, anything else
        unchanged.
        """
        if isinstance(part, list):
            return tuple(self.part(inner, reads_numbers) for inner in part)
        if isinstance(part, Tensor):
            return Slot(self._weight(part, writable=False))
        if type(part) is int and reads_numbers and abs(part) < 1 << 63:
            weight = self._weight(Tensor("int64", (), (part,)), writable=False)
            return self._read(_Early("aten.item.default", weight, "symint", part))
        return part

    def written(self, tensor: Tensor) -> _Early:
        """Return a tensor that the call may write to."""
        weight = self._weight(tensor, writable=True)
        return self._read(_Early("aten.clone.default", weight, "float32", self.tensors[weight]))

    def _read(self, early: _Early) -> _Early:
        self.early.append(early)
        return early

    def _weight(self, tensor: Tensor, *, writable: bool) -> int:
        self.tensors.append(_made(tensor, self.memory, self.rng, writable=writable))
        self.weights.append(Weight(f"w{len(self.weights)}", tensor.dtype, tensor.shape))
        return len(self.weights) - 1

    def settled(self, part: Any) -> Any:
        """Return an argument as the program has it, once the number of weights is known."""
        if isinstance(part, _Early):
            return Slot(len(self.weights) + next(at for at, early in enumerate(self.early) if early is part))
        return tuple(self.settled(inner) for inner in part) if type(part) is tuple else part


def program_of(call: OperatorCall, memory: GuardedMemory, rng: Random) -> CallProgram:
    """Return the call as a program, with its inputs."""
    writer = _Writer(memory, rng)
    reads = rng.random() < FROM_TENSORS
    writes = call.operator in MUTATING and bool(call.args) and isinstance(call.args[0], Tensor)
    parts = [writer.written(call.args[0])] if writes else []
    parts += [writer.part(part, reads) for part in call.args[len(parts) :]]
    named = {key: writer.part(part, reads) for key, part in call.kwargs.items()}
    first, start = len(writer.weights), len(writer.early)
    made = tuple(range(first + start, first + start + _results(call.operator, rng)))
    calls = [Call(early.operator, (Slot(early.weight),), {}, (first + at,)) for at, early in enumerate(writer.early)]
    args = tuple(writer.settled(part) for part in parts)
    calls.append(Call(call.operator, args, {key: writer.settled(part) for key, part in named.items()}, made))
    kinds = [*(early.kind for early in writer.early), *("float32" for _ in made)]
    program = Program(
        inputs=(),
        outputs=tuple(TensorSpec(f"y{slot}", "FP32", ()) for slot in made),
        weights=tuple(writer.weights),
        calls=tuple(calls),
        values=tuple(Value(kind) for kind in kinds),
        output_slots=made,
        layers=(Layer("", 0, len(calls), 0, 0, 0),),
        dimensions={},
        example={},
    )
    given = [writer.early[slot - first].value for slot in live_in(program, start)] if start else []
    return CallProgram(program, start, writer.tensors, given)


def _results(operator: str, rng: Random) -> int:
    """Return the number of results that the call has to name."""
    returns = resolve(operator)._schema.returns
    if len(returns) == 1 and isinstance(returns[0].type, torch.ListType):
        return 1 + rng.randrange(MOST_RESULTS)
    return len(returns)


def _made(tensor: Tensor, memory: GuardedMemory, rng: Random, *, writable: bool) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    shape = tensor.shape
    if prod(shape) > MOST_ELEMENTS:
        shape = tuple(min(size, 3) for size in shape)
    if not prod(shape):
        return torch.empty(shape, dtype=dtype)
    steps = _steps(shape, tensor.layout)
    span = 1 + sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
    drawn = _elements(tensor, dtype, rng)
    content = drawn.repeat(-(-span // drawn.numel()))[:span]
    return memory.flat(content, writable=writable).as_strided(shape, steps)


def _elements(tensor: Tensor, dtype: torch.dtype, rng: Random) -> torch.Tensor:
    if tensor.bits:
        # Random bytes as elements of any type; a boolean may then be neither 0 nor 1.
        return torch.frombuffer(bytearray(rng.randbytes(_DRAWN * dtype.itemsize)), dtype=dtype)
    if tensor.of:
        wide = torch.tensor(tensor.of, dtype=None if all(isinstance(one, int) for one in tensor.of) else torch.float64)
        return wide.to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.tensor([rng.uniform(-2, 2) for _ in range(_DRAWN)], dtype=dtype)
    return torch.tensor([rng.randrange(3) for _ in range(_DRAWN)], dtype=dtype)


def _steps(shape: tuple[int, ...], layout: str) -> list[int]:
    """Return the strides of a tensor in this layout; only layouts that programs can produce."""
    order = list(range(len(shape)))
    if layout == "transposed":
        order.reverse()
    if layout == "channels_last" and len(shape) > 2:
        order = [0, *order[2:], 1]
    steps = [0] * len(shape)
    step = 2 if layout == "stepped" else 1
    for dim in reversed(order):
        steps[dim] = step
        step *= shape[dim]
    if layout == "expanded" and shape:
        steps[0] = 0
    if layout == "overlapping" and shape:
        steps[0] = 1
    return steps

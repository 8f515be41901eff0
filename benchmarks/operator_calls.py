"""The calls of operators to test: valid ones of each operator, from a file, and random changes of them.

A line of `operator_calls.txt` is a call: a name and an overload, numbers, texts and lists as in Python, and tensors
written as type and shape, as in `gather.default(f32(3, 4), 1, i64(3, 1, of=[0, 3, 1]))`; `p32` is f32 with positive
elements, `p01` with elements from 0 to 1.
"""

import math
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from overwinter.model.compile import resolve
from overwinter.model.structure import Device, Dtype, MemoryFormat

CALLS = Path(__file__).with_name("operator_calls.txt")

TYPES = {
    "b8": "bool",
    "u8": "uint8",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
    "c64": "complex64",
    "c128": "complex128",
}
LAYOUTS = ("", "", "", "transposed", "expanded", "stepped", "overlapping", "channels_last")
WHOLE = (
    0,
    1,
    -1,
    2,
    -2,
    3,
    7,
    100,
    300,
    1000,
    5000,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    -(1 << 31),
    1 << 32,
    (1 << 40) + 1,
)
EXTREME = (*WHOLE, (1 << 53) + 1, 1 << 62, (1 << 63) - 1, -(1 << 63), -(1 << 62), 3037000500, 46341, 65537)
REAL = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-320, 1e-30, 1e30, 3.5e38, 1e308, -1e308, math.inf, -math.inf, math.nan, 2.0**63)
TEXTS = ("", "none", "mean", "sum", "reflect", "constant", "circular", "replicate", "trunc", "floor", "same", "valid")
MORE_TEXTS = ("tanh", "ortho", "backward", "prod", "amax", "add", "multiply", "fro", "nuc", "left", "right", "ij", "xy")


class Tensor(NamedTuple):
    """A tensor to be made: its type, its memory layout, and its content."""

    dtype: str
    shape: tuple[int, ...]
    of: tuple[float, ...] = ()
    """Its elements, repeated as often as needed; random small numbers if empty."""
    layout: str = ""
    bits: bool = False
    """Whether its bytes are random, whatever its type."""

    def __repr__(self) -> str:
        parts = [str(size) for size in self.shape]
        parts += [f"of={list(self.of)}"] if self.of else []
        parts += [f"layout={self.layout!r}"] if self.layout else []
        parts += ["bits=True"] if self.bits else []
        return f"{next(short for short, name in TYPES.items() if name == self.dtype)}({', '.join(parts)})"


class OperatorCall(NamedTuple):
    """One call to run."""

    operator: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __repr__(self) -> str:
        named = [f"{key}={value!r}" for key, value in self.kwargs.items()]
        return f"{self.operator}({', '.join([*map(repr, self.args), *named])})"


def valid_calls() -> dict[str, list[OperatorCall]]:
    """Return calls that succeed, by operator."""
    found: dict[str, list[OperatorCall]] = {}
    for line in CALLS.read_text().splitlines():
        name, rest = line.split("(", 1)
        operator = f"aten.{name}"
        # The file belongs to this repository, so evaluating it is safe.
        args, kwargs = eval(f"_call({rest}", {"__builtins__": {"float": float}}, _NAMES)
        found.setdefault(operator, []).append(OperatorCall(operator, args, kwargs))
    return found


def _maker(dtype: str) -> Callable[..., Tensor]:
    def make(*shape: int, of: list[float] | None = None) -> Tensor:
        return Tensor(dtype, shape, tuple(of or ()))

    return make


def _positive(*shape: int) -> Tensor:
    return Tensor("float32", shape, (0.5, 1.5, 2.5))


def _shares(*shape: int) -> Tensor:
    return Tensor("float32", shape, (0.0, 0.25, 1.0))


_NAMES: dict[str, Any] = {
    "_call": lambda *args, **kwargs: (args, kwargs),
    "p32": _positive,
    "p01": _shares,
    "dtype": Dtype,
    "memory_format": MemoryFormat,
    "device": Device,
    **{short: _maker(name) for short, name in TYPES.items()},
}


def changed(call: OperatorCall, rng: Random, times: int) -> OperatorCall:
    """Return the call with some of its arguments replaced, mostly by extreme ones."""
    args: list[Any] = list(call.args)
    kwargs = dict(call.kwargs)
    for _ in range(times):
        tensors = [part for part in _flattened([*args, *kwargs.values()]) if isinstance(part, Tensor)]
        places: list[tuple[Any, Any]] = [(args, at) for at in range(len(args))] + [(kwargs, key) for key in kwargs]
        chance = rng.random()
        if chance < 0.2:
            change = _change_of_all(rng)
            args = [_each(part, change) for part in args]
            kwargs = {key: _each(part, change) for key, part in kwargs.items()}
        elif chance < 0.3 or not places:
            kwargs |= _added(call.operator, len(args), kwargs, rng, tensors)
        else:
            holder, key = rng.choice(places)
            holder[key] = _other(holder[key], rng, tensors)
    return OperatorCall(call.operator, tuple(args), kwargs)


def _change_of_all(rng: Random) -> Callable[[Tensor], Tensor]:
    """Return one change for all tensors of a call."""
    match rng.randrange(6):
        case 4 | 5:
            size, other = rng.choice((1, 2, 3, 4, 5, 8, 10)), rng.choice((0, 0, 1, 2, 3, 7, 16, 33, 64))
            return lambda tensor: tensor._replace(shape=tuple(other if one == size else one for one in tensor.shape))
        case 0:
            dtype = rng.choice(list(TYPES.values()))
            return lambda tensor: tensor._replace(dtype=dtype) if dtype.startswith(tensor.dtype[:3]) else tensor
        case 1:
            dtype = rng.choice(("float64", "bfloat16", "float16", "complex64", "int64", "int32", "bool"))
            return lambda tensor: tensor._replace(dtype=dtype)
        case 2:
            layout = rng.choice(LAYOUTS)
            return lambda tensor: tensor._replace(layout=layout)
        case _:
            lowest = rng.choice((-(1 << 63), -(1 << 31)))
            return lambda tensor: tensor if "float" in tensor.dtype else tensor._replace(of=(lowest, -1))


def _each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, list):
        return [_each(part, change) for part in value]
    return change(value) if isinstance(value, Tensor) else value


def _added(operator: str, given: int, kwargs: dict[str, Any], rng: Random, tensors: list[Tensor]) -> dict[str, Any]:
    """Add an argument that the call leaves to its default."""
    left = [argument for argument in resolve(operator)._schema.arguments[given:] if argument.name not in kwargs]
    if not left:
        return {}
    argument = rng.choice(left)
    kind = str(argument.real_type)
    if "Tensor" in kind:
        return {argument.name: rng.choice(tensors) if tensors else None}
    if "ScalarType" in kind:
        return {argument.name: Dtype(rng.choice(list(TYPES.values())))}
    if "List" in kind:
        return {argument.name: [rng.choice(WHOLE) for _ in range(rng.randint(0, 3))]}
    if "str" in kind:
        return {argument.name: rng.choice((*TEXTS, *MORE_TEXTS))}
    default = argument.default_value
    return {argument.name: _other(list(default) if isinstance(default, tuple) else default, rng, tensors)}


def _flattened(values: list[Any]) -> list[Any]:
    return [part for value in values for part in (value if isinstance(value, list) else [value])]


def _other(value: Any, rng: Random, tensors: list[Tensor]) -> Any:
    """Return another argument for this one, mostly of the same kind."""
    if rng.random() < 0.04:
        strange: list[Any] = [None, 3, -1, rng.randrange(50), 1.5, True, "x", [], [2, 2], Dtype("int32"), *tensors]
        return rng.choice(strange)
    match value:
        case Tensor():
            return _other_tensor(value, rng, tensors)
        case list():
            return _other_list(value, rng, tensors)
        case bool():
            return not value
        case int():
            return rng.choice((rng.choice(EXTREME), rng.choice(WHOLE), value + rng.choice((-1, 1))))
        case float():
            return rng.choice(REAL)
        case None:
            return rng.choice((rng.choice(WHOLE), rng.choice(REAL), True, [1, 2], *tensors))
    return _other_name(value, rng)


def _other_name(value: Any, rng: Random) -> Any:
    match value:
        case str():
            return rng.choice((*TEXTS, *MORE_TEXTS))
        case Dtype():
            return Dtype(rng.choice(list(TYPES.values())))
        case MemoryFormat():
            return MemoryFormat(rng.choice(("contiguous_format", "preserve_format", "channels_last")))
    return value


def _other_list(value: list[Any], rng: Random, tensors: list[Tensor]) -> list[Any]:
    kind = rng.randrange(6)
    if kind == 0 or not value:
        return rng.choice(([], value * 2, value[:-1], value[1:], [*value, *value[:1]], [rng.choice(EXTREME)] * 3))
    if kind == 1 and all(isinstance(part, int) for part in value):
        return [rng.choice(WHOLE) for _ in value]
    at = rng.randrange(len(value))
    return [*value[:at], _other(value[at], rng, tensors), *value[at + 1 :]]


def _other_tensor(tensor: Tensor, rng: Random, tensors: list[Tensor]) -> Tensor:
    match rng.randrange(8):
        case 0:
            return tensor._replace(dtype=rng.choice(list(TYPES.values())))
        case 1 | 2:
            return tensor._replace(shape=_other_shape(tensor.shape, rng))
        case 3:
            return tensor._replace(layout=rng.choice(LAYOUTS))
        case 4:
            return tensor._replace(bits=True)
        case 5:
            return rng.choice(tensors) if tensors else tensor
        case _:
            return tensor._replace(of=_other_elements(tensor, rng))


def _other_shape(shape: tuple[int, ...], rng: Random) -> tuple[int, ...]:
    sizes = list(shape)
    if not sizes:
        return rng.choice(((1,), (0,), (3,), (2, 2)))
    at = rng.randrange(len(sizes))
    match rng.randrange(5):
        case 0:
            del sizes[at]
        case 1:
            sizes.insert(at, rng.choice((0, 1, 1, 2, 3)))
        case 2:
            sizes[at] = rng.choice((0, 1))
        case 3:
            sizes[at] = max(0, sizes[at] + rng.choice((-2, -1, 1, 2)))
        case _:
            sizes[at] = min(70, sizes[at] * rng.choice((2, 3, 8)))
    return tuple(sizes)


def _other_elements(tensor: Tensor, rng: Random) -> tuple[float, ...]:
    """Return elements, some of which are invalid as an index or a number."""
    if tensor.dtype.startswith(("float", "bfloat", "complex")):
        return tuple(rng.choice((rng.choice(REAL), rng.uniform(-2, 2))) for _ in range(rng.randint(1, 7)))
    near = [*range(-6, 7), *tensor.of]
    return tuple(rng.choice((rng.choice(EXTREME), rng.choice(near))) for _ in range(rng.randint(1, 7)))

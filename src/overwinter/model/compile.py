"""Compiles a program to straight-line Python, one line for each call.

The source contains only slot numbers, names from a table made here, the operators' own argument names, and literals
written by `repr` of None, booleans, integers and finite floats; texts, types and operators are referenced by names.
Weights are looked up at each use, so they may be bound after the compilation.
"""

from collections.abc import Callable, Container, Sequence
from math import isfinite
from typing import Any

import torch

from overwinter.core.errors import ProgramError
from overwinter.model.aliasing import check_span
from overwinter.model.guards import guarded
from overwinter.model.liveness import live_in, live_out, span
from overwinter.model.operators import CHECKS, ITEM_OPERATORS, MUTATING, NUMBER_CHECKS, SYMBOLIC, is_symbolic
from overwinter.model.parameters import IntegerRange, Parameter, bounded
from overwinter.model.structure import Argument, Call, Device, Dtype, MemoryFormat, Program, Slot, slots_of

Compiled = Callable[[Sequence[torch.Tensor], Sequence[Any]], tuple[Any, ...]]
"""Takes the program's weights and the span's live-in values, and returns its live-out values."""

Timed = Callable[[Sequence[torch.Tensor], Sequence[Any], list[float]], tuple[Any, ...]]
"""Takes a program's weights and inputs and a list, to which it appends the time at the end of each layer."""

Waiting = Callable[[Sequence[torch.Tensor], Sequence[Any], Callable[[int], None]], tuple[Any, ...]]
"""Takes a program's weights and inputs and a function that is called with the number of a call before that call."""


def compile_program(
    program: Program,
    start: int = 0,
    stop: int | None = None,
    device: torch.device | str = "cpu",
    *,
    checks_values: bool = True,
) -> Compiled:
    """Return a function that runs calls `start` to `stop` (all, if not given) of a validated program on `device`.

    It takes all the weights and the values of `live_in(program, start, stop)`, which are the inputs of a whole program.
    It returns the values of `live_out(program, stop, start)`, which are the outputs of a whole program. Values that are
    numbers are Python numbers. Call it under `torch.inference_mode()`. Errors of operators are not caught; a check of
    the program that fails raises RuntimeError, and an argument out of bounds ValueError. Without `checks_values` the
    program's checks of tensor values are left out, so that it can run on zeros. Raises ProgramError if this PyTorch
    lacks an operator, if a call does not fit its operator's signature, or if the span is invalid or cannot run alone.
    """
    start, end = span(program, start, stop)
    check_span(program, start, end)
    left_out = frozenset() if checks_values else value_checks(program)
    writer = _Writer(program, torch.device(device), left_out)
    taken = live_in(program, start, end)
    given = live_out(program, end, start)
    lines = ["def run(weights, inputs):"]
    if taken:
        lines.append(f"    {''.join(f'v{slot}, ' for slot in taken)}= inputs")
    for index in range(start, end):
        lines.extend(writer.lines(index))
    lines.append(f"    return ({''.join(f'{writer.slot(slot)}, ' for slot in given)})")
    exec(compile("\n".join(lines), "<program>", "exec"), writer.names)
    run: Compiled = writer.names["run"]
    return run


def compile_timed(program: Program, clock: Callable[[], float], device: torch.device | str = "cpu") -> Timed:
    """Compile the whole program as `compile_program` does, but read `clock` after each layer. The program's checks of
    tensor values are left out, because the timed inputs are zeros.
    """
    writer = _Writer(program, torch.device(device), value_checks(program))
    writer.names["clock"] = clock
    lines = ["def run(weights, inputs, marks):"]
    if program.inputs:
        lines.append(f"    {''.join(f'v{slot}, ' for slot in live_in(program))}= inputs")
    for layer in program.layers:
        for index in range(layer.start, layer.stop):
            lines.extend(writer.lines(index))
        lines.append("    marks.append(clock())")
    lines.append(f"    return ({''.join(f'{writer.slot(slot)}, ' for slot in program.output_slots)})")
    exec(compile("\n".join(lines), "<program>", "exec"), writer.names)
    run: Timed = writer.names["run"]
    return run


def compile_waiting(program: Program, calls: Container[int], device: torch.device | str = "cpu") -> Waiting:
    """Compile the whole program as `compile_program` does, but wait before each of these calls until the weights that
    it reads have arrived. The number after that of the last call means the return of the outputs.
    """
    writer = _Writer(program, torch.device(device), frozenset())
    lines = ["def run(weights, inputs, wait):"]
    if program.inputs:
        lines.append(f"    {''.join(f'v{slot}, ' for slot in live_in(program))}= inputs")
    for index in range(len(program.calls)):
        if index in calls:
            lines.append(f"    wait({index})")
        lines.extend(writer.lines(index))
    if len(program.calls) in calls:
        lines.append(f"    wait({len(program.calls)})")
    lines.append(f"    return ({''.join(f'{writer.slot(slot)}, ' for slot in program.output_slots)})")
    exec(compile("\n".join(lines), "<program>", "exec"), writer.names)
    run: Waiting = writer.names["run"]
    return run


def value_checks(program: Program) -> frozenset[int]:
    """Return the calls, by number, that check the values of tensors rather than their sizes."""
    found: set[int] = set()
    read: set[int] = set()
    for index, call in enumerate(program.calls):
        depends = call.operator in ITEM_OPERATORS or not read.isdisjoint(slots_of(call))
        if call.operator in CHECKS and (depends or call.operator not in NUMBER_CHECKS):
            found.add(index)
        elif depends and is_symbolic(call.operator):
            read.update(call.outputs)
    return frozenset(found)


class _Writer:
    """Writes the source of calls, and stores the values of the names in it."""

    def __init__(self, program: Program, device: torch.device, left_out: frozenset[int]) -> None:
        self.program = program
        self.left_out = left_out
        self.names: dict[str, Any] = {"device": device}
        self._known: dict[object, str] = {}
        self._signatures: dict[str, _Signature] = {}

    def lines(self, index: int) -> list[str]:
        """Return the source of a call, unless it is left out, and of the release of values that are not read later."""
        call = self.program.calls[index]
        lines = [] if index in self.left_out else [self._line(call)]
        if call.frees:
            lines.append(f"    del {', '.join(f'v{slot}' for slot in call.frees)}")
        return lines

    def _line(self, call: Call) -> str:
        function, unpack = self._function(call)
        bounds = self._signatures[call.operator].bounds(call) if call.operator in self._signatures else {}
        arguments = [self._written(argument, bounds.get(at)) for at, argument in enumerate(call.args)]
        arguments += [f"{key}={self._written(argument, bounds.get(key))}" for key, argument in call.kwargs.items()]
        targets = ", ".join(f"v{slot}" for slot in call.outputs) + (", = " if unpack else " = ")
        return f"    {targets if call.outputs else ''}{function}({', '.join(arguments)})"

    def slot(self, number: int) -> str:
        """The name of a slot in the source."""
        return f"v{number}" if number >= self.program.first_input else f"weights[{number}]"

    def _function(self, call: Call) -> tuple[str, bool]:
        """The name of the function of a call, and whether its result must be unpacked."""
        if call.operator in SYMBOLIC:
            return self._named("f", call.operator, SYMBOLIC[call.operator]), False
        if call.operator not in self._signatures:
            self._signatures[call.operator] = _Signature(call.operator, resolve(call.operator))
        signature = self._signatures[call.operator]
        signature.check(call, self.program)
        return self._named("f", call.operator, signature.run), signature.is_list or signature.results > 1

    def _written(self, argument: Argument, bounds: IntegerRange | None = None) -> str:
        """Return the source of an argument; a computed integer is checked against its bounds."""
        match argument:
            case tuple():
                return f"({''.join(f'{self._written(part, bounds)}, ' for part in argument)})"
            case Slot(number) if bounds is not None:
                return f"{self._named('b', bounds, bounded(bounds))}({self.slot(number)})"
            case Slot(number):
                return self.slot(number)
            case Device():
                return "device"
            case Dtype(name) | MemoryFormat(name):
                return self._named("t", ("torch", name), getattr(torch, name))
            case None | bool() | int():
                return repr(argument)
            case float() if isfinite(argument):
                return repr(argument)
            case float() | str():
                return self._named("x", (type(argument), repr(argument)), argument)

    def _named(self, letter: str, key: object, value: object) -> str:
        if key not in self._known:
            self._known[key] = f"{letter}{len(self._known)}"
            self.names[self._known[key]] = value
        return self._known[key]


def _check_number(truth: object, message: str) -> None:
    if not truth:
        raise RuntimeError(message)


def _check_tensor(truth: torch.Tensor, message: str = "a check of the program failed") -> None:
    # On a GPU, the operator would make the device unusable for the process instead of failing the run.
    if not truth:
        raise RuntimeError(message)


_DIRECT: dict[str, Callable[..., Any]] = {
    "aten._assert_async.default": _check_tensor,
    "aten._assert_async.msg": _check_tensor,
    "aten._assert_scalar.default": _check_number,
    "aten._local_scalar_dense.default": torch.Tensor.item,
    "aten.item.default": torch.Tensor.item,
    "aten.sym_numel.default": torch.Tensor.numel,
    "aten.sym_size.int": torch.Tensor.size,
}
"""Functions that read a number from a tensor, or check one, faster than the operators do."""


def resolve(operator: str) -> torch._ops.OpOverload:
    """Return the operator overload of this name; raise ProgramError if this PyTorch does not have it."""
    namespace, packet, overload = operator.split(".")
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except AttributeError as error:
        raise ProgramError(f"PyTorch {torch.__version__} has no operator {operator}") from error
    assert isinstance(found, torch._ops.OpOverload)
    return found


class _Signature:
    """The parameters and results of an operator according to PyTorch."""

    def __init__(self, operator: str, overload: torch._ops.OpOverload) -> None:
        schema = overload._schema
        self.run = _DIRECT.get(operator) or guarded(operator, overload)
        self.parameters = {argument.name: Parameter(operator, argument) for argument in schema.arguments}
        self.positional = [argument.name for argument in schema.arguments if not argument.kwarg_only]
        self.needed = {argument.name for argument in schema.arguments if not argument.has_default_value()}
        self.is_list = len(schema.returns) == 1 and isinstance(schema.returns[0].type, torch.ListType)
        self.results = len(schema.returns)
        written = [
            at for at, argument in enumerate(schema.arguments) if argument.alias_info and argument.alias_info.is_write
        ]
        if written != ([0] if operator in MUTATING else []):
            raise ProgramError(
                f"PyTorch {torch.__version__} and the operator table differ on what {operator} writes to"
            )

    def check(self, call: Call, program: Program) -> None:
        """Raise ProgramError unless the call's arguments and results match the signature."""
        if len(call.args) > len(self.positional):
            raise ProgramError(
                f"{call.operator} takes {len(self.positional)} positional arguments, not {len(call.args)}"
            )
        given = self.positional[: len(call.args)]
        for key in call.kwargs:
            if key not in self.parameters or key in given:
                raise ProgramError(f"{call.operator} takes no further argument {key!r}")
        missing = self.needed.difference(given, call.kwargs)
        if missing:
            raise ProgramError(f"{call.operator} lacks its argument {sorted(missing)[0]!r}")
        for name, argument in (*zip(given, call.args, strict=True), *call.kwargs.items()):
            if not self.parameters[name].takes(argument, program):
                raise ProgramError(f"{call.operator} takes no such argument for its {name!r}: {argument!r:.200}")
        if not self.is_list and len(call.outputs) != self.results:
            raise ProgramError(f"{call.operator} gives {self.results} results, not {len(call.outputs)}")

    def bounds(self, call: Call) -> dict[int | str, IntegerRange]:
        """Return the bounds of each bounded argument, an integer or a list of integers, by position or name."""
        names: dict[int | str, str] = dict(enumerate(self.positional[: len(call.args)]))
        names.update((key, key) for key in call.kwargs)
        found = {key: self.parameters[name].bounds for key, name in names.items()}
        return {key: bounds for key, bounds in found.items() if bounds is not None}

"""Converts the conditions of an export on the sizes of inputs to checks in the program.

`torch.export` follows one path through a model. Where the path depended on a size it records a guard, as Python code
over the sizes of the inputs: the graph is valid only for sizes that satisfy all of them. Guards that give a smallest or
largest value of a single size become the program's ranges. Every other guard that is not trivially true becomes calls
at the program's start: arithmetic, and an assertion that fails the request with the condition.
"""

import ast
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import sympy  # type: ignore[import-untyped]
import torch
from torch.utils._sympy.printers import PythonPrinter

from overwinter.core.errors import ProgramError
from overwinter.model.operators import SYMBOLIC

Ranges = dict[str, tuple[int, int]]
Symbolic = Callable[[str, tuple[Any, ...]], Any]
"""Calls a symbolic function by its name in the operator table."""

WINDOW = 1 << 20
"""The most values of one size that are tried to find the range that a condition allows."""
LARGEST_EXACT = 1 << 53
"""Tensors of numbers compute exactly up to this number, as integers and as floats."""


class Condition(NamedTuple):
    """A condition on the dynamic sizes, as Python code with their names."""

    tree: ast.expr
    author_message: str | None = None
    """The author's message for a violation."""

    @property
    def text(self) -> str:
        """The condition for a message."""
        return ast.unparse(self.tree)

    @property
    def message(self) -> str:
        """The error for a request whose sizes do not satisfy the condition."""
        return f"{self.author_message} ({self.text})" if self.author_message else f"the model needs {self.text}"

    @property
    def names(self) -> set[str]:
        """The sizes in the condition."""
        calls = [node.func for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        called = {id(part) for function in calls for part in ast.walk(function)}
        return {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name) and id(node) not in called}


def conditions_of(
    guards: Sequence[str], labels: Sequence[str], shapes: Sequence[Sequence[int | str]]
) -> list[Condition]:
    """Return the guards of an export with the names of sizes, without those that are trivially true.

    `labels` are the names of the graph's inputs, `shapes` their sizes: a number or a name. Raises ProgramError for a
    guard that cannot be parsed or that depends on more than sizes.
    """
    found: list[Condition] = []
    for guard in guards:
        tree = _Sources(guard, labels, shapes).visit(_parsed(guard))
        found.extend(Condition(part) for part in _parts(tree))
    return distinct(found)


def conditions_in(expression: sympy.Expr, message: str | None = None) -> list[Condition]:
    """Convert a symbolic boolean over the names of sizes to conditions that must all hold."""
    return [Condition(part, message) for part in _parts(_parsed(PythonPrinter().doprint(expression)))]


def _parsed(code: str) -> ast.expr:
    try:
        return ast.parse(code.strip(), mode="eval").body
    except SyntaxError as error:
        raise ProgramError(f"the export assumes {code.strip()}, which cannot be parsed; fix the sizes in it") from error


def distinct(conditions: Iterable[Condition]) -> list[Condition]:
    """Return each condition once, without those that are trivially true."""
    return list({each.text: each for each in conditions if not _is_trivial(each.tree)}.values())


def narrowed(ranges: Ranges, conditions: Sequence[Condition]) -> tuple[Ranges, list[Condition]]:
    """Return the ranges narrowed by conditions on a single size, and the remaining conditions.

    Raises ProgramError if none of the first WINDOW values in the range of a size meets its conditions.
    """
    ranges = dict(ranges)
    settled: set[str] = set()
    for name, (low, high) in ranges.items():
        own = [each for each in conditions if each.names == {name}]
        if not own:
            continue
        values = torch.arange(low, min(high + 1, low + WINDOW))
        masks = {each.text: _holds(each, name, values) for each in own}
        good = torch.stack([mask for mask in masks.values() if mask is not None] or [values >= low]).all(0).nonzero()
        if not len(good):
            raise ProgramError(f"no {name} from {low} to {int(values[-1])} satisfies {' and '.join(masks)}")
        first, last = int(good[0]), int(good[-1])
        is_whole = int(values[-1]) == high
        ranges[name] = (int(values[first]), int(values[last]) if is_whole else high)
        if is_whole:
            settled.update(text for text, mask in masks.items() if mask is not None and mask[first : last + 1].all())
    return ranges, [each for each in conditions if each.text not in settled]


def is_satisfied(conditions: Iterable[Condition], sizes: Mapping[str, int]) -> bool:
    """Whether all conditions hold at these sizes."""
    try:
        return all(evaluate_condition(each.tree, sizes.__getitem__, _apply) for each in conditions)
    except ArithmeticError:
        return False


def evaluate_condition(tree: ast.expr, size_of: Callable[[str], Any], call: Symbolic) -> Any:
    """Evaluate an expression with `call`, and with `size_of` for sizes.

    Raises ProgramError for an expression that a program cannot check.
    """
    match tree:
        case ast.Constant(value=bool() | int() | float() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id="inf"):
            return math.inf
        case ast.Name(id=name):
            return size_of(name)
        case _:
            function, parts = _called(tree)
    values = [evaluate_condition(part, size_of, call) for part in parts]
    if function not in _FOLDED:
        return call(function, tuple(values))
    result = values[0]
    for value in values[1:]:
        result = call(function, (result, value))
    return result


def _called(tree: ast.expr) -> tuple[str, list[ast.expr]]:
    """Return the function of the operator table for an expression, and its arguments."""
    match tree:
        case ast.UnaryOp(op=unary, operand=operand) if type(unary) in _UNARY:
            return _UNARY[type(unary)], [operand]
        case ast.BinOp(op=ast.Pow(), left=base, right=ast.Constant(value=int() as power)) if 0 < power <= _MAX_POWER:
            return "operator.mul", [base] * power
        case ast.BinOp(op=binary, left=left, right=right) if type(binary) in _BINARY:
            return _BINARY[type(binary)], [left, right]
        case ast.Compare(left=left, ops=[comparison], comparators=[right]) if type(comparison) in _COMPARISON:
            return _COMPARISON[type(comparison)], [left, right]
        case ast.BoolOp(op=joint, values=values):
            return _JOINT[type(joint)], values
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return "torch.sym_ite", [test, body, orelse]
        case ast.Call(func=function, args=args, keywords=[]) if args and ast.unparse(function) in _FUNCTIONS:
            return _FUNCTIONS[ast.unparse(function)], args
        case _:
            pass
    raise ProgramError(
        f"the model was exported under the condition {ast.unparse(tree)}, which a program cannot check; "
        "change the model, or fix the sizes in it"
    )


_MAX_POWER = 8
_UNARY: dict[type[ast.unaryop], str] = {ast.USub: "operator.neg", ast.Not: "torch.sym_not"}
_BINARY: dict[type[ast.operator], str] = {
    ast.Add: "operator.add",
    ast.Sub: "operator.sub",
    ast.Mult: "operator.mul",
    ast.FloorDiv: "operator.floordiv",
    ast.Mod: "operator.mod",
    ast.Div: "operator.truediv",
}
_COMPARISON: dict[type[ast.cmpop], str] = {
    ast.Eq: "operator.eq",
    ast.NotEq: "operator.ne",
    ast.Lt: "operator.lt",
    ast.LtE: "operator.le",
    ast.Gt: "operator.gt",
    ast.GtE: "operator.ge",
}
_JOINT: dict[type[ast.boolop], str] = {ast.And: "operator.and_", ast.Or: "operator.or_"}
_FUNCTIONS = {
    "max": "torch.sym_max",
    "min": "torch.sym_min",
    "int": "torch.sym_int",
    "float": "torch.sym_float",
    "torch.sym_float": "torch.sym_float",
    "math.ceil": "math.ceil",
    "math.floor": "math.floor",
    "math.trunc": "math.trunc",
    "math.sqrt": "torch.sym_sqrt",
}
_FOLDED = frozenset({"operator.mul", "operator.and_", "operator.or_", "torch.sym_max", "torch.sym_min"})
"""Functions of two numbers; an expression with more operands applies them pairwise."""
_TRUTHS = frozenset({*_COMPARISON.values(), *_JOINT.values(), "torch.sym_not"})


def kind_of(function: str) -> str:
    """The type of number that a symbolic function returns for integers."""
    if function in _TRUTHS:
        return "symbool"
    return "symfloat" if function in ("operator.truediv", "torch.sym_float", "torch.sym_sqrt") else "symint"


def _apply(function: str, args: tuple[Any, ...]) -> Any:
    return SYMBOLIC[function](*args)


def _holds(each: Condition, name: str, values: torch.Tensor) -> torch.Tensor | None:
    """Return for which values of its size a condition holds; None if it cannot be evaluated for many values at once."""
    undefined = torch.zeros(len(values), dtype=torch.bool)

    def call(function: str, args: tuple[Any, ...]) -> Any:
        if function in ("operator.floordiv", "operator.mod", "operator.truediv"):
            top, bottom = args[0], torch.as_tensor(args[1])
            undefined.logical_or_(bottom == 0)
            if function == "operator.truediv":
                top = torch.as_tensor(top).double()
            return SYMBOLIC[function](top, torch.where(bottom == 0, 1, bottom))
        if function in ("operator.add", "operator.sub", "operator.mul"):
            _check_exact(SYMBOLIC[function](*(torch.as_tensor(arg).double() for arg in args)))
        return _FOR_MANY.get(function, SYMBOLIC[function])(*args)

    try:
        truth = torch.as_tensor(evaluate_condition(each.tree, {name: values}.__getitem__, call))
    except OverflowError:
        return _holds_exactly(each, name, values.tolist())
    except (RuntimeError, TypeError, ValueError):
        return None
    return truth.expand(len(values)).bool() & ~undefined


def _check_exact(approximate: torch.Tensor) -> None:
    """Raise OverflowError if one of these results is too large to be computed exactly in a tensor."""
    if approximate.abs().max() > LARGEST_EXACT:
        raise OverflowError


def _holds_exactly(each: Condition, name: str, values: list[int]) -> torch.Tensor | None:
    """Do the same with the integers of Python: slower, but they have no largest value."""

    def call(function: str, args: tuple[Any, ...]) -> Any:
        columns = [arg if isinstance(arg, list) else [arg] * len(values) for arg in args]
        return list(map(SYMBOLIC[function], *columns))

    try:
        truths = evaluate_condition(each.tree, {name: values}.__getitem__, call)
    except (ArithmeticError, TypeError, ValueError):
        return None
    return torch.tensor([bool(truth) for truth in truths])


def _largest(first: Any, second: Any) -> torch.Tensor:
    return torch.maximum(torch.as_tensor(first), torch.as_tensor(second))


def _smallest(first: Any, second: Any) -> torch.Tensor:
    return torch.minimum(torch.as_tensor(first), torch.as_tensor(second))


_FOR_MANY: dict[str, Callable[..., Any]] = {
    "math.ceil": torch.ceil,
    "math.floor": torch.floor,
    "math.trunc": torch.trunc,
    "torch.sym_float": torch.Tensor.double,
    "torch.sym_max": _largest,
    "torch.sym_min": _smallest,
    "torch.sym_not": torch.logical_not,
    "torch.sym_ite": torch.where,
}
"""For symbolic functions that accept only numbers, the functions that do the same for tensors."""


def _parts(tree: ast.expr) -> list[ast.expr]:
    """Return the parts that must all hold for an expression to hold."""
    match tree:
        case ast.BoolOp(op=ast.And(), values=values):
            return [part for value in values for part in _parts(value)]
        case ast.Compare(ops=ops, comparators=rights) if len(ops) > 1:
            lefts = [tree.left, *rights[:-1]]
            return [ast.Compare(left, [op], [right]) for left, op, right in zip(lefts, ops, rights, strict=True)]
        case _:
            return [tree]


def _is_trivial(tree: ast.expr) -> bool:
    """Whether the expression is trivially true: something equals itself, or the constant True."""
    match tree:
        case ast.Compare(left=left, ops=[ast.Eq() | ast.LtE() | ast.GtE()], comparators=[right]):
            return ast.unparse(left) == ast.unparse(right)
        case ast.Constant(value=True):
            return True
        case _:
            return False


class _Sources(ast.NodeTransformer):
    """Replaces each reference to a size, such as `L['x'].size()[0]`, by its name or number."""

    def __init__(self, guard: str, labels: Sequence[str], shapes: Sequence[Sequence[int | str]]) -> None:
        self.guard = guard
        # Names that differ in case alone are told apart by the names themselves.
        self.labels = {_plain(label): at for at, label in enumerate(labels)}
        self.labels |= {label: at for at, label in enumerate(labels)}
        self.shapes = shapes

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        match node:
            case ast.Subscript(
                value=ast.Call(func=ast.Attribute(value=owner, attr="size"), args=[]),
                slice=ast.Constant(value=int(dim)),
            ):
                at = self._input(_keys(owner))
                if at is not None and dim < len(self.shapes[at]):
                    size = self.shapes[at][dim]
                    return ast.Constant(size) if isinstance(size, int) else ast.Name(size)
            case _:
                pass
        raise ProgramError(
            f"the export assumes {self.guard}, which depends on more than sizes; export the model without it"
        )

    def _input(self, keys: list[str | int] | None) -> int | None:
        match keys:
            case ["flat_args", int(at)] if at < len(self.shapes):
                return at
            case [*parts] if parts:
                label = "_".join(str(part) for part in parts)
                return self.labels.get(label, self.labels.get(_plain(label)))
            case _:
                return None


def _keys(owner: ast.expr) -> list[str | int] | None:
    """Return the keys after `L`: 'rest' and 1 for `L['rest'][1]`."""
    match owner:
        case ast.Name(id="L"):
            return []
        case ast.Subscript(value=before, slice=ast.Constant(value=str() | int() as key)):
            keys = _keys(before)
            return None if keys is None else [*keys, key]
        case ast.Attribute(value=before, attr=name):
            keys = _keys(before)
            return None if keys is None else [*keys, name]
        case _:
            return None


def _plain(label: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", label.lower())

"""How large is a tensor of an exported graph, as data that needs no symbolic algebra to evaluate?

`torch.export` describes sizes by sympy expressions over symbols. Here they become sums of terms over named
dimensions: exact where the size is a polynomial; else rounding is left out, and whatever is no polynomial even then is
taken at the largest sizes.
"""

from collections.abc import Sequence
from math import prod

import sympy  # type: ignore[import-untyped]
import torch
from torch.utils._sympy.functions import CeilDiv, CleanDiv, FloorDiv, Max, Min, Mod, PythonMod

from overwinter.core.errors import ProgramError
from overwinter.model.dtypes import INTERNAL_BYTES
from overwinter.model.structure import Term


class Sizes:
    """The dynamic dimensions of one exported graph: symbols, names, ranges, and what follows for sizes."""

    def __init__(
        self, names: dict[sympy.Symbol, str], ranges: dict[str, tuple[int, int]], example: dict[str, int]
    ) -> None:
        self.names = names
        self.ranges = ranges
        self.example = example
        self._symbols = {name: [symbol for symbol in names if names[symbol] == name] for name in ranges}
        self._terms: dict[sympy.Expr, tuple[Term, ...]] = {}

    def shape(self, tensor: torch.Tensor) -> tuple[int | str, ...]:
        """The shape with dynamic sizes by name, or written out where they are worked out from names."""
        return tuple(self._spoken(size) for size in sizes_of(tensor))

    def shape_at_example(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """The shape at the example's sizes."""
        sizes = {symbol: self.example[name] for symbol, name in self.names.items()}
        return tuple(
            size if isinstance(size, int) else int(self._expression(size).subs(sizes)) for size in sizes_of(tensor)
        )

    def nbytes(self, tensor: torch.Tensor) -> tuple[Term, ...]:
        """Bytes of the tensor's elements."""
        fixed = prod((size for size in sizes_of(tensor) if isinstance(size, int)), start=item_bytes(tensor.dtype))
        expression = sympy.Integer(fixed)
        for size in sizes_of(tensor):
            if not isinstance(size, int):
                expression = expression * self._expression(size)
        if expression not in self._terms:
            self._terms[expression] = self._polynomial(expression)
        return self._terms[expression]

    def _spoken(self, size: int | torch.SymInt) -> int | str:
        if isinstance(size, int):
            return size
        expression = self._expression(size)
        return str(expression.xreplace({symbol: sympy.Symbol(name) for symbol, name in self.names.items()}))

    def _expression(self, size: torch.SymInt) -> sympy.Expr:
        expression = size.node.expr
        strange = expression.free_symbols - self.names.keys()
        if strange:
            raise ProgramError(
                f"a size depends on the values of a tensor ({strange.pop()}), not on the inputs' sizes alone"
            )
        return expression

    def _polynomial(self, expression: sympy.Expr) -> tuple[Term, ...]:
        merged = {symbol: self._symbols[name][0] for symbol, name in self.names.items()}
        relaxed = sympy.expand(sympy.cancel(_without_rounding(expression.xreplace(merged))))
        symbols = [symbols[0] for symbols in self._symbols.values()]
        if not relaxed.is_polynomial(*symbols):
            largest = {symbol: self.ranges[name][1] for symbol, name in self.names.items()}
            relaxed = sympy.Integer(int(expression.subs(largest)))
        if not symbols:
            return (Term(float(relaxed), ()),)
        return tuple(
            Term(float(coefficient), tuple(int(power) for power in powers))
            for powers, coefficient in sympy.Poly(relaxed, *symbols).terms()
        )


def sizes_of(tensor: torch.Tensor) -> list[int | torch.SymInt]:
    """The shape as an export knows it: a fixed size is an int, a dynamic one a symbol."""
    return list(tensor.shape)


def item_bytes(dtype: torch.dtype) -> int:
    """Bytes of one element; ProgramError for a type that programs do not have."""
    name = str(dtype).removeprefix("torch.")
    if name not in INTERNAL_BYTES:
        raise ProgramError(f"tensors of type {name} are not supported")
    return INTERNAL_BYTES[name]


def _without_rounding(expression: sympy.Expr) -> sympy.Expr:
    """The expression with exact divisions for rounded ones and sums for maxima: a little more, rarely less."""
    for function in (FloorDiv, CleanDiv):
        expression = expression.replace(function, _quotient)
    expression = expression.replace(CeilDiv, _raised_quotient)
    for function in (Mod, PythonMod):
        expression = expression.replace(function, _modulus)
    expression = expression.replace(Max, _total)
    return expression.replace(Min, _first)


def _quotient(top: sympy.Expr, bottom: sympy.Expr) -> sympy.Expr:
    return top / bottom


def _raised_quotient(top: sympy.Expr, bottom: sympy.Expr) -> sympy.Expr:
    return top / bottom + 1


def _modulus(_top: sympy.Expr, bottom: sympy.Expr) -> sympy.Expr:
    return bottom


def _total(*parts: sympy.Expr) -> sympy.Expr:
    return sum(parts[1:], parts[0])


def _first(first: sympy.Expr, *_others: sympy.Expr) -> sympy.Expr:
    return first


def symbolic_kind(number: object) -> str:
    """What kind of number a value of the graph is."""
    match number:
        case torch.SymBool() | bool():
            return "symbool"
        case torch.SymInt() | int():
            return "symint"
        case _:
            return "symfloat"


def names_of_symbols(
    tensors: Sequence[torch.Tensor], dynamic: Sequence[dict[int, str]], labels: Sequence[str]
) -> dict[sympy.Symbol, str]:
    """Which name each symbol in the inputs' shapes stands for; ProgramError if a dynamic size became fixed."""
    names: dict[sympy.Symbol, str] = {}
    for tensor, dims, label in zip(tensors, dynamic, labels, strict=True):
        for dim, name in dims.items():
            size = sizes_of(tensor)[dim]
            if isinstance(size, int) or not isinstance(size.node.expr, sympy.Symbol):
                raise ProgramError(
                    f"dimension {dim} of input {label!r}, {name!r}, is not free: the model fixes it to {size}"
                )
            names[size.node.expr] = name
    return names

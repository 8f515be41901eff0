"""Represents the sizes of an exported graph's tensors as data that can be evaluated without symbolic algebra.

`torch.export` describes sizes by sympy expressions over symbols. Here the bytes of a tensor become a sum of terms over
named dimensions. The sum is exact where the bytes are a polynomial. Otherwise rounding is left out, and an expression
that is still not a polynomial is evaluated at the largest sizes, each at most `_LARGE`.
"""

from collections.abc import Sequence
from math import prod

import sympy  # type: ignore[import-untyped]
import torch
from torch.utils._sympy.functions import CeilDiv, CleanDiv, FloorDiv, Max, Min, Mod, PythonMod

from overwinter.core.datatypes import DTYPE_BYTES
from overwinter.core.errors import ProgramError
from overwinter.model.structure import Term

_LARGE = 4096
"""The upper limit of each size in the evaluation of bytes that are not a polynomial of the sizes."""


class Sizes:
    """The dynamic sizes of one exported graph: the names and ranges of its symbols, and conversions of shapes."""

    def __init__(
        self, meanings: dict[sympy.Symbol, sympy.Expr], ranges: dict[str, tuple[int, int]], example: dict[str, int]
    ) -> None:
        self.meanings = meanings
        self.ranges = ranges
        self.example = example
        self._names = [symbol_of(name) for name in ranges]
        self._terms: dict[sympy.Expr, tuple[Term, ...]] = {}

    def shape(self, tensor: torch.Tensor) -> tuple[int | str, ...]:
        """Return the shape with dynamic sizes by name, or as expressions of names."""
        return tuple(self._as_text(size) for size in sizes_of(tensor))

    def row_major_shape(self, tensor: torch.Tensor) -> tuple[int | str, ...] | None:
        """Return the shape of a tensor whose elements lie in row-major order, without gaps, if each size is fixed or
        one named dimension; otherwise None.
        """
        shape = self.shape(tensor)
        if any(isinstance(size, str) and size not in self.ranges for size in shape):
            return None
        expected = sympy.Integer(1)
        for size, stride in zip(reversed(shape), reversed(tensor.stride()), strict=True):
            if size != 1 and expected != (stride if isinstance(stride, int) else self.expression(stride)):
                return None
            expected *= size if isinstance(size, int) else symbol_of(size)
        return shape

    def shape_at_example(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Return the shape at the example's sizes."""
        sizes = {symbol_of(name): size for name, size in self.example.items()}
        return tuple(
            size if isinstance(size, int) else int(self.expression(size).subs(sizes)) for size in sizes_of(tensor)
        )

    def nbytes(self, tensor: torch.Tensor) -> tuple[Term, ...]:
        """Return the bytes of the tensor's elements, as a sum of terms."""
        fixed = prod((size for size in sizes_of(tensor) if isinstance(size, int)), start=item_bytes(tensor.dtype))
        expression = sympy.Integer(fixed)
        for size in sizes_of(tensor):
            if not isinstance(size, int):
                expression = expression * self.expression(size)
        if expression not in self._terms:
            self._terms[expression] = self._polynomial(expression)
        return self._terms[expression]

    def expression(self, number: torch.SymInt | torch.SymBool) -> sympy.Expr:
        """Express a symbolic number of the graph with the names of sizes; raise ProgramError if it depends on the
        values of a tensor.
        """
        unknown = number.node.expr.free_symbols - self.meanings.keys()
        if unknown:
            raise ProgramError(
                "a size depends on the values of a tensor, not on the inputs' sizes alone; keep the "
                "full size, and a mask with torch.where"
            )
        return number.node.expr.xreplace(self.meanings)

    def _as_text(self, size: int | torch.SymInt) -> int | str:
        return size if isinstance(size, int) else str(self.expression(size))

    def _polynomial(self, expression: sympy.Expr) -> tuple[Term, ...]:
        relaxed = sympy.expand(sympy.cancel(_without_rounding(expression)))
        if not relaxed.is_polynomial(*self._names):
            largest = {symbol_of(name): min(high, _LARGE) for name, (_, high) in self.ranges.items()}
            relaxed = sympy.Integer(int(expression.subs(largest)))
        if not self._names:
            return (Term(float(relaxed), ()),)
        return tuple(
            Term(float(coefficient), tuple(int(power) for power in powers))
            for powers, coefficient in sympy.Poly(relaxed, *self._names).terms()
        )


def sizes_of(tensor: torch.Tensor) -> list[int | torch.SymInt]:
    """Return the shape as an export knows it: a fixed size is an int, a dynamic one a symbol."""
    return list(tensor.shape)


def item_bytes(dtype: torch.dtype) -> int:
    """Return the bytes of one element; raise ProgramError for a type that programs do not support."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ProgramError(f"tensors of type {name} are not supported")
    return DTYPE_BYTES[name]


def _without_rounding(expression: sympy.Expr) -> sympy.Expr:
    """Replace rounded divisions by exact ones (plus 1 if they round up), remainders by the divisor, maxima by sums and
    minima by the first: the result is rarely smaller.
    """
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
    """Return the kind of number that a value of the graph is."""
    match number:
        case torch.SymBool() | bool():
            return "symbool"
        case torch.SymInt() | int():
            return "symint"
        case _:
            return "symfloat"


def symbol_of(name: str) -> sympy.Symbol:
    """Return the symbol of a dynamic size."""
    return sympy.Symbol(name, integer=True, positive=True)


def meanings_of(sizes: Sequence[tuple[str, torch.SymInt]]) -> tuple[dict[sympy.Symbol, sympy.Expr], list[sympy.Expr]]:
    """Return an expression in the named sizes for each symbol of the inputs' sizes, and the conditions that the named
    sizes must meet. `sizes` has the name of each dynamic size, and the size in the export.

    If the export ties one size to another (equal, or twice as large), each keeps its name and the tie becomes a
    condition. Raises ProgramError for a size that is computed from others in an irreversible way.
    """
    meanings: dict[sympy.Symbol, sympy.Expr] = {}
    ties: list[sympy.Expr] = []
    for name, size in sizes:
        expression = size.node.expr
        if isinstance(expression, sympy.Symbol):
            ties.append(sympy.Eq(symbol_of(name), meanings.setdefault(expression, symbol_of(name)), evaluate=False))
    for name, size in sizes:
        expression = size.node.expr.xreplace(meanings)
        unknown = size.node.expr.free_symbols - meanings.keys()
        if unknown:
            multiple, rest = _linear(name, expression, unknown)
            meanings[unknown.pop()] = FloorDiv(symbol_of(name) - rest, multiple)
            ties.append(sympy.Eq(Mod(symbol_of(name) - rest, multiple), 0, evaluate=False))
        elif not isinstance(size.node.expr, sympy.Symbol):
            ties.append(sympy.Eq(symbol_of(name), expression, evaluate=False))
    return meanings, ties


def _linear(name: str, expression: sympy.Expr, unknown: set[sympy.Symbol]) -> tuple[sympy.Integer, sympy.Expr]:
    """Return the factor of the one unknown symbol, and the rest. The factor must be a positive integer."""
    if len(unknown) == 1:
        (symbol,) = unknown
        multiple = expression.coeff(symbol)
        rest = sympy.expand(expression - multiple * symbol)
        if multiple.is_Integer and multiple > 0 and symbol not in rest.free_symbols:
            return multiple, rest
    raise ProgramError(
        f"size {name!r} is {expression} in the export: make it independent, or an integer multiple of one other size"
    )

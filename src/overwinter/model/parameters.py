"""Checks the arguments of a program against the parameters of each operator.

PyTorch itself accepts more than its schemas declare: a number for an element type or a layout (which makes sparse and
quantized tensors), None for a tensor, a tensor of one element for a number. A program needs none of these. Nor does it
need integers so large that their products exceed 64 bits: kernels multiply them without an overflow check.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from overwinter.model.guards import TENSORS_ONLY
from overwinter.model.operators import CHECKS
from overwinter.model.structure import (
    SYMBOLIC_KINDS,
    Argument,
    Device,
    Dtype,
    MemoryFormat,
    Program,
    SingleArgument,
    Slot,
)

MOST = (1 << 31) - 1
"""The largest magnitude of most integer parameters."""
MOST_OF_WINDOW = 1 << 20
"""The largest magnitude of the size, stride, padding and dilation of a window."""
MOST_OF_CONVOLUTION = 1 << 16
"""The largest padding and dilation of a convolution: some kernels compute positions in 32 bits."""
MOST_OF_STRIDE = 1 << 12
"""The largest stride of a convolution."""

_UNBOUNDED = CHECKS | {"aten.slice.Tensor", "aten.slice_scatter.default"}
"""Operators that clamp integers, or only compare them."""
_STEPS = {"stride", "padding", "dilation", "output_padding"}


class IntegerRange(NamedTuple):
    """The bounds of an integer argument."""

    least: int
    most: int

    def holds(self, number: Any) -> bool:
        """Whether a number is within the bounds; NaN is not."""
        return bool(self.least <= number <= self.most)


class Parameter:
    """The values that one parameter of an operator accepts."""

    def __init__(self, operator: str, argument: Any) -> None:
        """`argument` is the parameter's entry in the operator's schema."""
        kind = argument.real_type
        # A number may replace a tensor only if no result can be the tensor itself.
        self._no_number = argument.alias_info is not None or operator in TENSORS_ONLY
        self._may_lack = isinstance(kind, torch.OptionalType)
        if self._may_lack:
            kind = kind.getElementType()
        self._is_list = isinstance(kind, torch.ListType)
        self._part_may_lack = False
        if self._is_list:
            kind = kind.getElementType()
            self._part_may_lack = isinstance(kind, torch.OptionalType)
            kind = kind.getElementType() if self._part_may_lack else kind
        self.kind = str(kind)
        self.bounds = _bounds(operator, argument.name) if self.kind in ("int", "SymInt") else None

    def takes(self, argument: Argument, program: Program) -> bool:
        """Whether a call may have this argument for the parameter."""
        if argument is None:
            return self._may_lack
        if not self._is_list:
            return not isinstance(argument, tuple) and self._takes_part(argument, program, self._no_number)
        if not isinstance(argument, tuple):
            # A single number stands for a list of equal numbers.
            return self.kind != "Tensor" and self._takes_part(argument, program, True)
        return all(self._part_may_lack if part is None else self._takes_part(part, program, True) for part in argument)

    def _takes_part(self, part: SingleArgument, program: Program, tensors_only: bool) -> bool:
        if self.kind == "Tensor" and tensors_only and is_number(part, program):
            return False
        if self.bounds is not None and isinstance(part, int) and not self.bounds.holds(part):
            return False
        return _takes(self.kind, part, program)


def _bounds(operator: str, name: str) -> IntegerRange | None:
    if operator in _UNBOUNDED:
        return None
    if name == "output_size":
        return IntegerRange(0, MOST)
    if "conv" in operator and name in _STEPS:
        most = MOST_OF_STRIDE if name == "stride" else MOST_OF_CONVOLUTION
    else:
        most = MOST_OF_WINDOW if name in _STEPS or name == "kernel_size" else MOST
    return IntegerRange(-most, most)


def bounded(bounds: IntegerRange) -> Callable[[Any], Any]:
    """Return a function that checks a number that is computed while a program runs, and raises ValueError if it is out
    of bounds.
    """

    def check(number: Any) -> Any:
        if not bounds.holds(number):
            raise ValueError(f"a size or an index of {number} is not within {bounds.least} to {bounds.most}")
        return number

    return check


def _takes(kind: str, argument: SingleArgument, program: Program) -> bool:
    known = _KINDS.get(kind)
    return known is not None and known(argument, program)


def is_number(argument: SingleArgument, program: Program) -> bool:
    """Whether an argument is a number, literal or computed."""
    if isinstance(argument, Slot):
        return not _is_tensor(argument, program)
    return isinstance(argument, bool | int | float)


def _is_tensor(argument: Slot, program: Program) -> bool:
    at = argument.number - program.first_value
    return at < 0 or program.values[at].dtype not in SYMBOLIC_KINDS


def _is_whole(argument: SingleArgument, program: Program) -> bool:
    return not isinstance(argument, float) and is_number(argument, program)


_KINDS: dict[str, Callable[[Any, Program], bool]] = {
    # A number in place of a tensor is a tensor without dimensions.
    "Tensor": lambda argument, program: isinstance(argument, Slot) or is_number(argument, program),
    "number": is_number,
    "float": is_number,
    "int": _is_whole,
    "SymInt": _is_whole,
    "bool": _is_whole,
    "str": lambda argument, _: isinstance(argument, str),
    "ScalarType": lambda argument, _: isinstance(argument, Dtype),
    "MemoryFormat": lambda argument, _: isinstance(argument, MemoryFormat),
    "Device": lambda argument, _: isinstance(argument, Device),
}

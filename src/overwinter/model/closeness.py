"""Measures the difference between two answers."""

from collections.abc import Sequence

import torch

from overwinter.core.agreement import Closeness
from overwinter.model.structure import Program

BOUNDS: dict[str, float] = {"float64": 1e-9, "float32": 1e-3, "float16": 2e-2, "bfloat16": 5e-2}
"""The largest difference that the choice of other kernels may cause, relative to the output's magnitude.

PyTorch chooses kernels by size and by what it can fuse, and each has its own order of summation. In float32 this causes
1e-7 to 1e-5, and more in deep networks and for unusual inputs. A wrong program differs by far more.
"""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""An integer type with as many bytes; its values are equal exactly if the bits are."""

_MASKED = 1e4
"""Numbers of at least this magnitude mark masked elements; they do not count for an output's magnitude."""


def bound_of(program: Program) -> float:
    """Return the bound of the coarsest type in the program, which may be coarser than that of its outputs."""
    held = {weight.dtype for weight in program.weights} | {value.dtype for value in program.values}
    return max([BOUNDS[dtype] for dtype in held if dtype in BOUNDS], default=BOUNDS["float32"])


class ClosenessMeter:
    """Measures the differences of pairs of outputs."""

    def __init__(self, program: Program, bound: float) -> None:
        self._names = [spec.name for spec in program.outputs]
        self._bound = bound
        self._magnitudes = [0.0] * len(self._names)
        self._seen = [Closeness(True, 0.0)] * len(self._names)

    def closeness(self) -> dict[str, Closeness]:
        """Return the closeness of each output, over all pairs within the bound."""
        return dict(zip(self._names, self._seen, strict=True))

    def compare(self, wanted: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> str:
        """Return the first mismatch as a text (number, type, shape, or a difference above the bound); empty: none."""
        if len(wanted) != len(given):
            return f"{len(given)} outputs instead of {len(wanted)}"
        seen: list[Closeness] = []
        for at, (name, expected, actual) in enumerate(zip(self._names, wanted, given, strict=True)):
            if (expected.dtype, expected.shape) != (actual.dtype, actual.shape):
                return f"output {name!r} is {_described(actual)} instead of {_described(expected)}"
            self._magnitudes[at] = max(self._magnitudes[at], _magnitude(expected))
            exact = equal_bits(expected, actual)
            difference = 0.0 if exact else _difference(expected, actual, self._magnitudes[at])
            if difference > self._bound:
                return f"output {name!r} differs by {difference:.2g} of its magnitude; the bound is {self._bound:.2g}"
            seen.append(Closeness(exact, difference))
        self._seen = [
            Closeness(before.exact and now.exact, max(before.difference, now.difference))
            for before, now in zip(self._seen, seen, strict=True)
        ]
        return ""


def is_near(expected: torch.Tensor, actual: torch.Tensor, bound: float) -> bool:
    """Whether two tensors have equal types and shapes and differ by at most `bound`, relative to the magnitude of
    `expected`.
    """
    if (expected.dtype, expected.shape) != (actual.dtype, actual.shape):
        return False
    if expected.is_complex():
        expected, actual = (torch.view_as_real(each.resolve_conj()) for each in (expected, actual))
    return _difference(expected, actual, _magnitude(expected)) <= bound


def equal_bits(expected: torch.Tensor, actual: torch.Tensor) -> bool:
    """Whether two tensors of equal type and shape hold the same bits."""
    bits = _BITS[expected.element_size()]
    # A lazily negated tensor has no bits of its own yet.
    return torch.equal(expected.resolve_neg().view(bits), actual.resolve_neg().view(bits))


def _magnitude(tensor: torch.Tensor) -> float:
    """Return the largest magnitude that does not mark a masked element."""
    numbers = tensor.detach().double().abs()
    numbers = numbers[numbers < _MASKED]
    return numbers.max().item() if numbers.numel() else 0.0


def _difference(expected: torch.Tensor, actual: torch.Tensor, magnitude: float) -> float:
    """Return the largest difference relative to the magnitude, or to the number itself if that is larger.

    NaN equals NaN; integers and booleans must be equal.
    """
    if not expected.is_floating_point():
        return 0.0 if torch.equal(expected, actual) else float("inf")
    unlike = ~((expected == actual) | (expected.isnan() & actual.isnan()))
    wanted, given = expected[unlike].double(), actual[unlike].double()
    if not wanted.numel():
        return 0.0
    relative = (wanted - given).abs() / wanted.abs().clamp_min(magnitude)
    return relative.nan_to_num(nan=float("inf")).max().item()


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"

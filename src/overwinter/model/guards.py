"""Which operators does PyTorch check too little, and what must hold before one of them runs?

A program's arguments may be hostile, and a request's values too: an operator of this table would read or write outside
its tensors for some of them, or give back memory that nobody wrote. A check here costs one look at the arguments.
"""

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, NamedTuple

import torch

Arguments = Mapping[str, Any]
"""A call's arguments by the names of the operator's schema, defaults included."""

MOST_BINS = 1 << 20
WIDEST_RANGE = 1e30
FINEST_RANGE = 1e-6
"""Smallest width of a histogram's range, relative to its ends: below it float32 has no numbers left in between."""


class Guard(NamedTuple):
    """What surrounds an operator: a check of its arguments, and what makes sure that its results were written."""

    check: Callable[[Arguments], None]
    finish: Callable[[Arguments, Any], Any] | None = None


def guarded(operator: str, overload: torch._ops.OpOverload) -> Callable[..., Any]:
    """What a call of the operator runs: the operator itself, or the operator behind the checks that it lacks.

    These raise ValueError, naming the operator.
    """
    run: Callable[..., Any] = getattr(overload, "_op", overload)
    guard = _GUARDS.get(operator)
    if guard is None:
        return run
    check, finish = guard
    names = [argument.name for argument in overload._schema.arguments]
    defaults = {argument.name: argument.default_value for argument in overload._schema.arguments}

    def checked(*args: Any, **kwargs: Any) -> Any:
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        check(given)
        result = run(*args, **kwargs)
        return result if finish is None else finish(given, result)

    return checked


def _require(truth: bool, message: str) -> None:
    if not truth:
        raise ValueError(message)


def _histogram(given: Arguments) -> None:
    """The kernel turns a value into a bin by arithmetic in the values' own type and trusts what comes out."""
    low, high = float(given["min"]), float(given["max"])
    _require(given["self"].dtype in (torch.float32, torch.float64), "histc takes float32 or float64 values")
    _require(0 < given["bins"] <= MOST_BINS, f"histc takes 1 to {MOST_BINS} bins")
    widest = max(abs(low), abs(high))
    _require(isfinite(widest) and widest <= WIDEST_RANGE, f"histc takes a range within {WIDEST_RANGE}")
    narrowest = max(FINEST_RANGE * widest, 1 / WIDEST_RANGE)
    _require(high - low >= narrowest, "histc takes a min well below its max, and both given")


def _bags(given: Arguments) -> None:
    """The kernels read from one offset to the next without a look at whether these go up."""
    table, indices, offsets = given["weight"], given["indices"], given["offsets"]
    _require(given["mode"] in _BAG_MODES, f"embedding_bag knows the modes {_BAG_MODES}")
    _require((table.dim(), indices.dim(), offsets.dim()) == (2, 1, 1), "embedding_bag takes a table and two lists")
    _require_ascending("embedding_bag", offsets, indices.numel())


def _written_bags(given: Arguments, results: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Zeros for the results that the mode leaves unwritten."""
    output, bags, sizes, maxima = results
    if given["mode"] != _LARGEST:
        maxima = torch.zeros_like(maxima)
    if given["mode"] == _SUM:
        bags, sizes = torch.zeros_like(bags), torch.zeros_like(sizes)
    return output, bags, sizes, maxima


def _groups(given: Arguments) -> None:
    """The kernel cuts the rows at the offsets, and leaves those after the last one unwritten."""
    rows, matrices, offsets = given["self"], given["mat2"], given["offs"]
    dims = (rows.dim(), matrices.dim(), offsets.dim() if offsets is not None else 0)
    _require(dims == (2, 3, 1), "_grouped_mm takes rows, a matrix for each group and offsets")
    _require(offsets.numel() == matrices.shape[0], "_grouped_mm takes one offset for each group")
    _require_ascending("_grouped_mm", offsets, rows.shape[0])


def _written_groups(given: Arguments, result: torch.Tensor) -> torch.Tensor:
    """The result, with zeros in the rows that belong to no group."""
    offsets = given["offs"]
    if offsets.numel():
        result[int(offsets[-1]) :].zero_()
    return result


def _require_ascending(operator: str, offsets: torch.Tensor, length: int) -> None:
    _require(not offsets.is_floating_point(), f"{operator} takes whole offsets")
    if offsets.numel():
        within = int(offsets[0]) >= 0 and int(offsets[-1]) <= length and bool((offsets[1:] >= offsets[:-1]).all())
        _require(within, f"{operator} takes offsets that go up from 0 to at most {length}")


_SUM = 0
_LARGEST = 2
_BAG_MODES = (_SUM, 1, _LARGEST)

_GUARDS: dict[str, Guard] = {
    "aten._grouped_mm.default": Guard(_groups, _written_groups),
    "aten.embedding_bag.default": Guard(_bags, _written_bags),
    "aten.embedding_bag.padding_idx": Guard(_bags, _written_bags),
    "aten.histc.default": Guard(_histogram),
}

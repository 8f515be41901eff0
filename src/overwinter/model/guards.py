"""Additional checks for operators whose own checks in PyTorch are insufficient.

A program's arguments and a request's values may be hostile. For some of them an operator listed here would read or
write outside its tensors, return uninitialized memory, or crash the process. A check only inspects the arguments.
"""

from collections.abc import Callable, Mapping
from math import isfinite, prod
from typing import Any, NamedTuple

import torch

from overwinter.model.operators import TENSOR_OPERATORS

Arguments = Mapping[str, Any]
"""A call's arguments by the operator's parameter names, with defaults."""

MOST_BINS = 1 << 20
WIDEST_RANGE = 1e30
FINEST_RANGE = 1e-6
"""The least width of a histogram's range, relative to its ends; float32 has few values in a narrower one."""
SMALLEST_SCALE = 1e-6
"""The least positive scale of a resized image: positions are divided by it and converted to integers."""


class Guard(NamedTuple):
    """What is added to an operator: a check of its arguments, and a step that initialises results that the operator may
    leave unwritten.
    """

    check: Callable[[Arguments], None]
    finish: Callable[[Arguments, Any], Any] | None = None


def guarded(operator: str, overload: torch._ops.OpOverload) -> Callable[..., Any]:
    """Return the operator itself, or a function that checks or copies its arguments first. Checks raise ValueError."""
    run: Callable[..., Any] = getattr(overload, "_op", overload)
    if operator in _COPYING:
        return _COPYING[operator](run)
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


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _histogram(given: Arguments) -> None:
    """The kernel computes bins in the values' own type, and does not check them."""
    low, high = float(given["min"]), float(given["max"])
    _require(given["self"].dtype in (torch.float32, torch.float64), "histc takes float32 or float64 values")
    _require(0 < given["bins"] <= MOST_BINS, f"histc takes 1 to {MOST_BINS} bins")
    widest = max(abs(low), abs(high))
    _require(isfinite(widest) and widest <= WIDEST_RANGE, f"histc takes a range within {WIDEST_RANGE}")
    narrowest = max(FINEST_RANGE * widest, 1 / WIDEST_RANGE)
    _require(high - low >= narrowest, "histc takes a min and a max, the min well below the max")


def _bags(given: Arguments) -> None:
    """The kernels read from one offset to the next without checking that these increase."""
    table, indices, offsets = given["weight"], given["indices"], given["offsets"]
    _require(given["mode"] in _BAG_MODES, f"embedding_bag takes the modes {_BAG_MODES}")
    dimensions = (table.dim(), indices.dim(), offsets.dim())
    _require(dimensions == (2, 1, 1), "embedding_bag takes a matrix of weights and one-dimensional indices and offsets")
    _require(offsets.numel() > 0 or indices.numel() == 0, "embedding_bag takes offsets for its indices")
    _require_ascending("embedding_bag", offsets, indices.numel())
    weights = given["per_sample_weights"]
    fit = weights is None or (weights.shape == indices.shape and weights.dtype == table.dtype)
    _require(fit, "embedding_bag takes one weight of the table's datatype for each index")


def _written_bags(given: Arguments, results: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return the results, with zeros for those that the mode leaves unwritten."""
    output, bags, sizes, maxima = results
    if given["mode"] != _LARGEST:
        maxima = torch.zeros_like(maxima)
    if given["mode"] == _SUM or not output.numel():
        bags, sizes = torch.zeros_like(bags), torch.zeros_like(sizes)
    # On a GPU there may be one size more than bags.
    sizes[len(output) :].zero_()
    return output, bags, sizes, maxima


def _groups(given: Arguments) -> None:
    """The kernel splits the rows at the offsets, and leaves those after the last one uninitialized."""
    rows, matrices, offsets = given["self"], given["mat2"], given["offs"]
    dims = (rows.dim(), matrices.dim(), offsets.dim() if offsets is not None else 0)
    _require(dims == (2, 3, 1), "_grouped_mm takes rows, a matrix for each group and offsets")
    _require(offsets.numel() == matrices.shape[0], "_grouped_mm takes one offset for each group")
    _require_ascending("_grouped_mm", offsets, rows.shape[0])


def _written_groups(given: Arguments, result: torch.Tensor) -> torch.Tensor:
    """Return the result, with zeros in the rows that belong to no group."""
    offsets = given["offs"]
    result[int(offsets[-1]) if offsets.numel() else 0 :].zero_()
    return result


def _attention(run: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel gives its result the memory order of the query, and assumes that the query's last dimension is the
    innermost in memory. It reads as many values as there are keys, and divides by the keys' number of heads where heads
    share keys.
    """

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        *outer, inner = query.stride() or (1,)
        if inner != 1 or (outer and min(outer) < query.size(-1)):
            query = query.contiguous()
        _require(key.size(-2) == value.size(-2), "attention takes a value for each key")
        if kwargs.get("enable_gqa"):
            fit = key.shape[:-1] == value.shape[:-1] and 0 not in key.shape
            _require(fit, "attention with shared keys takes at least one key, and as many values")
        return run(query, key, value, *args, **kwargs)

    return attend


def _median(run: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel finds the median in a copy, and reads its value by the strides of the original."""

    def find(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return run(self.contiguous(), *args, **kwargs)

    return find


def _batch_norm(given: Arguments) -> None:
    """The kernel reads as many statistics as the input has channels."""
    values = given["input"]
    _require(values.dim() >= 2, "batch norm takes an input of at least two dimensions")
    lists = [given[name] for name in ("weight", "bias", "running_mean", "running_var") if given[name] is not None]
    fit = all(each.shape == values.shape[1:2] for each in lists)
    _require(fit, "batch norm takes one mean, variance, weight and bias for each channel")


def _group_norm(given: Arguments) -> None:
    """The kernel assumes that weight and bias are contiguous, and that the given sizes are those of its input."""
    values, channels = given["input"], given["C"]
    sizes = (given["N"], channels, given["HxW"])
    fit = values.dim() >= 2 and (*values.shape[:2], prod(values.shape[2:])) == sizes
    _require(fit, "native_group_norm takes the sizes of its input")
    lists = [given[name] for name in ("weight", "bias") if given[name] is not None]
    fit = all(each.shape == (channels,) and each.is_contiguous() for each in lists)
    _require(fit, "native_group_norm takes a contiguous weight and bias, with one value for each channel")


def _weight_norm(given: Arguments) -> None:
    """The kernel for the first or last dimension reads one norm for each index, and divides by their number."""
    values, norms, dim = given["v"], given["g"], given["dim"]
    _require(values.numel() > 0, "_weight_norm takes at least one value")
    if dim in (0, values.dim() - 1):
        shape = [size if at == dim else 1 for at, size in enumerate(values.shape)]
        fit = values.dim() > 0 and list(norms.shape) == shape and norms.dtype == values.dtype
        _require(fit, "_weight_norm takes one norm of the values' datatype for each index of the dimension")


def _eigenvalues(given: Arguments) -> None:
    """The LAPACK routine may access memory outside its own for numbers that are not finite."""
    _require(bool(given["self"].isfinite().all()), "linalg_eigvals takes finite numbers")


def _grid(given: Arguments) -> None:
    """A kernel writes nothing for an unknown mode."""
    known = given["interpolation_mode"] in range(3) and given["padding_mode"] in range(3)
    _require(known, "grid_sampler takes the modes 0 to 2")


def _grid_3d(given: Arguments) -> None:
    _grid(given)
    _require(given["interpolation_mode"] < _BICUBIC, "grid_sampler_3d takes the interpolation modes 0 and 1")


def _resizing(given: Arguments) -> None:
    """A position in the result is divided by the scale."""
    scales = [given[name] for name in ("scale_factor", "scales", "scales_d", "scales_h", "scales_w") if name in given]
    for scale in [*scales, *(given.get("scale_factors") or ())]:
        large_enough = scale is None or not 0 < scale < SMALLEST_SCALE
        _require(large_enough, f"a tensor is resized by a scale of at least {SMALLEST_SCALE}")


def _loss(given: Arguments) -> None:
    """The kernel assumes that there is a target for each value, and that the reduction is known."""
    alike = given["self"].shape == given["target"].shape
    _require(alike, "a loss takes a target of the shape of its input")
    _require(given["reduction"] in range(3), "a loss takes the reductions 0 to 2")


def _labels(given: Arguments) -> None:
    """The kernel of a GPU uses targets as indices without checking them."""
    _loss_of_rows(given)
    values, target = given["self"], given["target"]
    classes = values.shape[-1] if values.dim() else 1
    fit = not target.numel() or (int(target.min()) >= -1 and int(target.max()) < classes)
    _require(fit, f"multilabel_margin_loss takes targets from -1 to {classes - 1}")


def _loss_of_rows(given: Arguments) -> None:
    """The kernel writes no result if there are no rows."""
    _require(given["self"].numel() > 0, "a margin loss takes at least one value")


def _division(given: Arguments) -> None:
    """Dividing the smallest integer by -1 ends the process (SIGFPE), because the quotient does not fit in the type."""
    top, bottom = given["self"], given["other"]
    if given["rounding_mode"] == "trunc":
        integers = [part.dtype for part in (top, bottom) if isinstance(part, torch.Tensor)]
        if all(not (dtype.is_floating_point or dtype.is_complex) for dtype in integers) and _any_is(bottom, -1):
            lowest = torch.iinfo(torch.int64).min
            smallest = [lowest, torch.iinfo(torch.int32).min]
            _require(not any(_any_is(top, each) for each in smallest), "div cannot divide the smallest integer by -1")


def _negation(given: Arguments) -> None:
    _require(given["self"].dtype != torch.bool, "_neg_view takes numbers, not truth values")


def _any_is(numbers: object, number: int) -> bool:
    return bool((numbers == number).any()) if isinstance(numbers, torch.Tensor) else numbers == number


def _recurrent(gates: int) -> Callable[[Arguments], None]:
    """Return a check of a recurrent layer with this many gates: the kernels do not check the sizes of states and
    parameters.
    """

    def check(given: Arguments) -> None:
        values, states, parameters = given["input"], given["hx"], given["params"]
        states = [states] if isinstance(states, torch.Tensor) else states
        fit = len(states) == (2 if gates == _LSTM_GATES else 1)
        _require(fit, "an LSTM takes two states, any other recurrent layer one")
        ranks = {part.dim() for part in (values, *states)}
        _require(ranks == {3}, "a recurrent layer takes an input and states of three dimensions")
        layers, directions = given["num_layers"], 2 if given["bidirectional"] else 1
        batch, width = values.shape[0 if given["batch_first"] else 1], values.shape[2]
        output, hidden = states[0].shape[2], states[-1].shape[2]
        for state in states:
            fit = tuple(state.shape[:2]) == (layers * directions, batch) and 0 < output <= hidden
            _require(fit, f"a recurrent layer takes {layers * directions} states for each of {batch} rows")
        wanted: list[tuple[int, ...]] = []
        for layer in range(min(layers, len(parameters))):
            read = width if layer == 0 else output * directions
            each: list[tuple[int, ...]] = [(gates * hidden, read), (gates * hidden, output)]
            each += [(gates * hidden,)] * 2 if given["has_biases"] else []
            # An LSTM may project its hidden state to a smaller output by one more matrix.
            each += [(output, hidden)] if output != hidden else []
            wanted += each * directions
        fit = layers >= 1 and [tuple(part.shape) for part in parameters] == wanted
        _require(fit, f"a recurrent layer takes parameters of the shapes {wanted[:8]}")
        alike = {part.dtype for part in (values, *states, *parameters)}
        _require(len(alike) == 1 and values.is_floating_point(), "a recurrent layer takes floats of one type")

    return check


def _require_ascending(operator: str, offsets: torch.Tensor, length: int) -> None:
    _require(not offsets.is_floating_point(), f"{operator} takes integer offsets")
    if offsets.numel():
        within = int(offsets[0]) >= 0 and int(offsets[-1]) <= length and bool((offsets[1:] >= offsets[:-1]).all())
        _require(within, f"{operator} takes offsets from 0 to {length}, none below the one before")


_SUM = 0
_LARGEST = 2
_BAG_MODES = (_SUM, 1, _LARGEST)
_BICUBIC = 2
_LSTM_GATES = 4

_COPYING: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "aten.median.dim": _median,
    "aten.nanmedian.dim": _median,
    "aten.scaled_dot_product_attention.default": _attention,
}
"""Operators of which an argument must be copied first if its memory layout is unusual."""

_DIVISIONS = frozenset(
    f"aten.{name}.{overload}_mode" for name in ("div", "div_", "divide", "divide_") for overload in ("Scalar", "Tensor")
)

_GUARDS: dict[str, Guard] = {
    "aten._grouped_mm.default": Guard(_groups, _written_groups),
    "aten._native_batch_norm_legit_no_training.default": Guard(_batch_norm),
    "aten._weight_norm.default": Guard(_weight_norm),
    "aten._neg_view.default": Guard(_negation),
    "aten.binary_cross_entropy.default": Guard(_loss),
    "aten.embedding_bag.default": Guard(_bags, _written_bags),
    "aten.embedding_bag.padding_idx": Guard(_bags, _written_bags),
    "aten.grid_sampler.default": Guard(_grid),
    "aten.grid_sampler_2d.default": Guard(_grid),
    "aten.grid_sampler_3d.default": Guard(_grid_3d),
    "aten.gru.input": Guard(_recurrent(3)),
    "aten.histc.default": Guard(_histogram),
    "aten.linalg_eigvals.default": Guard(_eigenvalues),
    "aten.lstm.input": Guard(_recurrent(_LSTM_GATES)),
    "aten.multi_margin_loss.default": Guard(_loss_of_rows),
    "aten.multilabel_margin_loss.default": Guard(_labels),
    "aten.native_group_norm.default": Guard(_group_norm),
    "aten.rnn_relu.input": Guard(_recurrent(1)),
    "aten.rnn_tanh.input": Guard(_recurrent(1)),
    "aten.soft_margin_loss.default": Guard(_loss),
    **{name: Guard(_division) for name in _DIVISIONS},
    **{name: Guard(_resizing) for name in TENSOR_OPERATORS if "upsample" in name},
}

TENSORS_ONLY: frozenset[str] = frozenset(_GUARDS.keys() | _COPYING.keys()) - _DIVISIONS
"""Operators whose checks read tensor arguments as tensors. A program cannot give them a number in place of a tensor."""

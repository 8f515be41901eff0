"""Determines the inputs of a module and their dynamic sizes."""

from collections.abc import Mapping, Sequence
from inspect import BoundArguments, Parameter, signature
from keyword import iskeyword
from typing import Any, NamedTuple

import torch
from torch.export import Dim

from overwinter.core.errors import ProgramError

Example = tuple[torch.Tensor, ...] | Mapping[str, torch.Tensor]
Size = str | tuple[str, int, int] | Dim
"""A dynamic size: its name, its name with its smallest and largest value, or a `torch.export.Dim`."""
Dynamic = Mapping[str, Mapping[int, Size]]
SizeRanges = dict[str, tuple[int, int]]

BATCH = "batch"


class Input(NamedTuple):
    """One input: its name, an example, and the names of its dynamic sizes by dimension."""

    name: str
    tensor: torch.Tensor
    dynamic: dict[int, str]


class Arguments(NamedTuple):
    """The inputs of a module's `forward`, and the ranges of dynamic sizes that the author gave."""

    bound: BoundArguments
    inputs: list[Input]
    ranges: SizeRanges

    def arranged(self, leaves: Mapping[str, Any]) -> dict[str, Any]:
        """Arrange one object per input as the arguments are nested."""
        arranged: dict[str, Any] = {}
        for name, value in self.bound.arguments.items():
            match self.bound.signature.parameters[name].kind:
                case Parameter.VAR_POSITIONAL:
                    arranged[name] = tuple(leaves[f"{name}_{index}"] for index in range(len(value)))
                case _:
                    arranged[name] = leaves[name]
        return arranged

    def filled(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arrange one tensor per input as arguments of the module."""
        named = {name: tensor for (name, _, _), tensor in zip(self.inputs, tensors, strict=True)}
        filled = BoundArguments(self.bound.signature, self.arranged(named))
        return filled.args, filled.kwargs

    @property
    def examples(self) -> list[torch.Tensor]:
        """The example of each input."""
        return [tensor for _, tensor, _ in self.inputs]


def arguments_of(module: torch.nn.Module, example_inputs: Example, dynamic: Dynamic | None) -> Arguments:
    """Return the inputs in the form that `export` needs; ProgramError names what does not match the module or the
    examples.
    """
    parameters = signature(module.forward)
    given: object = example_inputs
    if not isinstance(given, tuple | Mapping):
        name = next(iter(parameters.parameters), "x")
        raise ProgramError(
            f"the example inputs are a {type(given).__name__}; give a tuple of tensors in the order of the "
            f"model's forward(), as (tensor,), or a dictionary of them by name, as {{{name!r}: tensor}}"
        )
    positional = example_inputs if isinstance(example_inputs, tuple) else ()
    keywords = {} if isinstance(example_inputs, tuple) else dict(example_inputs)
    try:
        bound = parameters.bind(*positional, **keywords)
    except TypeError as error:
        raise ProgramError(f"the example inputs do not fit the model's forward(): {error}") from error
    ranges: SizeRanges = {}
    inputs: list[Input] = []
    leaves = _leaves(bound)
    _check_form(dynamic, [name for name, _ in leaves])
    for name, tensor in leaves:
        dims = _dimensions_of(name, tensor, dynamic, ranges)
        inputs.append(Input(name, _widened(name, tensor, dims), dims))
    _check_equal_sizes(inputs)
    _check_ranges(inputs, ranges)
    return Arguments(bound, inputs, ranges)


def _leaves(bound: BoundArguments) -> list[tuple[str, Any]]:
    """Each argument with its name, in the order of the signature."""
    found: list[tuple[str, Any]] = []
    for name, value in bound.arguments.items():
        match bound.signature.parameters[name].kind:
            case Parameter.VAR_POSITIONAL:
                found.extend((f"{name}_{index}", part) for index, part in enumerate(value))
            case Parameter.VAR_KEYWORD:
                raise ProgramError(f"inputs {sorted(value)} go to **{name}; name them in the model's forward()")
            case _:
                found.append((name, value))
    for name, value in found:
        if not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            raise ProgramError(
                f"example input {name!r} is of type {kind}; inputs must be tensors; wrap the model in a "
                "module that sets its other arguments"
            )
        if value.layout is not torch.strided or value.is_nested or value.is_meta:
            kind = "nested" if value.is_nested else "without data" if value.is_meta else f"{value.layout}"
            raise ProgramError(f"example input {name!r} is {kind}; inputs are dense tensors with data")
    return found


def _check_form(dynamic: object, inputs: Sequence[str]) -> None:
    """Raise ProgramError unless `dynamic` is None or maps names of inputs to dimensions by number; without inputs it is
    ignored.
    """
    if dynamic is None or not inputs:
        return
    if not isinstance(dynamic, Mapping):
        raise ProgramError(
            f"dynamic is of type {type(dynamic).__name__}; it takes inputs by name, as "
            f"{{{inputs[0]!r}: {{0: 'batch'}}}}"
        )
    for name, dims in dynamic.items():
        if name not in inputs:
            raise ProgramError(
                f"dynamic names {name!r}, which is not an input; the inputs are {', '.join(inputs)}; write "
                f"{{{inputs[0]!r}: {{0: 'batch'}}}}"
            )
        if not isinstance(dims, Mapping):
            raise ProgramError(
                f"dynamic has {dims!r} for input {name!r}; write a name for each dimension that may vary, as "
                f"{{{name!r}: {{0: 'batch'}}}}, or leave the input out to fix its sizes"
            )
        for dim in dims:
            if not isinstance(dim, int):
                raise ProgramError(
                    f"dynamic has {dim!r} for a dimension of input {name!r}; dimensions are integers, as "
                    f"{{{name!r}: {{0: 'batch'}}}}"
                )


def _dimensions_of(name: str, tensor: torch.Tensor, dynamic: Dynamic | None, ranges: SizeRanges) -> dict[int, str]:
    """Return the names of an input's dynamic sizes; ranges that are given with a name are added to `ranges`."""
    if dynamic is None:
        return {0: BATCH} if tensor.dim() else {}
    dims: dict[int, str] = {}
    for dim, size in dynamic.get(name, {}).items():
        if not -tensor.dim() <= dim < tensor.dim():
            raise ProgramError(f"input {name!r} has {tensor.dim()} dimensions, so {dim} cannot be dynamic")
        label, given = _read(name, size)
        if not label.isidentifier() or iskeyword(label):
            raise ProgramError(f"the dynamic size {label!r} of input {name!r} must be named like a variable")
        if given is not None and ranges.setdefault(label, given) != given:
            raise ProgramError(f"dynamic size {label!r} is given two ranges, {ranges[label]} and {given}")
        if dim % tensor.dim() in dims:
            raise ProgramError(f"dynamic has dimension {dim % tensor.dim()} of input {name!r} twice: once is enough")
        dims[dim % tensor.dim()] = label
    return dims


def _read(name: str, size: object) -> tuple[str, tuple[int, int] | None]:
    """Return the name and the range of a dynamic size."""
    match size:
        case str():
            return size, None
        case (str() as label, int() as low, int() as high) if 1 <= low < high:
            return label, (low, high)
        case Dim() if type(size) is Dim and isinstance(size.max, int):
            return size.__name__, (max(1, size.min), size.max)
        case Dim() if type(size) is Dim:
            return size.__name__, None
        case _:
            pass
    said = size.__name__ if isinstance(size, Dim) else repr(size)
    raise ProgramError(
        f"a dynamic size of input {name!r} is {said}; write a name, or (name, smallest, largest) with 1 <= smallest "
        "< largest; what else the model requires of its sizes, such as an even one, is found by the export"
    )


def _widened(name: str, tensor: torch.Tensor, dims: Mapping[int, str]) -> torch.Tensor:
    """Return a contiguous copy of the example with dynamic sizes of 1 doubled, because an export treats a 1 as fixed.

    It is a copy because the export of one tensor in two places, as two inputs or as an input and a weight, would take
    one for the other.
    """
    for dim in dims:
        if tensor.shape[dim] == 0:
            raise ProgramError(f"example input {name!r} has no elements along dynamic dimension {dim}")
        if tensor.shape[dim] == 1:
            tensor = torch.cat([tensor, tensor], dim)
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _check_equal_sizes(inputs: Sequence[Input]) -> None:
    sizes: dict[str, int] = {}
    for name, tensor, dims in inputs:
        for dim, label in dims.items():
            if sizes.setdefault(label, tensor.shape[dim]) != tensor.shape[dim]:
                raise ProgramError(
                    f"dynamic size {label!r} is {sizes[label]} in one example input, {tensor.shape[dim]} in {name!r}; "
                    "give them equal examples, or different names"
                )


def _check_ranges(inputs: Sequence[Input], ranges: SizeRanges) -> None:
    for name, tensor, dims in inputs:
        for dim, label in dims.items():
            low, high = ranges.get(label, (1, tensor.shape[dim]))
            if not low <= tensor.shape[dim] <= high:
                raise ProgramError(
                    f"example input {name!r} has {tensor.shape[dim]} for {label!r}, which goes from {low} to {high}"
                )

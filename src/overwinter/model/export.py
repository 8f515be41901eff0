"""How does a PyTorch model become a program and its weights?

For the deployer's side only: the model's own code runs here.
"""

import re
import traceback
import warnings
from collections.abc import Mapping
from inspect import BoundArguments, Parameter, signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.export import Dim, ExportedProgram

from overwinter.core.errors import ProgramError
from overwinter.model.conversion import Exported, convert
from overwinter.model.sizes import Sizes, names_of_symbols, sizes_of

__all__ = ["Exported", "export", "export_saved"]

BATCH = "batch"
LARGEST_BATCH = 1024
LARGEST_SIZE = 4096
"""Largest value of a dynamic size that is not the batch, unless the model itself allows less."""
_ATTEMPTS = 6
"""How often an export may be tried again with the narrower sizes that the model was found to need."""

Example = tuple[torch.Tensor, ...] | Mapping[str, torch.Tensor]
Dynamic = Mapping[str, Mapping[int, str]]
Ranges = dict[str, tuple[int, int]]


class _Input(NamedTuple):
    name: str
    tensor: torch.Tensor
    dynamic: dict[int, str]


def export(module: torch.nn.Module, example_inputs: Example, dynamic: Dynamic | None = None) -> Exported:
    """The program and the weights of a model, which is put in evaluation mode.

    `example_inputs` are the arguments of `module.forward`, all tensors, in order or by name. `dynamic` names the sizes
    that may vary: `{"input_ids": {0: "batch", 1: "sequence"}}`; sizes of one name vary together. Without it,
    dimension 0 of every input is "batch"; `{}` fixes all sizes. Where an example has 1 for a size that may vary, it is
    doubled, since an export takes a 1 for fixed. ProgramError if the model cannot become a program.
    """
    module.eval()
    arguments = example_inputs if isinstance(example_inputs, tuple) else ()
    named = {} if isinstance(example_inputs, tuple) else dict(example_inputs)
    try:
        bound = signature(module.forward).bind(*arguments, **named)
    except TypeError as error:
        raise ProgramError(f"the example inputs do not fit the model's forward(): {error}") from error
    inputs = [
        _Input(name, _widened(name, tensor, dims), dims)
        for name, tensor in _leaves(bound)
        for dims in [_dimensions_of(name, tensor, dynamic)]
    ]
    _check_names(inputs, dynamic)
    exported = _attempt(module, bound, inputs)
    labels = [name for name, _, _ in inputs]
    holes = _input_values(exported)
    names = names_of_symbols(holes, [dims for _, _, dims in inputs], labels)
    example = {
        name: 1 if name == BATCH else tensor.shape[dim] for _, tensor, dims in inputs for dim, name in dims.items()
    }
    return convert(exported, labels, Sizes(names, _ranges(exported, names), example))


def export_saved(path: Path) -> Exported:
    """The program and the weights in a `.pt2` file written by `torch.export.save`.

    Opening such a file can execute code that it contains: only for files of one's own, on the deployer's side. The
    first dynamic size at dimension 0 becomes "batch", any other "size_1", "size_2" and so on.
    """
    with _border(f"cannot open {path.name}"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.load(path)
    signature_inputs = exported.graph_signature.user_inputs
    names: dict[Any, str] = {}
    example: dict[str, int] = {}
    given = torch.utils._pytree.tree_leaves(exported.example_inputs) if exported.example_inputs else []
    for at, tensor in enumerate(_input_values(exported)):
        for dim, size in enumerate(sizes_of(tensor)):
            if isinstance(size, int) or size.node.expr in names:
                continue
            name = BATCH if dim == 0 and BATCH not in example else f"size_{len(names)}"
            names[size.node.expr] = name
            example[name] = 1 if name == BATCH or at >= len(given) else given[at].shape[dim]
    ranges = _ranges(exported, names)
    example = {name: max(size, ranges[name][0]) for name, size in example.items()}
    return convert(exported, [str(name) for name in signature_inputs], Sizes(names, ranges, example))


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
                f"example input {name!r} is a {kind}; inputs must be tensors, so fix it in a wrapping module"
            )
    return found


def _dimensions_of(name: str, tensor: torch.Tensor, dynamic: Dynamic | None) -> dict[int, str]:
    if dynamic is None:
        return {0: BATCH} if tensor.dim() else {}
    dims: dict[int, str] = {}
    for dim, label in dynamic.get(name, {}).items():
        if not -tensor.dim() <= dim < tensor.dim():
            raise ProgramError(f"input {name!r} has {tensor.dim()} dimensions, so {dim} cannot be dynamic")
        if not label.isidentifier():
            raise ProgramError(f"the dynamic size {label!r} of input {name!r} must be named like a variable")
        dims[dim % tensor.dim()] = label
    return dims


def _widened(name: str, tensor: torch.Tensor, dims: Mapping[int, str]) -> torch.Tensor:
    for dim in dims:
        if tensor.shape[dim] == 0:
            raise ProgramError(f"example input {name!r} has no elements along dynamic dimension {dim}")
        if tensor.shape[dim] == 1:
            tensor = torch.cat([tensor, tensor], dim)
    return tensor


def _check_names(inputs: list[_Input], dynamic: Dynamic | None) -> None:
    unknown = set(dynamic or {}) - {name for name, _, _ in inputs}
    if unknown:
        raise ProgramError(
            f"dynamic names {sorted(unknown)[0]!r}; the inputs: {', '.join(name for name, _, _ in inputs)}"
        )
    sizes: dict[str, int] = {}
    for name, tensor, dims in inputs:
        for dim, label in dims.items():
            if sizes.setdefault(label, tensor.shape[dim]) != tensor.shape[dim]:
                raise ProgramError(
                    f"dynamic size {label!r} is {sizes[label]} in one example input, {tensor.shape[dim]} in {name!r}; "
                    "give them equal examples, or different names"
                )


def _attempt(module: torch.nn.Module, bound: BoundArguments, inputs: list[_Input]) -> ExportedProgram:
    """Export, narrowing the ranges of the dynamic sizes as far as the model turns out to need."""
    labels = {label for _, _, dims in inputs for label in dims.values()}
    ranges = {label: (1, LARGEST_BATCH if label == BATCH else LARGEST_SIZE) for label in labels}
    tensors = {name: tensor for name, tensor, _ in inputs}
    args, kwargs = _filled(bound, tensors)
    for _ in range(_ATTEMPTS):
        dims = {label: Dim(label, min=low, max=high) for label, (low, high) in ranges.items()}
        shapes = {name: {dim: dims[label] for dim, label in named.items()} for name, _, named in inputs}
        try:
            with _border("the model cannot be exported"), warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                return torch.export.export(module, args, kwargs, dynamic_shapes=_arranged(bound, shapes), strict=False)
        except ProgramError as error:
            message = str(error.__cause__)
            narrower = _narrowed(ranges, message) or _raised(ranges, message, inputs)
            if narrower is None:
                raise ProgramError(_with_condition(str(error), message)) from error.__cause__
            ranges = narrower
    raise ProgramError(
        f"the model puts ever new conditions on the dynamic sizes {sorted(labels)}; leave one of them fixed"
    )


def _with_condition(error: str, message: str) -> str:
    """The error, and the condition on a dynamic size that the exporter could not meet, if it names one."""
    condition = _CONDITION.search(message)
    return error if condition is None else f"{error} {condition[0]}; narrow the size in the model with torch._check"


def _arranged(bound: BoundArguments, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Something for each input, in the nesting of the bound arguments."""
    arranged: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        match bound.signature.parameters[name].kind:
            case Parameter.VAR_POSITIONAL:
                arranged[name] = tuple(leaves[f"{name}_{index}"] for index in range(len(value)))
            case _:
                arranged[name] = leaves[name]
    return arranged


def _filled(bound: BoundArguments, tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    filled = BoundArguments(bound.signature, _arranged(bound, tensors))
    return filled.args, filled.kwargs


_UNSUITABLE = re.compile(r"Not all values of (?P<name>\w+) = ")
_CONDITION = re.compile(r"Not all values of .+")
_SUGGESTION = re.compile(r"^  (?P<name>\w+) = (?P<fix>.+)$", re.MULTILINE)
_RANGE = re.compile(r"Dim\('\w+'(?:, min=(?P<low>\d+))?(?:, max=(?P<high>\d+))?\)")


def _narrowed(ranges: Ranges, message: str) -> Ranges | None:
    """The ranges that the exporter suggests, None if none; ProgramError if a size cannot be dynamic at all."""
    _, found, fixes = message.partition("Suggested fixes:")
    if not found:
        return None
    narrower = dict(ranges)
    for match in _SUGGESTION.finditer(fixes):
        name, fix = match["name"], match["fix"]
        bounds = _RANGE.fullmatch(fix.strip())
        if name not in ranges or bounds is None:
            raise ProgramError(
                f"dimension {name!r} cannot vary freely: the model needs {name} = {fix}; leave it out of `dynamic` "
                "to fix it to the example's size, or change the model"
            )
        low, high = ranges[name]
        narrower[name] = (max(low, int(bounds["low"] or 0)), min(high, int(bounds["high"] or high)))
    return narrower if narrower != ranges else None


def _raised(ranges: Ranges, message: str, inputs: list[_Input]) -> Ranges | None:
    """The ranges with a larger minimum where the exporter names none but needs one; never for the batch."""
    found = _UNSUITABLE.search(message)
    name = found["name"] if found else BATCH
    if name == BATCH or name not in ranges:
        return None
    low, high = ranges[name]
    example = next(tensor.shape[dim] for _, tensor, dims in inputs for dim, label in dims.items() if label == name)
    raised = max(2, 2 * low - 1)
    return {**ranges, name: (raised, high)} if raised <= example else None


def _input_values(exported: ExportedProgram) -> list[torch.Tensor]:
    """The symbolic tensors that stand for the inputs."""
    holes = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    values = [holes[name].meta["val"] for name in exported.graph_signature.user_inputs if isinstance(name, str)]
    return [value for value in values if isinstance(value, torch.Tensor)]


def _ranges(exported: ExportedProgram, names: Mapping[Any, str]) -> Ranges:
    """The smallest and largest value of each dynamic size, by name."""
    ranges: Ranges = {}
    for symbol, name in names.items():
        bounds = exported.range_constraints[symbol]
        largest = LARGEST_BATCH if name == BATCH else LARGEST_SIZE
        high = min(int(bounds.upper), largest) if bounds.upper.is_Integer else largest
        ranges[name] = (max(1, int(bounds.lower)), high)
    return ranges


class _border:  # noqa: N801
    """Here the model's own code runs, or a file's: whatever it raises becomes a ProgramError with the line at fault."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, ProgramError):
            lines = str(error).strip().splitlines() or [type(error).__name__]
            details = [line.strip() for line in lines[1:] if line.startswith("  - ")]
            raise ProgramError(f"{self.what}: {' '.join([lines[0], *details])}{_user_line(error)}") from error


def _user_line(error: Exception) -> str:
    """The innermost line outside PyTorch and outside this package that led to the error."""
    ours = (
        str(Path(torch.__file__).parent),
        str(Path(__file__).parent),
        str(Path(traceback.__file__).parent / "contextlib"),
    )
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    if not frames:
        return ""
    frame = frames[-1]
    return f" ({frame.filename}:{frame.lineno}, in {frame.name}: {frame.line})"

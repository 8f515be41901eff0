"""Exports a PyTorch model to a program and its weights.

For the deployer's side only: the model's own code runs here.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import sympy  # type: ignore[import-untyped]
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, TensorArgument
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from overwinter.core.errors import ProgramError
from overwinter.model.arguments import BATCH, Dynamic, Example, Input, SizeRanges, arguments_of
from overwinter.model.checks import Condition, conditions_in, conditions_of, distinct, is_satisfied, narrowed
from overwinter.model.conversion import Exported, Reference, convert
from overwinter.model.graph import guard_calls
from overwinter.model.liveness import peak_activation_bytes
from overwinter.model.remedies import check_module, no_cache
from overwinter.model.restoring import restored
from overwinter.model.saved import check_saved
from overwinter.model.sizes import Sizes, meanings_of, sizes_of
from overwinter.model.structure import Program
from overwinter.model.tracing import CheckMessages, as_program_error, fixing_line, trace

__all__ = ["Exported", "export", "export_saved"]

LARGEST_BATCH = 1024
LARGEST_SIZE = 1 << 20
"""The largest value of any other dynamic size without a given maximum; the model or its memory may lower it."""
SMALLEST_LIMIT = 4096
"""A limit that is set for the sake of memory is never smaller than this."""
MEMORY_BYTES = 4 << 30
"""The limit of the activations of a run in which the sizes without a given maximum, except the batch, have their
largest values, and all others the example's.
"""
Constraints = dict[sympy.Expr, ValueRanges[sympy.Expr]]

_ASSUMED = 2
"""The exporter assumes that every dynamic size is at least 2; a comparison decides whether 1 is valid too."""


def export(module: torch.nn.Module, example_inputs: Example, dynamic: Dynamic | None = None) -> Exported:
    """Export the program and the weights of a model. The model is put in evaluation mode and is otherwise unchanged.

    `example_inputs` are the arguments of `module.forward`, all tensors, in order or by name; they are made contiguous,
    as those of requests are. `dynamic` names the sizes that may vary: `{"input_ids": {0: "batch", 1: "sequence"}}`, or
    with the smallest and the largest, `("sequence", 1, 8192)` or a `torch.export.Dim`; sizes of one name vary together.
    Without it, dimension 0 of every input is "batch"; `{}` fixes all sizes. If an example has 1 for a size that may
    vary, it is doubled, because an export treats a 1 as fixed. Raises ProgramError if the model cannot become a
    program.
    """
    _check_autocast()
    module.eval()
    check_module(module)
    arguments = arguments_of(module, example_inputs, dynamic)
    named = {label for _, _, dims in arguments.inputs for label in dims.values()}
    bounds = {label: _default(label) for label in sorted(named)} | arguments.ranges
    exported, messages = trace(module, arguments, bounds)
    _check_free(exported, arguments.inputs)
    constraints = {
        symbol: ValueRanges(1 if found.lower == _ASSUMED else found.lower, found.upper)
        for symbol, found in exported.range_constraints.items()
    }

    def run(tensors: Sequence[torch.Tensor], calls: int = 1) -> list[torch.Tensor]:
        placed = [tensor.to(own.device) for own, tensor in zip(arguments.examples, tensors, strict=True)]
        args, kwargs = arguments.filled(placed)
        with restored(module), no_cache(module):
            return [_tensors(module(*args, **kwargs)) for _ in range(calls)][-1]

    return _converted(
        _Graph(
            exported,
            run=run,
            run_again=partial(run, calls=2),
            examples=arguments.examples,
            labels=[name for name, _, _ in arguments.inputs],
            sources=[name for name, _, _ in arguments.inputs],
            names=[dims for _, _, dims in arguments.inputs],
            bounds=bounds,
            constraints=constraints,
            unbounded=named - arguments.ranges.keys(),
            messages=messages,
        )
    )


def _check_autocast() -> None:
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        raise ProgramError("autocast is enabled, which an export does not record: deploy outside of torch.autocast")


def export_saved(path: Path, *, trusted: bool = False) -> Exported:
    """Export the program and the weights in a `.pt2` file written by `torch.export.save`.

    A file that is not `trusted` must contain only data, because PyTorch would run code in it; ProgramError names
    anything else. The first dynamic size at dimension 0 becomes "batch", any other "size_1", "size_2" and so on.
    """
    _check_autocast()
    with as_program_error(f"cannot open {path.name}"):
        if not trusted:
            check_saved(path)
        exported = torch.export.load(path)
        # Create the module before the conversion changes the graph. The guards become conditions of the program.
        module = exported.module(check_guards=False)
        if not trusted:
            guard_calls(module)
        sources = _sources(exported)
    for spec in exported.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT and not isinstance(spec.arg, TensorArgument):
            raise ProgramError(
                f"input {spec.arg.name!r} must be a tensor; wrap the model in a module that sets its other arguments"
            )
    known: dict[sympy.Expr, str] = {}
    names: list[dict[int, str]] = []
    for tensor in _input_values(exported):
        names.append({})
        for dim, size in enumerate(sizes_of(tensor)):
            if not isinstance(size, int):
                others = len({*known.values()} - {BATCH})
                new = BATCH if dim == 0 and BATCH not in known.values() else f"size_{others + 1}"
                names[-1][dim] = known.setdefault(size.node.expr, new)
    leaves = torch.utils._pytree.tree_leaves(exported.example_inputs) if exported.example_inputs else []

    def run(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        args, kwargs = torch.utils._pytree.tree_unflatten(list(tensors), exported.call_spec.in_spec)
        return _tensors(module(*args, **kwargs))

    return _converted(
        _Graph(
            exported,
            run=run,
            run_again=run,
            examples=[leaf for leaf in leaves if isinstance(leaf, torch.Tensor)],
            labels=[str(name) for name in exported.graph_signature.user_inputs],
            sources=sources,
            names=names,
            bounds={name: _default(name) for name in known.values()},
            constraints=dict(exported.range_constraints),
            unbounded={name for size, name in known.items() if not _range(size, exported.range_constraints)[1]},
            messages={},
        )
    )


class _Graph(NamedTuple):
    """An exported graph, its inputs and their sizes."""

    exported: ExportedProgram
    run: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
    """Runs the model with inputs and outputs in the program's order."""
    run_again: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
    """Returns the outputs of a repeated call; it is called after `run`, with the same inputs."""
    examples: list[torch.Tensor]
    """One example per input; empty if the export kept none."""
    labels: list[str]
    """The names of the inputs."""
    sources: list[str]
    """The names of the inputs in the guards of the export."""
    names: list[dict[int, str]]
    """The names of each input's dynamic sizes, by dimension."""
    bounds: SizeRanges
    """The widest allowed range of each size."""
    constraints: Constraints
    """The ranges that the export found for its symbols."""
    unbounded: set[str]
    """The sizes for which no maximum was given."""
    messages: CheckMessages


def _converted(graph: _Graph) -> Exported:
    tensors = _input_values(graph.exported)
    placed = [(name, at, dim) for at, dims in enumerate(graph.names) for dim, name in dims.items()]
    sized = [(name, sizes_of(tensors[at])[dim]) for name, at, dim in placed]
    meanings, ties = meanings_of([(name, size) for name, size in sized if isinstance(size, torch.SymInt)])
    ranges = dict(graph.bounds)
    for name, size in sized:
        assert isinstance(size, torch.SymInt)
        low, high = _range(size.node.expr, graph.constraints)
        ranges[name] = (max(low, ranges[name][0]), min(high or ranges[name][1], ranges[name][1]))
    shapes = [
        tuple(dims.get(dim, size) for dim, size in enumerate(Sizes(meanings, ranges, {}).shape(tensor)))
        for dims, tensor in zip(graph.names, tensors, strict=True)
    ]
    conditions = _conditions(graph, shapes, meanings, ties)
    ranges, checks = narrowed(ranges, conditions)
    example = _example(graph, ranges, conditions)
    converted = convert(graph.exported, graph.labels, shapes, Sizes(meanings, ranges, example), checks, graph.messages)
    program = _limited(converted.program, graph.unbounded - {BATCH})

    def within(ranges: Mapping[str, tuple[int, int]]) -> Exported:
        return _converted(graph._replace(bounds=dict(ranges), unbounded=set()))

    return Exported(program, converted.weights, Reference(graph.run, graph.examples, within, graph.run_again))


def _tensors(outputs: object) -> list[torch.Tensor]:
    """Return the tensors in the model's return value, in the order of a program's outputs."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(outputs) if leaf is not None]


def _conditions(
    graph: _Graph, shapes: Sequence[Sequence[int | str]], meanings: Mapping[sympy.Symbol, sympy.Expr], ties: list[Any]
) -> list[Condition]:
    """Return all conditions on the named sizes, those with an author's message first."""
    guards = getattr(graph.exported, "_guards_code", None)
    if guards is None:
        raise ProgramError(f"PyTorch {torch.__version__} does not report the assumptions of an export; 2.11 to 2.13 do")
    found = [each for tie in ties for each in conditions_in(tie)] + conditions_of(guards, graph.sources, shapes)
    for expression, message in graph.messages.items():
        if expression.free_symbols <= meanings.keys():
            found += conditions_in(expression.xreplace(dict(meanings)), message)
    return sorted(distinct(found), key=lambda each: each.author_message is None)


def _example(graph: _Graph, ranges: SizeRanges, conditions: Sequence[Condition]) -> dict[str, int]:
    """Return the sizes of `Program.example`: the examples' sizes, and the smallest batch if the conditions allow it."""
    seen = {
        name: own.shape[dim]
        for dims, own in zip(graph.names, graph.examples, strict=False)
        for dim, name in dims.items()
    }
    given = {name: min(max(seen.get(name, low), low), high) for name, (low, high) in ranges.items()}
    alone = {name: ranges[name][0] if name == BATCH else size for name, size in given.items()}
    return alone if is_satisfied(conditions, alone) else given


def _limited(program: Program, unbounded: set[str]) -> Program:
    """Lower the maxima that the author did not give, so that the memory of a run is bounded."""
    largest = {name: program.dimensions[name][1] for name in unbounded}
    least = {name: min(size, max(SMALLEST_LIMIT, program.example[name])) for name, size in largest.items()}
    while largest != least and peak_activation_bytes(program, largest) > MEMORY_BYTES:
        largest = {name: max(size // 2, least[name]) for name, size in largest.items()}
    dimensions = {name: (low, largest.get(name, high)) for name, (low, high) in program.dimensions.items()}
    return msgspec.structs.replace(program, dimensions=dimensions)


def _default(name: str) -> tuple[int, int]:
    return 1, LARGEST_BATCH if name == BATCH else LARGEST_SIZE


def _range(size: sympy.Expr, constraints: Constraints) -> tuple[int, int | None]:
    """Return the smallest and largest value of a size in the export; None if it has no largest."""
    found = bound_sympy(size, constraints)
    found = found & constraints.get(size, found)
    return max(1, int(found.lower)), int(found.upper) if found.upper.is_Integer else None


def _check_free(exported: ExportedProgram, inputs: Sequence[Input]) -> None:
    """Raise ProgramError if a size that should vary became fixed."""
    for tensor, (name, _, dims) in zip(_input_values(exported), inputs, strict=True):
        for dim, label in dims.items():
            size = sizes_of(tensor)[dim]
            low, high = (size, size) if isinstance(size, int) else _range(size.node.expr, exported.range_constraints)
            if low == high:
                raise ProgramError(
                    f"dimension {label!r} cannot vary freely: the model needs {label} = {low}"
                    f"{fixing_line(tensor, name, dim)}; to fix it to the example's size, leave it out of `dynamic` "
                    "(without `dynamic` the first dimensions vary: pass {} to fix all sizes), or change the model"
                )


def _sources(exported: ExportedProgram) -> list[str]:
    """Return the names of a saved export's inputs in its guards: the arguments' own names, of which the graph has only
    the lower case, each with the path to the tensor in the argument.
    """
    labels = [str(name) for name in exported.graph_signature.user_inputs]
    signature = exported.module_call_graph[0].signature
    names = signature.forward_arg_names if signature is not None else None
    args, kwargs = torch.utils._pytree.tree_unflatten(list(range(len(labels))), exported.call_spec.in_spec)
    if names is None or len(names) != len(args) + len(kwargs):
        return labels
    arguments = dict(zip(names, (*args, *kwargs.values()), strict=True))
    paths, _ = torch.utils._pytree.tree_flatten_with_path(arguments)
    return ["_".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path) for path, _ in paths]


def _input_values(exported: ExportedProgram) -> list[torch.Tensor]:
    """Return the symbolic tensors that stand for the inputs."""
    placeholders = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    values = [placeholders[name].meta["val"] for name in exported.graph_signature.user_inputs if isinstance(name, str)]
    return [value for value in values if isinstance(value, torch.Tensor)]

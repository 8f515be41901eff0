"""The definition of a pipeline, and its validation.

A pipeline consists of functions that are called as one. Each stage runs a function. A source names the origin of a
tensor: `input:NAME` of the pipeline, or `STAGE:OUTPUT`. Stages that do not depend on each other run concurrently.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from overwinter.core.bounds import check_bounds
from overwinter.core.errors import CallerError, NotFoundError
from overwinter.core.function import TIME_BOUNDS
from overwinter.core.ids import NAME_PATTERN, FunctionName
from overwinter.core.tensor import PRINTABLE, TENSOR_NAME_MAX, Buffer, TensorSpec

INPUT = "input"
"""Stands for the pipeline itself in a source, so no stage may have this name."""
STAGES_MAX = 64
SOURCES_MAX = 1024
"""The most tensors that the stages of a pipeline take and the pipeline returns."""
SIZES_MAX = 8192
"""The most sizes in the shapes of these tensors. Each is compared when one of the functions changes."""
OUTPUTS_MAX = 2048
"""The most outputs of the functions of all stages together. Each is looked at when one of the functions changes."""

Name = Annotated[FunctionName, Meta(pattern=NAME_PATTERN)]
TensorName = Annotated[str, Meta(min_length=1, max_length=TENSOR_NAME_MAX, pattern=PRINTABLE)]
Source = Annotated[str, Meta(max_length=128 + 1 + TENSOR_NAME_MAX, pattern=PRINTABLE)]


class Stage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One function in a pipeline."""

    function: Name
    version: Annotated[int, Meta(ge=1)] | None = None
    """The version; None: the node chooses it at the start of the stage (core/versions.py)."""
    inputs: Annotated[dict[TensorName, Source], Meta(max_length=SOURCES_MAX)] = {}
    """The source of each input of the function."""


class Pipeline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Functions called as one, with one deadline."""

    name: Name
    inputs: Annotated[tuple[TensorName, ...], Meta(max_length=SOURCES_MAX)]
    stages: Annotated[
        dict[Annotated[str, Meta(pattern=NAME_PATTERN)], Stage], Meta(min_length=1, max_length=STAGES_MAX)
    ]
    outputs: Annotated[dict[TensorName, Source], Meta(min_length=1, max_length=SOURCES_MAX)]
    """The source of each output of the pipeline: an output of a stage."""
    slo_ms: float | None = None
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        check_bounds(self, TIME_BOUNDS)


class HasSignature(Protocol):
    """A version of a function, as far as its inputs and outputs matter here."""

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        """Its inputs, in order."""
        ...

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        """Its outputs, in order."""
        ...


class Signature(NamedTuple):
    """The inputs and outputs of a function or a pipeline."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


Find = Callable[[FunctionName, int | None], HasSignature]
"""Returns a version of a function, or with None its default version; raises NotFoundError, or ForbiddenError if the
pipeline may not call the function.
"""


def decode_pipeline(data: Buffer) -> Pipeline:
    """A pipeline from JSON, checked for consistency; CallerError names the first error."""
    try:
        pipeline = msgspec.json.decode(data, type=Pipeline)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CallerError(f"the pipeline is not valid: {error}") from None
    check_pipeline(pipeline)
    return pipeline


def parse_pipeline(text: str) -> Pipeline:
    """A pipeline from TOML, checked for consistency; CallerError names the first error."""
    try:
        pipeline = msgspec.convert(tomllib.loads(text), Pipeline)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, RecursionError) as error:
        raise CallerError(f"the pipeline is not valid: {error}") from None
    check_pipeline(pipeline)
    return pipeline


def check_pipeline(pipeline: Pipeline) -> None:
    """Raise CallerError unless every source names an existing input or stage, all inputs and stages are used, no output
    is an input, no input is named twice, no stage is called INPUT, no stages wait for each other, and there are at most
    SOURCES_MAX sources.
    """
    where = f"pipeline {pipeline.name!r}"
    _check_count(pipeline)
    if INPUT in pipeline.stages:
        raise CallerError(f"no stage of {where} may be called {INPUT!r}: in sources this means the pipeline itself")
    if len(set(pipeline.inputs)) < len(pipeline.inputs):
        raise CallerError(f"{where} names an input twice: {', '.join(pipeline.inputs)}")
    used = set()
    for name, stage in pipeline.stages.items():
        for wanted, source in stage.inputs.items():
            used.add(_checked(source, f"input {wanted!r} of stage {name!r}", pipeline))
    for name, source in pipeline.outputs.items():
        used.add(origin := _checked(source, f"output {name!r}", pipeline))
        if origin.startswith(f"{INPUT}:"):
            raise CallerError(f"output {name!r} of {where} is its own input {source!r}: name a stage's output")
    for unused in [*(f"{INPUT}:{name}" for name in pipeline.inputs), *pipeline.stages]:
        if unused not in used:
            raise CallerError(f"nothing in {where} uses {unused!r}: use it, or leave it out")
    try:
        TopologicalSorter({name: needs(stage) for name, stage in pipeline.stages.items()}).prepare()
    except CycleError as error:
        # graphlib lists the awaited stage first.
        raise CallerError(f"stages of {where} wait for each other: {' <- '.join(error.args[1])}") from None


def _check_count(pipeline: Pipeline) -> None:
    sources = source_count(pipeline)
    if sources > SOURCES_MAX:
        raise CallerError(f"pipeline {pipeline.name!r} has {sources} sources of tensors; {SOURCES_MAX} are allowed")


def source_count(pipeline: Pipeline) -> int:
    """The number of tensors that the stages take and the pipeline returns."""
    return len(pipeline.outputs) + sum(len(stage.inputs) for stage in pipeline.stages.values())


def needs(stage: Stage) -> set[str]:
    """The stages whose outputs the stage uses."""
    return {origin for origin, _, _ in (source.partition(":") for source in stage.inputs.values())} - {INPUT}


def signature(pipeline: Pipeline, find: Find) -> Signature:
    """The inputs and outputs of the pipeline, from its functions as `find` returns them.

    A dynamic size is named `STAGE.SIZE`: equal names in one stage are equal sizes. Raises what `find` raises, and
    CallerError for unknown or missing tensors, for too many, and where tensors do not fit: each source must have the
    datatype and the rank of its target, and the same size where both are fixed. Bounded work, at most a few
    milliseconds.
    """
    functions = {name: _found(pipeline, name, find) for name in pipeline.stages}
    outputs = sum(len(function.outputs) for function in functions.values())
    if outputs > OUTPUTS_MAX:
        raise CallerError(
            f"the functions of pipeline {pipeline.name!r} return {outputs} tensors; {OUTPUTS_MAX} are allowed"
        )
    returned = {name: {spec.name: spec for spec in function.outputs} for name, function in functions.items()}
    given: dict[str, _Given] = {}
    sizes = 0
    for name, stage in pipeline.stages.items():
        message = f"stage {name!r} of pipeline {pipeline.name!r}"
        wanted = {spec.name: spec for spec in functions[name].inputs}
        for unknown in sorted(stage.inputs.keys() - wanted):
            known = ", ".join(map(repr, wanted)) or "none"
            raise CallerError(
                f"{message}: function {stage.function!r} has no input {unknown!r}; its inputs are {known}"
            )
        for tensor, spec in wanted.items():
            source = stage.inputs.get(tensor)
            if source is None:
                raise CallerError(f"{message} has no source for input {tensor!r} of {stage.function!r}")
            sizes += len(spec.shape)
            if sizes > SIZES_MAX:
                raise _too_many_sizes(pipeline)
            if source not in given:
                is_input = source.startswith(f"{INPUT}:")
                given[source] = _Given(name, spec) if is_input else _returned(returned, source, message)
            given[source] = _joined(given[source], spec, source, message)
    where = f"pipeline {pipeline.name!r}"
    results = {
        name: given.get(source) or _returned(returned, source, where) for name, source in pipeline.outputs.items()
    }
    if sizes + sum(len(result.spec.shape) for result in results.values()) > SIZES_MAX:
        raise _too_many_sizes(pipeline)
    return Signature(
        tuple(_called(name, given[f"{INPUT}:{name}"]) for name in pipeline.inputs),
        tuple(_called(name, result) for name, result in results.items()),
    )


def _too_many_sizes(pipeline: Pipeline) -> CallerError:
    return CallerError(
        f"the shapes of the tensors that the stages of pipeline {pipeline.name!r} take and that it returns have more "
        f"than {SIZES_MAX} sizes: give it fewer tensors, or tensors of fewer dimensions"
    )


def _checked(source: str, user: str, pipeline: Pipeline) -> str:
    """The origin that this source uses: `input:NAME`, or a stage."""
    origin, mark, name = source.partition(":")
    message = f"{user} of pipeline {pipeline.name!r} comes from {source!r}"
    if not (origin and mark and name):
        raise CallerError(f'{message}, which is not a source: write "{INPUT}:NAME" or "STAGE:OUTPUT"')
    if origin == INPUT:
        if name not in pipeline.inputs:
            raise CallerError(f"{message}; the pipeline's inputs are {', '.join(pipeline.inputs) or 'none'}")
        return source
    if origin not in pipeline.stages:
        raise CallerError(f"{message}; the stages are {', '.join(pipeline.stages)}")
    return origin


def _found(pipeline: Pipeline, name: str, find: Find) -> HasSignature:
    stage = pipeline.stages[name]
    try:
        return find(stage.function, stage.version)
    except NotFoundError as error:
        raise NotFoundError(f"stage {name!r} of pipeline {pipeline.name!r}: {error}") from error


class _Given(NamedTuple):
    """A tensor from a source, and the stage whose name its dynamic sizes get."""

    stage: str
    spec: TensorSpec


def _returned(outputs: Mapping[str, Mapping[str, TensorSpec]], source: str, message: str) -> _Given:
    """Return the output that a source names, from the outputs of the functions by stage."""
    stage, _, output = source.partition(":")
    spec = outputs[stage].get(output)
    if spec is None:
        known = ", ".join(map(repr, outputs[stage]))
        raise CallerError(f"{message} takes {source!r}, and stage {stage!r} has no output {output!r}; it has {known}")
    return _Given(stage, spec)


def _joined(given: _Given, wanted: TensorSpec, source: str, message: str) -> _Given:
    """Return a source's tensor with the fixed sizes of an input that takes it; raise CallerError if they conflict."""
    stage, spec = given
    if (spec.datatype, spec.shape) == (wanted.datatype, wanted.shape):
        return given
    alike = spec.datatype == wanted.datatype and len(spec.shape) == len(wanted.shape)
    fixed = {at: size for at, size in enumerate(wanted.shape) if isinstance(size, int)} if alike else {}
    if not alike or any(isinstance(spec.shape[at], int) and spec.shape[at] != size for at, size in fixed.items()):
        raise CallerError(
            f"{message}: {source!r} is {spec.datatype} {list(spec.shape)}, and input {wanted.name!r} takes "
            f"{wanted.datatype} {list(wanted.shape)}"
        )
    if not fixed:
        return given
    shape = tuple(fixed.get(at, size) for at, size in enumerate(spec.shape))
    return _Given(stage, TensorSpec(spec.name, spec.datatype, shape))


def _called(name: str, given: _Given) -> TensorSpec:
    """Return the tensor under its name in the pipeline, with its dynamic sizes named after their stage."""
    stage, spec = given
    shape = tuple(size if isinstance(size, int) else f"{stage}.{size}" for size in spec.shape)
    return TensorSpec(name, spec.datatype, shape)

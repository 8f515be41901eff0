"""Runs a batch of requests: `preprocess`, the program, `postprocess`.

Requests of several functions of a family may share a run: see split.py. Several threads may call this concurrently.
Programs run in parallel, because they share only read-only weights. A handler is called by one thread at a time, as its
author will expect; calls for other requests may come between `preprocess` and `postprocess` of a request.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch

from overwinter.core.errors import ActivationsError, CallerError, HandlerError, OverwinterError
from overwinter.core.tensor import ANSWER_BYTES_MAX, BYTES, TensorSpec
from overwinter.model.structure import BATCH
from overwinter.worker.handler import Handler
from overwinter.worker.messages import Failure
from overwinter.worker.prepared import Compiled, Prepared
from overwinter.worker.split import FunctionBatch
from overwinter.worker.values import TORCH_DTYPES, EncodedTensor, NoRows, Value
from overwinter.worker.weights import differing_weights

NamedValues = dict[str, Value]
Outcome = dict[str, Value] | Failure
ProgramOutcome = dict[str, torch.Tensor] | Failure
P = ParamSpec("P")
R = TypeVar("R")

OPERATOR_ERRORS = (RuntimeError, ArithmeticError, IndexError, ValueError, TypeError)
"""The exceptions that operators raise for inputs on which they cannot run."""
ONE_REQUEST_ERRORS = {CallerError.__name__, HandlerError.__name__, ActivationsError.__name__}
"""The errors of a batch that a single one of its requests may have caused."""


class Runner:
    """Runs one function in this process: its family's program with its weights, and its handler if there is one."""

    def __init__(
        self,
        function: str,
        prepared: Prepared,
        weights: list[torch.Tensor],
        handler: Handler | None,
        outputs: tuple[TensorSpec, ...] = (),
        run: Compiled | None = None,
        may_share: Callable[[Sequence[Sequence[int]]], bool] | None = None,
    ) -> None:
        """`outputs`: those that a handler must return. `run` takes the place of the compiled program. With `run`, the
        function shares no runs with other functions, unless `may_share`, called with the shapes of the shared run's
        inputs, returns True.
        """
        self.may_share = may_share
        self.function = function
        self._handler_outputs = outputs
        self.program = prepared.program
        self.prepared = prepared
        self._run = run or prepared.run
        self.joins = run is None or may_share is not None
        """Whether requests of other functions may join its runs."""
        self.weights = weights
        self._handler = handler
        self._handling = threading.Lock()
        # With a handler, a caller chooses neither the names nor the datatypes of the program's inputs.
        self._fault: type[OverwinterError] = CallerError if handler is None else HandlerError
        self._declared = prepared.declared
        self._differing: WeakKeyDictionary[Runner, frozenset[int]] = WeakKeyDictionary()

    def warm_up(self) -> int:
        """Run the program once on zeros of the sizes of `example_sizes`, and return the bytes of its outputs. Raises
        HandlerError or the operator's own error if it fails.
        """
        run = self.prepared.unchecked()
        with torch.inference_mode():
            zeros = self.zeros()
            outputs = run(self.weights, zeros)
            self._check_outputs(zeros, outputs)
        return sum(output.nbytes for output in outputs)

    def example_sizes(self, batch: int | None = None) -> dict[str, int]:
        """Return the example's dynamic sizes, with this batch; by default the smallest, if the program accepts it with
        the other sizes, or else that of the example.
        """
        return {**self.program.example, BATCH: batch or self.program.example.get(BATCH, 1)}

    def zeros(self, batch: int | None = None) -> list[torch.Tensor]:
        """Return zeros of the sizes of `example_sizes`."""
        sizes = self.example_sizes(batch)
        return [
            torch.zeros(
                [size if isinstance(size, int) else sizes.get(size, 1) for size in spec.shape],
                dtype=TORCH_DTYPES[spec.datatype],
            )
            for spec in self.program.inputs
        ]

    def answer(self, requests: list[NamedValues]) -> list[Outcome]:
        """Return one outcome per request, in order. Requests whose inputs fit together run as one batch."""
        return answer([(self, request) for request in requests])

    def differing_weights(self, other: "Runner") -> frozenset[int]:
        """Return the indices of the weights in which another function of the family differs."""
        found = self._differing.get(other)
        if found is None:
            found = self._differing[other] = differing_weights(self.weights, other.weights)
        return found

    def preprocess(self, request: NamedValues, shares: bool = False) -> list[torch.Tensor]:
        """Return the program's inputs for a request, which the handler makes if there is one. `shares`: further
        requests are in the run. Raises CallerError or HandlerError.
        """
        values: Mapping[str, object] = request
        if self._handler is not None:
            with self._handling:
                values = self._handler.preprocess(request)
        tensors = []
        for spec in self.program.inputs:
            value = values.get(spec.name)
            if not isinstance(value, torch.Tensor):
                raise self._fault(f"the program of {self.function} needs a tensor {spec.name!r}, got {sorted(values)}")
            if value.dtype != TORCH_DTYPES[spec.datatype]:
                raise self._fault(f"input {spec.name!r} of {self.function} must be {spec.datatype}, not {value.dtype}")
            tensors.append(value)
        self._check_sizes(tensors)
        try:
            # An export assumes contiguous inputs, and leaves out the model's own contiguous().
            if shares and self._handler is not None and self._handler.makes_inputs:
                # The handler may return the same tensor for the next request, with other values.
                return [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
            return [tensor.contiguous() for tensor in tensors]
        except RuntimeError as error:
            raise CallerError(f"the inputs of {self.function} cannot be copied: {error}") from error

    def _check_sizes(self, tensors: list[torch.Tensor]) -> None:
        """Raise CallerError unless every size is within the range of the export: outside, outputs may be wrong. Sizes
        that a handler makes depend on the request.
        """
        sizes: dict[str, int] = {}
        for spec, tensor in zip(self.program.inputs, tensors, strict=True):
            if tensor.dim() != len(spec.shape):
                raise self._fault(
                    f"input {spec.name!r} of {self.function} has {tensor.dim()} dimensions; its shape must be "
                    f"{list(spec.shape)}"
                )
            for size, wanted in zip(tensor.shape, spec.shape, strict=True):
                low, high = (wanted, wanted) if isinstance(wanted, int) else self.program.dimensions[wanted]
                if not low <= size <= high:
                    bounds = str(low) if low == high else f"{low} to {high}"
                    name = wanted if isinstance(wanted, str) else "a fixed size"
                    raise CallerError(f"input {spec.name!r} of {self.function}: {name} must be {bounds}, not {size}")
                if isinstance(wanted, str) and sizes.setdefault(wanted, size) != size:
                    raise CallerError(f"inputs of {self.function} disagree on {wanted!r}: {sizes[wanted]} and {size}")

    def postprocess(
        self, outputs: dict[str, torch.Tensor], request: NamedValues, shares: bool = False
    ) -> dict[str, Value]:
        """Return the answer to a request from the program's outputs. `shares`: as for `preprocess`. Raises CallerError
        or HandlerError.
        """
        if self._handler is None:
            return dict(outputs)
        if shares and self._handler.makes_answers:
            # Rows that the program expanded have the same memory as those of other requests, and it may write to them.
            alike = {name for name, value in outputs.items() if value.dim() and not value.stride(0)}
            outputs = {name: self._copied(value) if name in alike else value for name, value in outputs.items()}
        with self._handling:
            values = self._handler.postprocess(outputs, request)
        for spec in self._handler_outputs:
            if spec.datatype == BYTES and len(spec.shape) == 2 and values.get(spec.name) == []:
                values[spec.name] = NoRows(width if isinstance(width := spec.shape[1], int) else 0)
        check_handler_outputs(values, self._handler_outputs)
        if shares and self._handler.makes_answers:
            values = {name: self._copy(value) for name, value in values.items()}
        return {spec.name: values[spec.name] for spec in self._handler_outputs} or values

    def _copy(self, value: Value) -> Value:
        # A larger one is refused when it is sent. It may be an expanded view, whose copy would take far more memory.
        return self._copied(value) if isinstance(value, torch.Tensor) and value.nbytes <= ANSWER_BYTES_MAX else value

    def _copied(self, output: torch.Tensor) -> torch.Tensor:
        try:
            return output.clone()
        except RuntimeError as error:
            raise HandlerError(f"an output of {self.function} cannot be copied: {error}") from error

    def run(self, requests: list[list[torch.Tensor]]) -> list[ProgramOutcome]:
        """Run requests that fit together. If the batch fails and one request may be the cause, run each separately, so
        that one cannot harm another.
        """
        if len(requests) == 1:
            return [_attempt(self._run_once, requests[0])]
        outputs = _attempt(self._run_joined, requests)
        if isinstance(outputs, Failure):
            if outputs.error not in ONE_REQUEST_ERRORS:
                return [outputs] * len(requests)
            return [_attempt(self._run_once, item) for item in requests]
        return _split_by_request(outputs, requests)

    def _run_joined(self, requests: list[list[torch.Tensor]]) -> dict[str, torch.Tensor]:
        try:
            inputs = _joined(requests)
        except OPERATOR_ERRORS as error:
            raise CallerError(f"{len(requests)} requests to {self.function} cannot be joined: {error}") from error
        return self._run_once(inputs)

    def _run_once(self, inputs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        try:
            outputs = self._run(self.weights, inputs)
        except OPERATOR_ERRORS as error:
            shapes = [list(tensor.shape) for tensor in inputs]
            raise CallerError(f"{self.function} cannot run inputs of shapes {shapes}: {error}") from error
        return self.named(inputs, outputs)

    def named(self, inputs: list[torch.Tensor], outputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the program's outputs by name; raise HandlerError if they differ from the declaration."""
        self._check_outputs(inputs, outputs)
        return {spec.name: value for spec, value in zip(self.program.outputs, outputs, strict=True)}

    def _check_outputs(self, inputs: list[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Raise HandlerError unless the program's outputs match its declaration."""
        fault = self._declared.fault(inputs, outputs)
        if fault:
            raise HandlerError(f"the program of {self.function} returns other outputs than it declares: {fault}")


class _Ready(NamedTuple):
    """A request that can run."""

    runner: Runner
    inputs: list[torch.Tensor]


def answer(requests: Sequence[tuple[Runner, NamedValues]]) -> list[Outcome]:
    """Return one outcome per request, in order, for functions of one family.

    Requests whose inputs fit together run as one batch, also those of different functions that can share a run.
    """
    shares = len(requests) > 1
    with torch.inference_mode():
        ready: list[_Ready | Failure] = []
        for runner, request in requests:
            inputs = _attempt(runner.preprocess, request, shares)
            ready.append(inputs if isinstance(inputs, Failure) else _Ready(runner, inputs))
        outputs: list[ProgramOutcome] = [
            item if isinstance(item, Failure) else Failure("WorkerError", "was not run") for item in ready
        ]
        for group in _groups(ready):
            together = [item for index in group if not isinstance(item := ready[index], Failure)]
            for index, outcome in zip(group, _run_group(together), strict=True):
                outputs[index] = outcome
        return [
            item if isinstance(item, Failure) else _attempt(runner.postprocess, item, request, shares)
            for item, (runner, request) in zip(outputs, requests, strict=True)
        ]


def _run_group(group: list[_Ready]) -> list[ProgramOutcome]:
    """Run requests that fit together, with those of each function consecutive."""
    sections = [list(each) for _, each in groupby(group, key=lambda item: item.runner)]
    if len(sections) > 1 and all(section[0].runner.joins for section in sections):
        together = _attempt(_run_together, sections)
        if together is not None and not isinstance(together, Failure):
            return together
    return [outcome for section in sections for outcome in section[0].runner.run([item.inputs for item in section])]


def _run_together(sections: list[list[_Ready]]) -> list[ProgramOutcome] | None:
    """Run the requests of several functions as one batch; None: they cannot share a run.

    After CallerError or HandlerError, separate runs show which request is at fault.
    """
    runners = [section[0].runner for section in sections]
    own = frozenset[int]().union(*(runners[0].differing_weights(other) for other in runners[1:]))
    split = runners[0].prepared.splits.of(own)
    if split is None:
        return None
    requests = [[item.inputs for item in section] for section in sections]
    may_share = runners[0].may_share
    try:
        batches = [FunctionBatch(runner.weights, _joined(each)) for runner, each in zip(runners, requests, strict=True)]
        if may_share is not None and not may_share(_joined_shapes(batches)):
            return None
        outputs_by_function = split.run(batches)
    except OPERATOR_ERRORS as error:
        raise CallerError(f"a run of {len(runners)} functions failed: {error}") from error
    if outputs_by_function is None:
        return None
    outputs: list[ProgramOutcome] = []
    for runner, batch, each, given in zip(runners, batches, requests, outputs_by_function, strict=True):
        outputs += _split_by_request(runner.named(batch.inputs, given), each)
    return outputs


def _joined(requests: Sequence[list[torch.Tensor]]) -> list[torch.Tensor]:
    return requests[0] if len(requests) == 1 else [torch.cat(parts) for parts in zip(*requests, strict=True)]


def _joined_shapes(batches: Sequence[FunctionBatch]) -> list[list[int]]:
    """Return the shapes of the inputs of these functions, joined."""
    rows = sum(batch.rows for batch in batches)
    return [[rows, *tensor.shape[1:]] for tensor in batches[0].inputs]


def _split_by_request(outputs: dict[str, torch.Tensor], requests: Sequence[list[torch.Tensor]]) -> list[ProgramOutcome]:
    """Return each request's rows of the outputs of a batch."""
    sizes = [inputs[0].shape[0] for inputs in requests]
    parts = {name: torch.split(value, sizes) for name, value in outputs.items()}
    return [{name: part[index] for name, part in parts.items()} for index in range(len(requests))]


def check_handler_outputs(values: Mapping[str, Value], declared: tuple[TensorSpec, ...]) -> None:
    """Raise HandlerError unless a handler returned what is declared: names, datatypes, ranks, fixed sizes."""
    if not declared:
        return
    names = [spec.name for spec in declared]
    if sorted(names) != sorted(values):
        raise HandlerError(
            f"postprocess returned {sorted(values)}; OUTPUTS, by default the program's outputs, has {sorted(names)}"
        )
    for spec in declared:
        meta = EncodedTensor(spec.name, values[spec.name]).meta
        fits = len(meta.shape) == len(spec.shape) and all(
            isinstance(wanted, str) or size == wanted for size, wanted in zip(meta.shape, spec.shape, strict=True)
        )
        if meta.datatype != spec.datatype or not fits:
            given = f"{meta.datatype} {list(meta.shape)}"
            raise HandlerError(
                f"postprocess returned {spec.name!r} as {given}; OUTPUTS, by default the program's outputs, has "
                f"{spec.datatype} {list(spec.shape)}"
            )


def _attempt(step: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | Failure:
    try:
        return step(*args, **kwargs)
    except OverwinterError as error:
        return Failure(type(error).__name__, str(error))


def _groups(ready: Sequence[_Ready | Failure]) -> list[list[int]]:
    """Return the indices of requests that run together: equal shapes except for the batch, up to the program's
    maximum.
    """
    if len(ready) == 1:
        return [] if isinstance(ready[0], Failure) else [[0]]
    groups: list[list[int]] = []
    for alike in _alike(ready):
        rows = most = 0
        for index in alike:
            item = ready[index]
            if isinstance(item, Failure):
                continue
            _, most = item.runner.program.dimensions.get(BATCH, (1, 1))
            count = item.inputs[0].shape[0] if item.runner.prepared.joinable else most
            if not rows or rows + count > most:
                groups.append([])
                rows = 0
            groups[-1].append(index)
            rows += count
    return groups


def _alike(ready: Sequence[_Ready | Failure]) -> list[list[int]]:
    """Return the indices of requests that may share a run: equal shapes except for the first dimension, the batch.

    Requests of one function are consecutive.
    """
    groups: dict[tuple[object, ...], dict[Runner, list[int]]] = {}
    for index, item in enumerate(ready):
        if isinstance(item, Failure):
            continue
        batches = {tensor.shape[0] if tensor.dim() else -1 for tensor in item.inputs}
        alone = len(batches) != 1 or -1 in batches or not item.runner.prepared.joinable
        key = (index,) if alone else tuple(tensor.shape[1:] for tensor in item.inputs)
        groups.setdefault(key, {}).setdefault(item.runner, []).append(index)
    return [[index for own in group.values() for index in own] for group in groups.values()]

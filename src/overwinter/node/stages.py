"""Carries out a pipeline's requests on the node.

`core/stepper.py` decides which stage runs when, and when the request is complete. Here each stage becomes a request to
its function, with the remaining time of the pipeline's deadline. Tensors between stages stay in this process.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import assert_never

from overwinter.core.actions import WARMEST_FIRST, Start
from overwinter.core.call import Call, Result
from overwinter.core.due_times import due_times
from overwinter.core.errors import NotFoundError, OverwinterError, WorkerError, error_named
from overwinter.core.ids import Seconds
from overwinter.core.pipeline import INPUT, Pipeline, Stage
from overwinter.core.stepper import (
    Answered,
    Cancel,
    Disconnected,
    Event,
    Fail,
    Failed,
    PipelineRequest,
    RunStage,
    Started,
    Succeed,
    step,
)
from overwinter.core.tensor import Tensor, check_inputs
from overwinter.node.registry import Registry

Infer = Callable[[Call], Awaitable[Result]]
"""Runs a function."""
CANCELLED_INPUTS = 16
"""The cancellation of a stage takes as long as the start of one with this many inputs."""


class PipelineRun:
    """One request to a pipeline: carries out the stepper's orders, and holds the tensors."""

    def __init__(
        self,
        pipeline: Pipeline,
        functions: Registry,
        infer: Infer,
        call: Call,
        deadline: Seconds,
        now: Callable[[], Seconds],
        turn: Callable[[int], Awaitable[None]],
    ) -> None:
        """`turn` waits until one more stage with this many inputs may start."""
        self._pipeline = pipeline
        self._functions = functions
        self._infer = infer
        self._request = PipelineRequest(pipeline.stages, deadline, _dues(pipeline, functions, now()))
        self._priority = call.priority
        self._reserve = call.reserve
        self._used = {source for stage in pipeline.stages.values() for source in stage.inputs.values()}
        self._used |= set(pipeline.outputs.values())
        self._now = now
        self._turn = turn
        self._tensors = {f"{INPUT}:{tensor.name}": tensor for tensor in call.inputs}
        self._reserved_bytes = _bytes(call.inputs)
        """The bytes that are reserved for the request: those of its tensors, and more for copies (`_copies`)."""
        self._copied_bytes = 0
        """The inputs of the stages in progress: each stage has a copy in the buffer of its worker or executor."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._over = asyncio.Event()
        self._failed: Fail | None = None
        self.start: Start = "warm"
        """The coldest start of the stages so far."""

    async def run(self) -> list[Tensor]:
        """Return the pipeline's outputs. Raises the error of the first failed stage, with the stage's name, or
        WorkerError if a stage did not return an output of the pipeline.
        """
        try:
            async with asyncio.TaskGroup() as group:
                self._step(Started(), group)
                try:
                    await self._over.wait()
                except asyncio.CancelledError:
                    # The clients of many requests with many stages may leave together.
                    await self._turn(CANCELLED_INPUTS * len(self._tasks))
                    self._step(Disconnected(), group)
                    raise
            if self._failed is not None:
                message = f"stage {self._failed.name!r} of pipeline {self._pipeline.name!r}: {self._failed.message}"
                raise error_named(self._failed.error)(message, self._failed.retry_after_s)
            return [self._tensor(name, source) for name, source in self._pipeline.outputs.items()]
        finally:
            # A cancelled task refers back to this object by the traceback of its error. The tensors would remain until
            # a garbage collection, after their memory is no longer reserved.
            self._tasks.clear()
            self._tensors.clear()

    def _step(self, event: Event, group: asyncio.TaskGroup) -> None:
        for order in step(self._request, event, self._now()):
            match order:
                case RunStage(name):
                    self._tasks[name] = group.create_task(self._run_stage(order, group))
                case Cancel(name):
                    self._tasks[name].cancel()
                case Succeed():
                    self._over.set()
                case Fail():
                    self._failed = order
                    self._over.set()
                case _:
                    assert_never(order)

    async def _run_stage(self, order: RunStage, group: asyncio.TaskGroup) -> None:
        """Run one stage and report its result."""
        event: Event
        try:
            reply = await self._answer(order)
            self._keep(order.name, reply.outputs)
        except OverwinterError as error:
            event = Failed(order.name, type(error).__name__, str(error), error.retry_after_s)
            # Its traceback refers to the stage's inputs, and to the error itself: they would remain until a garbage
            # collection.
            error.__traceback__ = None
        else:
            self.start = max(self.start, reply.start, key=WARMEST_FIRST.index)
            event = Answered(order.name)
        self._step(event, group)

    async def _answer(self, order: RunStage) -> Result:
        stage = order.stage
        await self._turn(len(stage.inputs))
        inputs = [self._tensor(name, source) for name, source in stage.inputs.items()]
        # Dynamic sizes are known only now.
        check_inputs(inputs, self._functions.view(stage.function, stage.version).inputs)
        left_s = order.deadline - self._now()
        call = Call(stage.function, stage.version, inputs, left_s, self._priority, order.due, self._reserve)
        with self._copies(_bytes(inputs)):
            reply = await self._infer(call)
        self._reserved_bytes += _bytes(reply.outputs)
        return reply

    @contextmanager
    def _copies(self, nbytes: int) -> Iterator[None]:
        """Let a stage with inputs of this many bytes run. Stages may take the same tensor many times, so more memory is
        reserved if the copies have more bytes than the request has reserved. Raises TooLargeError or OverloadedError.
        """
        lacking = self._copied_bytes + nbytes - self._reserved_bytes
        if lacking > 0 and self._reserve is not None:
            self._reserve(lacking)
            self._reserved_bytes += lacking
        self._copied_bytes += nbytes
        try:
            yield
        finally:
            self._copied_bytes -= nbytes

    def _keep(self, stage: str, outputs: Sequence[Tensor]) -> None:
        """Keep what is used of a stage's answer."""
        named = {f"{stage}:{tensor.name}": tensor for tensor in outputs}
        self._tensors |= {source: tensor for source, tensor in named.items() if source in self._used}

    def _tensor(self, name: str, source: str) -> Tensor:
        tensor = self._tensors.get(source)
        if tensor is None:
            raise WorkerError(f"pipeline {self._pipeline.name!r} needs {source!r}, which its stage did not return")
        return Tensor(name, tensor.datatype, tensor.shape, tensor.data)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(len(tensor.data) for tensor in tensors)


def _dues(pipeline: Pipeline, functions: Registry, begun: Seconds) -> dict[str, Seconds]:
    if pipeline.slo_ms is None:
        return {}
    slos = {name: _slo_ms(stage, functions) for name, stage in pipeline.stages.items()}
    return due_times(pipeline.stages, pipeline.slo_ms, slos, begun)


def _slo_ms(stage: Stage, functions: Registry) -> float | None:
    try:
        return functions.view(stage.function, stage.version).settings.slo_ms
    except NotFoundError:
        # The function does not exist now. If it is still missing when the stage starts, the request is refused.
        return None

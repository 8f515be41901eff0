"""How does a request go through the stages of a pipeline?

Each stage is a request of its own to its function, with what is left of the whole's time. Stages that do not wait for
each other run side by side; the first that fails ends the others. Tensors between stages stay in this process.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from overwinter.core.actions import Start
from overwinter.core.errors import DeadlineError, OverwinterError, WorkerError
from overwinter.core.ids import FunctionName, Seconds, TenantId
from overwinter.core.pipeline import INPUT, Pipeline, Stage, Typed, ready
from overwinter.core.tensor import Tensor, check_inputs
from overwinter.node.views import Availability, Reply

WARMEST_FIRST: tuple[Start, ...] = ("warm", "bound", "host", "disk")


class StageFunction(Typed, Protocol):
    """One version of a function, as far as a pipeline looks."""

    @property
    def tenant(self) -> TenantId:
        """Whose it is."""
        ...

    @property
    def state(self) -> Availability:
        """READY: a request would be answered."""
        ...

    @property
    def reason(self) -> str:
        """Why it is not READY; empty otherwise."""
        ...


class Functions(Protocol):
    """The functions that stages run: a node's."""

    def function(self, name: FunctionName, version: int | None, /) -> StageFunction:
        """One version, or the one that answers for the name; NotFoundError."""
        ...

    async def infer(
        self, name: FunctionName, version: int | None, inputs: list[Tensor], timeout_s: float | None, priority: int, /
    ) -> Reply:
        """Run a function on inputs that fit its specs."""
        ...


class Passage:
    """One request on its way through a pipeline."""

    def __init__(
        self,
        pipeline: Pipeline,
        functions: Functions,
        inputs: Sequence[Tensor],
        deadline: Seconds,
        priority: int,
        now: Callable[[], Seconds],
    ) -> None:
        self._pipeline = pipeline
        self._functions = functions
        self._deadline = deadline
        self._priority = priority
        self._now = now
        self._tensors = {f"{INPUT}:{tensor.name}": tensor for tensor in inputs}
        self._begun: set[str] = set()
        self._done: set[str] = set()
        self.start: Start = "warm"
        """Of the stages so far, where the weights of the coldest lay."""

    async def run(self) -> list[Tensor]:
        """The pipeline's outputs; raises the error of the first stage that fails, which says the stage's name."""
        first: OverwinterError | None = None
        try:
            async with asyncio.TaskGroup() as group:
                self._advance(group)
        except* OverwinterError as failed:
            first = _first(failed)
        if first is not None:
            raise first
        return [self._taken(name, source) for name, source in self._pipeline.outputs.items()]

    def _advance(self, group: asyncio.TaskGroup) -> None:
        for name in ready(self._pipeline.stages, self._done, self._begun):
            self._begun.add(name)
            group.create_task(self._pass(name, group))

    async def _pass(self, name: str, group: asyncio.TaskGroup) -> None:
        """Run one stage, then begin those that waited for it last."""
        try:
            reply = await self._answer(self._pipeline.stages[name])
        except OverwinterError as error:
            told = f"stage {name!r} of pipeline {self._pipeline.name!r}: {error}"
            raise type(error)(told, error.retry_after_s) from error
        self._tensors.update((f"{name}:{tensor.name}", tensor) for tensor in reply.outputs)
        self.start = max(self.start, reply.start, key=WARMEST_FIRST.index)
        self._done.add(name)
        self._advance(group)

    async def _answer(self, stage: Stage) -> Reply:
        left_s = self._deadline - self._now()
        if left_s <= 0:
            past = ", ".join(map(repr, sorted(self._done))) or "no stage"
            raise DeadlineError(f"the whole pipeline's time was up before this stage began, after {past}")
        inputs = [self._taken(name, source) for name, source in stage.inputs.items()]
        # Sizes that vary are known only now.
        check_inputs(inputs, self._functions.function(stage.function, stage.version).inputs)
        return await self._functions.infer(stage.function, stage.version, inputs, left_s, self._priority)

    def _taken(self, name: str, source: str) -> Tensor:
        tensor = self._tensors.get(source)
        if tensor is None:
            raise WorkerError(f"pipeline {self._pipeline.name!r} needs {source!r}, which its stage did not give")
        return Tensor(name, tensor.datatype, tensor.shape, tensor.data)


def _first(failed: BaseExceptionGroup[OverwinterError]) -> OverwinterError:
    [error, *_] = failed.exceptions
    return _first(error) if isinstance(error, BaseExceptionGroup) else error

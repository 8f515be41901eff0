"""Decides which stages of a pipeline run next, and when a request to it is complete.

The node and the simulator both use it: `step` takes an event of a request and returns orders, which the caller carries
out. A stage runs once, as soon as every stage whose outputs it needs has answered. The deadline of the pipeline is the
deadline of each stage. The first failure ends the request, and so does a caller that disconnects. Events of a request
that has ended change nothing.

There are no retries here: the scheduler retries a run that was ended by a crash. The stepper handles names and times
only; tensors stay with the caller.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import assert_never

import msgspec

from overwinter.core.errors import DeadlineError
from overwinter.core.ids import Seconds
from overwinter.core.pipeline import Stage, needs


class _Data(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of both tagged unions."""


# Events


class Started(_Data, frozen=True):
    """The request and its inputs have arrived."""


class Answered(_Data, frozen=True):
    """A stage returned its outputs."""

    stage: str


class Failed(_Data, frozen=True):
    """A stage was refused, or failed."""

    stage: str
    error: str
    """The name of the error's class in core/errors.py."""
    message: str = ""
    retry_after_s: float | None = None


class Disconnected(_Data, frozen=True):
    """The caller has disconnected."""


Event = Started | Answered | Failed | Disconnected


# Orders


class RunStage(_Data, frozen=True):
    """Run a stage's function on the tensors that its sources name; report Answered or Failed."""

    name: str
    stage: Stage
    deadline: Seconds
    due: Seconds | None = None
    """When the stage must be answered so that the pipeline meets its SLO; None: the pipeline has none."""


class Cancel(_Data, frozen=True):
    """Cancel this stage; its result need not be reported."""

    name: str


class Succeed(_Data, frozen=True):
    """Reply with the pipeline's outputs: all stages were answered."""


class Fail(_Data, frozen=True):
    """Reply with the error of a stage."""

    name: str
    error: str
    message: str
    retry_after_s: float | None = None


Order = RunStage | Cancel | Succeed | Fail


class PipelineRequest:
    """One request to a pipeline. Only `step` changes it."""

    __slots__ = ("answered", "deadline", "due_times", "running", "stages", "waiting")

    def __init__(
        self,
        stages: Mapping[str, Stage],
        deadline: Seconds,
        due_times: Mapping[str, Seconds] = MappingProxyType({}),
    ) -> None:
        """Create the request. `due_times`: when each stage is due, if the pipeline has an SLO (core/due_times.py)."""
        self.stages = stages
        self.deadline = deadline
        self.due_times = due_times
        self.waiting = {name: needs(stage) for name, stage in stages.items()}
        """The stages that were not started, each with the stages that it still waits for."""
        self.running: dict[str, None] = {}
        """The stages in progress, in the order in which they were started."""
        self.answered: set[str] = set()

    @property
    def over(self) -> bool:
        """Whether it has ended: it was answered, it failed, or its caller disconnected."""
        return not self.waiting and not self.running


def step(request: PipelineRequest, event: Event, now: Seconds) -> list[Order]:
    """Return the orders for an event. Events of a stage that does not run have no effect."""
    match event:
        case Started():
            return _run_ready(request, now)
        case Answered(stage):
            return _answered(request, stage, now) if stage in request.running else []
        case Failed(stage, error, message, retry_after_s):
            if stage not in request.running:
                return []
            del request.running[stage]
            return [*_give_up(request), Fail(stage, error, message, retry_after_s)]
        case Disconnected():
            return _give_up(request)
        case _:
            assert_never(event)


def _answered(request: PipelineRequest, stage: str, now: Seconds) -> list[Order]:
    del request.running[stage]
    request.answered.add(stage)
    for waits_for in request.waiting.values():
        waits_for.discard(stage)
    return [Succeed()] if request.over else _run_ready(request, now)


def _run_ready(request: PipelineRequest, now: Seconds) -> list[Order]:
    """Start all stages whose inputs are complete; past the deadline the first of them fails instead."""
    ready = [name for name, waits_for in request.waiting.items() if not waits_for]
    if ready and now >= request.deadline:
        past = ", ".join(map(repr, sorted(request.answered))) or "no stage"
        message = f"the pipeline timed out before this stage began, after {past}"
        return [*_give_up(request), Fail(ready[0], DeadlineError.__name__, message)]
    for name in ready:
        del request.waiting[name]
        request.running[name] = None
    return [RunStage(name, request.stages[name], request.deadline, request.due_times.get(name)) for name in ready]


def _give_up(request: PipelineRequest) -> list[Order]:
    """Start no more stages, and cancel the running ones."""
    orders: list[Order] = [Cancel(name) for name in request.running]
    request.waiting.clear()
    request.running.clear()
    return orders

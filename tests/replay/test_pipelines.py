"""A pipeline on a node and in the simulator: the same events lead to the same calls, cancellations and ends."""

import asyncio
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from overwinter.core.call import Call, Result
from overwinter.core.due_times import due_times
from overwinter.core.errors import DeadlineError, OverloadedError, OverwinterError, WorkerError
from overwinter.core.events import Arrived
from overwinter.core.function import Settings
from overwinter.core.ids import FunctionName, RequestId, Seconds
from overwinter.core.pipeline import Pipeline, Stage
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
    step,
)
from overwinter.core.tensor import Tensor, TensorSpec
from overwinter.node.fair_queue import FairQueue
from overwinter.node.stages import PipelineRun
from overwinter.simulation.applications import Applications
from overwinter.simulation.scenario import Application
from overwinter.simulation.workloads import Poisson
from tests.core.graphs import graphs

BEGIN_S = 100.0
TIMEOUT_S = 8.0
ERRORS: dict[str, type[OverwinterError]] = {each.__name__: each for each in (OverloadedError, WorkerError)}
Log = list[tuple[object, ...]]
"""The orders: ("ask", function, version, deadline, due), ("cancel", function), ("end", error or "")."""
SLO_MS = 400.0
SLOS: dict[FunctionName, float | None] = {FunctionName(f"f{number}"): 50.0 + 10.0 * number for number in range(12)}


class Happening(NamedTuple):
    """The next event: after this time one of the stages in progress ends, with an error or successfully."""

    after_s: float
    which: int
    error: str


HAPPENINGS = st.lists(
    st.builds(
        Happening,
        st.sampled_from([0.0, 0.25, 0.5, 3.0]),
        st.integers(0, 11),
        st.sampled_from(["", "", "", "", *ERRORS]),
    ),
    max_size=12,
)


class Known(NamedTuple):
    """A function, as a stage sees it."""

    inputs: tuple[TensorSpec, ...]
    settings: Settings


class Functions:
    """The functions of a node, each of which answers when the test tells it to."""

    def __init__(self, pipeline: Pipeline, log: Log) -> None:
        self.now = BEGIN_S
        self.running: dict[str, asyncio.Future[Result]] = {}
        self._known = {
            stage.function: Known(
                tuple(TensorSpec(name, "INT8", (1,)) for name in stage.inputs), Settings(slo_ms=SLOS[stage.function])
            )
            for stage in pipeline.stages.values()
        }
        self._log = log

    def view(self, name, version):
        """Return the function, with which the tensors between stages are checked."""
        return self._known[name]

    async def infer(self, call: Call) -> Result:
        """Wait for the next event."""
        self._log.append(("ask", call.name, call.version, self.now + call.timeout_s, call.due))
        self.running[call.name] = asyncio.get_running_loop().create_future()
        try:
            return await self.running[call.name]
        except asyncio.CancelledError:
            self._log.append(("cancel", call.name))
            raise
        finally:
            del self.running[call.name]


async def settled() -> None:
    """Let everything continue that can."""
    for _ in range(10):
        await asyncio.sleep(0)


async def in_a_node(pipeline: Pipeline, happenings: Sequence[Happening], drops: bool) -> Log:
    log: Log = []
    functions = Functions(pipeline, log)
    deadline = Seconds(BEGIN_S + TIMEOUT_S)
    x = Tensor("x", "INT8", (1,), b"\0")
    pipeline = msgspec.structs.replace(pipeline, slo_ms=SLO_MS)
    now, starts = (lambda: Seconds(functions.now)), FairQueue()

    async def turn(inputs: int) -> None:
        await starts.turn("tests", 0)

    pipeline_run = PipelineRun(pipeline, functions, functions.infer, Call("p", None, [x]), deadline, now, turn)
    call = asyncio.ensure_future(pipeline_run.run())
    await settled()
    for after_s, which, error in happenings:
        if not functions.running:
            break
        functions.now += after_s
        name = sorted(functions.running)[which % len(functions.running)]
        if error:
            functions.running[name].set_exception(ERRORS[error]("said so"))
        else:
            functions.running[name].set_result(Result(name, 1, [Tensor("y", "INT8", (1,), b"\0")], "warm"))
        await settled()
    if drops:
        call.cancel()
    await settled()
    if call.done() and not call.cancelled():
        fault = call.exception()
        log.append(("end", "" if fault is None else type(fault).__name__))
    known = list(log)
    call.cancel()
    await asyncio.wait([call])
    return known


def in_a_simulation(pipeline: Pipeline, happenings: Sequence[Happening]) -> Log:
    log: Log = []
    application = Application(
        name="p", stages=pipeline.stages, timeout_s=TIMEOUT_S, workload=Poisson(rate=1.0), slo_ms=SLO_MS
    )
    applications = Applications([application], count(1), 0.0, SLOS)
    running: dict[str, RequestId] = {}

    def carried_out(events) -> None:
        for event in events:
            if isinstance(event, Arrived):
                running[event.name] = event.request
                log.append(("ask", event.name, event.version, event.deadline, event.due))
            else:
                [name] = [name for name, request in running.items() if request == event.request]
                del running[name]
                log.append(("cancel", name))

    now = BEGIN_S
    carried_out(applications.arrived(FunctionName("p"), Seconds(now)))
    for after_s, which, error in happenings:
        if not running:
            break
        now += after_s
        request = running.pop(sorted(running)[which % len(running)])
        if error:
            carried_out(applications.refused(request, error, Seconds(now)))
        else:
            carried_out(applications.answered(request, Seconds(now)))
    figures = applications.figures()["p"]
    log += [("end", name) for name in figures.refused] + [("end", "")] * figures.answered
    return log


def by_the_stepper(pipeline: Pipeline, happenings: Sequence[Happening], drops: bool) -> Log:
    log: Log = []
    slos = {name: SLOS[stage.function] for name, stage in pipeline.stages.items()}
    due = due_times(pipeline.stages, SLO_MS, slos, Seconds(BEGIN_S))
    request = PipelineRequest(pipeline.stages, Seconds(BEGIN_S + TIMEOUT_S), due)
    stages = {stage.function: name for name, stage in pipeline.stages.items()}
    functions = {name: function for function, name in stages.items()}

    def send(event: Event, now: float) -> None:
        for order in step(request, event, Seconds(now)):
            match order:
                case RunStage(_, stage, deadline, at):
                    log.append(("ask", stage.function, stage.version, deadline, at))
                case Cancel(name):
                    log.append(("cancel", functions[name]))
                case _:
                    log.append(("end", order.error if isinstance(order, Fail) else ""))

    now = BEGIN_S
    send(Started(), now)
    for after_s, which, error in happenings:
        if request.over:
            break
        now += after_s
        stage = stages[sorted(map(functions.__getitem__, request.running))[which % len(request.running)]]
        send(Failed(stage, error) if error else Answered(stage), now)
    if drops:
        send(Disconnected(), now)
    return log


@settings(max_examples=20)
@given(graphs(), HAPPENINGS)
def test_a_node_and_a_simulation_give_the_same_orders(pipeline: Pipeline, happenings: list[Happening]) -> None:
    live = asyncio.run(in_a_node(pipeline, happenings, drops=False))
    assert live == in_a_simulation(pipeline, happenings) == by_the_stepper(pipeline, happenings, drops=False)


@settings(max_examples=20)
@given(graphs(), HAPPENINGS)
def test_a_node_cancels_the_stages_that_the_stepper_cancels_when_its_caller_disconnects(
    pipeline: Pipeline, happenings: list[Happening]
) -> None:
    live = asyncio.run(in_a_node(pipeline, happenings, drops=True))
    assert live == by_the_stepper(pipeline, happenings, drops=True)


def test_at_the_deadline_no_further_stage_is_called_on_a_node_or_in_the_simulation() -> None:
    stages = {
        "s0": Stage(function="f0", inputs={"x": "input:x"}),
        "s1": Stage(function="f1", inputs={"x": "s0:y"}),
    }
    pipeline = Pipeline(name="p", inputs=("x",), stages=stages, outputs={"y": "s1:y"})
    happenings = [Happening(TIMEOUT_S, 0, "")]
    end = ("end", DeadlineError.__name__)
    assert asyncio.run(in_a_node(pipeline, happenings, drops=False))[1:] == [end]
    assert in_a_simulation(pipeline, happenings)[1:] == [end]

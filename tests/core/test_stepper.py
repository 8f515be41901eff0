"""The stepper of pipelines with any order of results, failures and cancellations: each request ends exactly once."""

from random import Random

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from overwinter.core.ids import Seconds
from overwinter.core.pipeline import Pipeline, Stage, needs
from overwinter.core.stepper import (
    Answered,
    Cancel,
    Disconnected,
    Event,
    Fail,
    Failed,
    Order,
    PipelineRequest,
    RunStage,
    Started,
    Succeed,
    step,
)
from tests.core.graphs import graphs

DEADLINE = Seconds(40.0)
FORK = {
    "first": Stage(function="double", inputs={"x": "input:x"}),
    "left": Stage(function="triple", inputs={"x": "first:y"}),
    "right": Stage(function="negate", inputs={"x": "first:y"}),
    "join": Stage(function="add", inputs={"x": "left:y", "z": "right:y"}),
}


def asks(*names: str) -> list[Order]:
    return [RunStage(name, FORK[name], DEADLINE) for name in names]


class Watched:
    """A request whose orders (what `step` returns) are checked."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.stages = pipeline.stages
        self.request = PipelineRequest(pipeline.stages, DEADLINE)
        self.asked: list[str] = []
        self.running: list[str] = []
        self.answered: set[str] = set()
        self.ends: list[Order | Disconnected] = []

    def tell(self, event: Event, now: float) -> None:
        """Pass an event on, and check the orders and the state of the request. An event of a stage that is not in
        progress, or of a request that has ended, changes nothing.
        """
        ends_stage = isinstance(event, Answered | Failed)
        known = event.stage in self.running if ends_stage else not self.ends
        if ends_stage and known:
            self.running.remove(event.stage)
        if isinstance(event, Answered) and known:
            self.answered.add(event.stage)
        if isinstance(event, Disconnected) and known:
            self.ends.append(event)
        orders = step(self.request, event, Seconds(now))
        assert known or orders == []
        for order in orders:
            self._check_and_apply(order, event, now)
        assert self.request.over == bool(self.ends)
        assert list(self.request.running) == self.running
        if self.ends:
            assert self.running == []

    def _check_and_apply(self, order: Order, event: Event, now: float) -> None:
        match order:
            case RunStage(name, stage, deadline):
                assert not self.ends
                assert name not in self.asked
                assert needs(self.stages[name]) <= self.answered
                assert (stage, deadline) == (self.stages[name], DEADLINE)
                assert now < DEADLINE
                self.asked.append(name)
                self.running.append(name)
            case Cancel(name):
                self.running.remove(name)
            case Succeed():
                assert self.answered == set(self.stages)
                self._end(order)
            case Fail(name, error):
                if isinstance(event, Failed):
                    assert order == Fail(event.stage, event.error, event.message, event.retry_after_s)
                else:
                    assert (error, name in self.asked, now >= DEADLINE) == ("DeadlineError", False, True)
                self._end(order)

    def _end(self, order: Order) -> None:
        assert self.ends == []
        self.ends.append(order)


def anything(stages: list[str], chance: Random) -> Event:
    """Return any event, possible or not."""
    stage = chance.choice(stages)
    return chance.choice((Answered(stage), Failed(stage, "OverloadedError", "full", 7.0), Disconnected(), Started()))


@given(graphs(), st.randoms(use_true_random=False), st.integers(0, 20), st.booleans())
def test_a_request_ends_once_for_any_results_in_any_order(
    pipeline: Pipeline, chance: Random, count: int, started: bool
) -> None:
    watched, now = Watched(pipeline), 0.0
    if started:
        watched.tell(Started(), now)
    for _ in range(count):
        now += chance.choice((0.0, 1.0, 5.0))
        if watched.running and chance.random() < 0.75:
            watched.tell(Answered(chance.choice(watched.running)), now)
        else:
            watched.tell(anything(list(pipeline.stages), chance), now)
    watched.tell(Started(), now)
    while watched.running:
        watched.tell(Answered(chance.choice(watched.running)), now)
    assert len(watched.ends) == 1
    for event in (Started(), Disconnected(), *map(Answered, pipeline.stages)):
        watched.tell(event, now)
    assert len(watched.ends) == 1


@given(graphs(), st.randoms(use_true_random=False))
def test_every_stage_is_run_once_after_all_stages_that_it_needs(pipeline: Pipeline, chance: Random) -> None:
    watched = Watched(pipeline)
    watched.tell(Started(), 0.0)
    while watched.running:
        ready = {name for name, stage in pipeline.stages.items() if needs(stage) <= watched.answered}
        assert ready == set(watched.asked)
        watched.tell(Answered(chance.choice(watched.running)), 0.0)
    assert sorted(watched.asked) == sorted(pipeline.stages)
    assert watched.ends == [Succeed()]


def test_independent_stages_run_together_and_a_stage_that_takes_both_runs_after_both() -> None:
    request = PipelineRequest(FORK, DEADLINE)
    assert step(request, Started(), Seconds(0.0)) == asks("first")
    assert step(request, Answered("first"), Seconds(1.0)) == asks("left", "right")
    assert step(request, Answered("right"), Seconds(2.0)) == []
    assert step(request, Answered("left"), Seconds(3.0)) == asks("join")
    assert step(request, Answered("join"), Seconds(99.0)) == [Succeed()]


def test_the_first_failure_cancels_the_other_stages_and_fails_the_request() -> None:
    request = PipelineRequest(FORK, DEADLINE)
    for event in (Started(), Answered("first")):
        step(request, event, Seconds(0.0))
    result = step(request, Failed("right", "OverloadedError", "full", 7.0), Seconds(1.0))
    assert result == [Cancel("left"), Fail("right", "OverloadedError", "full", 7.0)]
    assert step(request, Failed("left", "WorkerError"), Seconds(1.0)) == []


def test_a_disconnect_of_the_caller_cancels_all_stages() -> None:
    request = PipelineRequest(FORK, DEADLINE)
    for event in (Started(), Answered("first")):
        step(request, event, Seconds(0.0))
    assert step(request, Disconnected(), Seconds(1.0)) == [Cancel("left"), Cancel("right")]
    assert step(request, Answered("left"), Seconds(1.0)) == []


def test_no_stage_is_started_when_the_time_is_up() -> None:
    request = PipelineRequest(FORK, DEADLINE)
    step(request, Started(), Seconds(0.0))
    [fail] = step(request, Answered("first"), DEADLINE)
    assert (fail.name, fail.error) == ("left", "DeadlineError")
    assert "'first'" in fail.message
    assert request.over


def test_orders_are_unchanged_by_encoding_and_decoding() -> None:
    result = [
        RunStage("left", FORK["left"], DEADLINE),
        Cancel("left"),
        Succeed(),
        Fail("left", "WorkerError", "gone", 1.0),
    ]
    assert msgspec.json.decode(msgspec.json.encode(result), type=list[Order]) == result

"""A policy that fails on one function affects the service of that function only."""

import gc
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test

from overwinter.core.actions import Explanation, LoadFinished, Refuse, Reply
from overwinter.core.events import Deployed, LoadAsked, MemoryPressure, Profiled, RateForecast, WorkerReady
from overwinter.core.policies import POLICIES
from overwinter.core.profile import Point, Profile
from overwinter.scheduler import latency, wants
from overwinter.scheduler.invariants import check
from overwinter.scheduler.lifecycles import worker_state
from overwinter.scheduler.policies import batching, eviction, keepalive, worker_eviction
from overwinter.scheduler.policies.scaling.names import SCALERS
from overwinter.scheduler.policies.scaling.predictors import PREDICTORS
from overwinter.scheduler.scheduler import Scheduler
from tests.scheduler.test_properties import AnyOrder
from tests.scheduler.world import World, spec

SICK = 0.123456
SICK_BYTES = 6
"""The size by which a policy recognizes the function on which it fails."""
POINTS = tuple(Point(1, 5, batch, 1, 0.1 * batch) for batch in (1, 2))
SOUND = Profile(weight_bytes=12, macs=100, points=POINTS)
ILL = Profile(weight_bytes=12, macs=100, points=(Point(1, SICK_BYTES, 1, 1, SICK), Point(1, SICK_BYTES, 2, 1, 0.2)))


class Failing:
    """Makes policies raise at those of their calls whose number is a multiple of `every`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.calls = 0
        self.every = 1

    def wrap(self, policy: Callable, about: Callable[..., bool]) -> Callable:
        def failing(*args):
            self.calls += 1
            if about(*args) and self.calls % self.every == 0:
                raise ZeroDivisionError("float division by zero")
            return policy(*args)

        return failing

    def in_everything(self) -> None:
        """Fail in policies that are called for functions of ILL, and in evictions from the host store for any."""
        patch = self.monkeypatch
        for name, scaler in SCALERS.items():
            patch.setitem(_behind(SCALERS), name, self.wrap(scaler, lambda given: SICK in latencies(given.points)))
        for name, predictor in PREDICTORS.items():
            # A predictor does not see whose rates these are: its calls are counted, and none fails.
            patch.setitem(_behind(PREDICTORS), name, self.wrap(predictor, lambda rates: False))
        for name, rule in batching.RULES.items():
            patch.setitem(batching.RULES, name, self.wrap(rule, lambda _, workers: is_ill(workers)))
        for name, rule in eviction.RULES.items():
            patch.setitem(_behind(eviction.RULES), name, self.wrap(rule, lambda candidate: True))
        for name, rule in worker_eviction.RULES.items():
            patch.setitem(_behind(worker_eviction.RULES), name, self.wrap(rule, lambda idle: idle.nbytes == SICK_BYTES))
        patch.setattr(latency, "between", self.wrap(latency.between, lambda known, at: SICK in dict(known).values()))
        patch.setattr(keepalive, "by_history", self.wrap(keepalive.by_history, lambda _, f, p: f.spec.profile is ILL))
        patch.setattr(wants, "needs_worker", self.wrap(wants.needs_worker, lambda _, f: f.spec.profile is ILL))


def _behind(mapping):
    """Return the dict behind a read-only view."""
    [behind] = [each for each in gc.get_referents(mapping) if isinstance(each, dict)]
    return behind


def latencies(points):
    return [point.latency_s for point in points]


def is_ill(workers):
    return any(SICK in latencies([worker.point]) for worker in workers)


@pytest.fixture
def failing(monkeypatch):
    return Failing(monkeypatch)


def ill_and_sound(**config) -> World:
    world = World(cores=2, **config)
    world.deploy(spec("ill", blobs=(("i", 5),), profile=ILL, slo_ms=500, max_batch=2))
    world.deploy(spec("sound", blobs=(("s", 5),), profile=SOUND, slo_ms=500, max_batch=2))
    return world


def test_a_function_on_which_a_policy_fails_is_quarantined_with_the_reason(failing):
    failing.in_everything()
    world = ill_and_sound()
    first, other = world.arrive("ill"), world.arrive("sound")
    world.settle()
    assert isinstance(world.answers[other], Reply)
    refused = world.answers[first]
    assert isinstance(refused, Refuse)
    assert refused.error == "QuarantineError"
    assert "ill@1" in refused.message
    assert "ZeroDivisionError" in refused.message
    assert [each.function for each in world.log if isinstance(each, Explanation) and each.what == "quarantine"] == [
        "ill@1"
    ]
    again = world.arrive("ill")
    assert world.answers[again].error == "QuarantineError"


def test_a_worker_may_be_ready_get_a_run_and_drain_in_one_event(failing):
    failing.in_everything()
    failing.every = 1000
    world = World(cores=2)
    world.deploy(spec("ill", profile=Profile(weight_bytes=12, macs=100, points=ILL.points[:1]), slo_ms=500))
    asked = world.arrive("ill")
    world.load_blocks()
    failing.every = 1
    world.ready()
    assert [worker_state(worker) for worker in world.state.workers.values()] == ["draining"]
    world.settle()
    assert isinstance(world.answers[asked], Reply)


def test_a_quarantined_function_is_served_again_after_a_load(monkeypatch):
    with monkeypatch.context() as patch:
        Failing(patch).in_everything()
        world = ill_and_sound()
        refused = world.arrive("ill")
        world.settle()
        assert world.answers[refused].error == "QuarantineError"
    world.send(LoadAsked("ill@1"))
    world.settle()
    mended = world.arrive("ill")
    world.settle()
    assert isinstance(world.answers[mended], Reply)


def test_a_trial_fails_if_a_policy_fails_on_it(failing, monkeypatch):
    preference = failing.wrap(latency._preference, lambda point: point.latency_s == SICK)
    monkeypatch.setattr(latency, "_preference", preference)
    world = World(cores=2)
    world.deploy(spec("ill", profile=ILL, slo_ms=500), on_trial=True)
    world.settle()
    results = [each for each in world.log if isinstance(each, LoadFinished)]
    assert [each.error for each in results] == ["QuarantineError"]
    assert world.state.functions == {}


def test_a_function_that_ended_the_node_is_not_served_when_the_node_starts_again():
    world = World(cores=2)
    world.deploy(spec("f"), quarantined="KeyError: 3")
    world.deploy(spec("g"))
    asked, other = world.arrive("f"), world.arrive("g")
    world.settle()
    assert (world.answers[asked].error, type(world.answers[other])) == ("QuarantineError", Reply)
    assert "KeyError: 3" in world.answers[asked].message
    world.send(LoadAsked("f@1"))
    world.settle()
    again = world.arrive("f")
    world.settle()
    assert isinstance(world.answers[again], Reply)


def test_an_slo_below_its_bound_causes_no_division_by_zero(monkeypatch):
    """Every reader of `slo_s` must accept 0."""
    monkeypatch.setattr("overwinter.core.function.check_bounds", lambda *_: None)
    world = World(cores=2)
    world.deploy(spec("tiny", profile=SOUND, slo_ms=5e-324, max_workers=4))
    world.deploy(spec("sound", blobs=(("s", 5),), profile=SOUND))
    for _ in range(3):
        world.arrive("tiny")
        world.ready() if world.starting else world.settle_processes()
    world.arrive("sound")
    world.calm()
    assert isinstance(world.answers[4], Reply)


class AnyFailure(AnyOrder):
    """Random events while policies fail on functions of ILL; when they fail no more, a new function is served."""

    failing: Failing
    profiles = (None, ILL, SOUND, ILL)

    @initialize(every=st.integers(1, 7))
    def choose(self, every):
        self.failing.every = every
        self.failing.calls = 0

    def teardown(self):
        world = getattr(self, "world", None)
        if world is None:
            return
        self.failing.every = 1 << 60
        for function in list(world.deployed):
            world.send(RateForecast(function, 0.0))
        world.calm()
        assert not world.open, "requests without an answer"
        world.send(MemoryPressure(1 << 40))
        world.calm()
        assert not world.alive, "unneeded workers"
        sound = spec("well", 1, (("shared", 5),), profile=SOUND)
        world.deploy(sound)
        asked = world.arrive("well")
        world.calm()
        assert isinstance(world.answers[asked], Reply)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_after_any_failures_of_policies_every_request_is_answered_and_a_new_function_is_served(policy, monkeypatch):
    failing = Failing(monkeypatch)
    failing.in_everything()
    machine = type("AnyFailure", (AnyFailure,), {"policy": policy, "failing": failing})
    run_state_machine_as_test(machine, settings=settings(max_examples=10, stateful_step_count=30, deadline=None))


def test_a_journal_with_failures_replays_to_the_same_actions(failing):
    failing.every = 5
    failing.in_everything()
    world = ill_and_sound(workers_max=2)
    events: list[tuple[float, object]] = []
    handle = world.scheduler.handle
    steps = []

    def recording(event, now):
        actions = handle(event, now)
        events.append((now, event))
        steps.append(list(actions))
        return actions

    world.scheduler.handle = recording
    for round_ in range(20):
        world.arrive("ill")
        world.arrive("sound")
        world.send(Profiled("ill@1", ILL))
        world.settle()
        if round_ % 5 == 4:
            world.send(LoadAsked("ill@1"))
            world.calm()
    assert any(isinstance(each, Explanation) and each.what == "quarantine" for step in steps for each in step)
    failing.calls = 0
    again = Scheduler(world.scheduler.cycle.config)
    again.handle(Deployed(spec("ill", blobs=(("i", 5),), profile=ILL, slo_ms=500, max_batch=2)), 0.0)
    again.handle(Deployed(spec("sound", blobs=(("s", 5),), profile=SOUND, slo_ms=500, max_batch=2)), 0.0)
    for (now, event), actions in zip(events, steps, strict=True):
        assert again.handle(event, now) == actions
        check(again.cycle)
    assert any(isinstance(event, WorkerReady) for _, event in events)

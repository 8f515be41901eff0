"""The number of workers of a function as its rate changes, and its explanation."""

import pytest

from overwinter.core.actions import Explanation, StartWorker
from overwinter.core.events import Alarm, MemoryPressure, Profiled, RateForecast, RunEnded
from overwinter.core.policies import POLICIES
from overwinter.core.profile import Configuration, Point, Profile
from overwinter.scheduler.latency import LatencyModel
from tests.scheduler.world import World, spec

PROFILE = Profile(
    weight_bytes=30,
    macs=10**9,
    points=tuple(Point(c, 100, b, 1, 0.1 * (0.4 + 0.6 * b) / c**0.8) for c in (1, 2) for b in (1, 2, 4)),
)


def made(policy="overwinter", profile=PROFILE, **settings) -> World:
    world = World(policy=policy, cores=8)
    world.deploy(spec(profile=profile, **{"slo_ms": 400, "max_workers": 8, "max_batch": 4, "threads": 2} | settings))
    return world


def play(world: World, rate: float, seconds: float) -> None:
    """Send requests evenly at this rate; every run, start and load ends immediately."""
    end, at = world.now + seconds, world.now
    while at < end:
        at += 1 / rate
        while world.alarm is not None and world.alarm <= at:
            world.ring()
            world.settle()
        world.now = at
        world.arrive()
        world.settle()


def workers(world: World) -> int:
    return sum(not worker.stopping for worker in world.state.workers.values())


@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"oracle"}))
def test_under_every_policy_the_number_of_workers_follows_the_rate_down_to_none(policy):
    world = made(policy, keep_alive_s=30.0)
    play(world, 0.5, 60)
    few = workers(world)
    play(world, 40, 40)
    many = workers(world)
    play(world, 0.5, 340)
    assert few <= 2
    assert many > few
    assert workers(world) <= few
    while world.alarm is not None:
        world.ring()
        world.settle()
    assert workers(world) == 0
    assert len(world.answers) == world.next_request


def test_a_forecast_of_a_higher_rate_starts_workers():
    world = made("oracle")
    play(world, 1, 25)
    before = workers(world)
    world.send(RateForecast("f@1", 80.0))
    play(world, 1, 10)
    assert workers(world) > before


def test_a_steady_rate_starts_no_further_worker_once_it_is_served():
    world = made()
    play(world, 30, 40)
    world.log.clear()
    play(world, 30, 80)
    assert not [action for action in world.log if isinstance(action, StartWorker)]


def test_if_no_configuration_meets_the_slo_requests_are_served_and_that_is_explained():
    world = made(slo_ms=5)
    play(world, 2, 30)
    assert all(type(answer).__name__ == "Reply" for answer in world.answers.values())
    [said] = [action for action in world.log if isinstance(action, Explanation) and action.what == "slo-infeasible"]
    assert "no configuration meets 5 ms" in said.why


def test_a_profile_that_comes_later_counts_from_then_on():
    world = made(profile=None)
    play(world, 2, 20)
    assert world.state.functions["f@1"].latency.points == ()
    world.send(Profiled("f@1", PROFILE))
    assert len(world.state.functions["f@1"].latency.points) == 6
    play(world, 60, 40)
    assert workers(world) > 1


def test_settings_bound_the_configurations():
    world = made(threads=1, max_batch=2)
    play(world, 60, 40)
    started = [action for action in world.log if isinstance(action, StartWorker)]
    assert {action.cores for action in started} == {1}
    assert {worker.point.batch for worker in world.state.workers.values()} <= {1, 2}


def test_workers_do_not_exceed_the_memory_they_may_have():
    world = World(cores=8, memory_bytes=250)
    for name in "fg":
        world.deploy(spec(name, profile=PROFILE, slo_ms=400, max_workers=8, keep_alive_s=100))
    for _ in range(20):
        for name in "fg":
            world.arrive(name)
        assert world.resources.memory.taken <= 250
    world.settle()
    assert len(world.answers) == 40


def test_the_default_configuration_meets_the_slo_where_one_can():
    slow = tuple(Point(c, 100, b, 1, 1.0 * b / c) for c in (1, 2, 4) for b in (1, 2, 4))
    profile = Profile(weight_bytes=30, macs=1, points=slow)

    def default(slo_ms):
        given = spec(profile=profile, slo_ms=slo_ms, max_batch=4, threads=4)
        return LatencyModel(given, POLICIES["overwinter"]).default_point.configuration

    assert default(600.0) == Configuration(2, 1, 1)
    assert default(1000.0) == Configuration(1, 1, 1)
    assert default(4000.0) == Configuration(1, 2, 1)
    assert default(None) == default(100.0) == Configuration(1, 4, 1)


def test_many_waiting_requests_start_several_workers_together():
    world = made()
    world.arrive()
    world.load_blocks()
    world.ready()
    # Late in a period the mean rate hardly shows a burst.
    world.now = 9.5
    for _ in range(40):
        world.arrive()
    assert len(world.starting) == 1
    world.ready()
    started = [world.state.workers[worker].point for worker in world.starting]
    assert len(started) > 2
    assert max(point.latency_s for point in started) <= 0.4


def test_a_worker_older_than_the_profile_counts_with_the_capacity_that_the_profile_gives():
    world = made(profile=None, max_batch=4, threads=1)
    play(world, 2, 12)
    world.send(Profiled("f@1", PROFILE))
    world.log.clear()
    play(world, 2, 30)
    assert not [action for action in world.log if isinstance(action, StartWorker)]


def test_one_run_that_hangs_costs_the_runs_beside_it_a_retry_and_no_refusal():
    world = World(cores=4)
    world.deploy(spec(concurrency=2, max_workers=1, timeout_s=10.0))
    world.arrive()
    world.load_blocks()
    world.ready()
    world.now = 9.0
    world.arrive()
    assert len(world.running) == 2
    world.ring()
    assert world.answers[1].error == "DeadlineError"
    world.ring()
    world.settle()
    world.ring()
    world.settle()
    assert type(world.answers[2]).__name__ == "Reply"


def test_a_function_that_no_longer_needs_memory_delays_no_other():
    points = {name: (Point(1, size, 1, 1, 0.1),) for name, size in (("big", 95), ("mid", 40), ("low", 90))}
    profiles = {name: Profile(weight_bytes=30, macs=1, points=known) for name, known in points.items()}
    world = World(cores=8, memory_bytes=100)
    for name in ("low", "big", "mid"):
        world.deploy(spec(name, profile=profiles[name], keep_alive_s=100.0, timeout_s=50.0))
    world.arrive("low")
    world.load_blocks()
    world.ready()
    world.arrive("big", deadline=1.0)
    world.load_blocks()
    world.arrive("mid")
    world.load_blocks()
    while world.now < 1.0:
        world.ring()
    assert world.answers[2].error == "DeadlineError"
    world.settle()
    assert type(world.answers[3]).__name__ == "Reply"


def test_a_retry_is_sent_immediately_to_an_idle_worker():
    world = World(cores=4)
    world.deploy(spec(max_workers=2))
    for _ in range(2):
        world.arrive()
    world.load_blocks()
    world.ready()
    world.ready()
    first, second = world.running.values()
    del world.running[second.run]
    world.send(RunEnded(second.worker, second.run))
    world.die(first.worker)
    assert [run.requests for run in world.running.values()] == [first.requests]


def test_a_function_that_once_lacked_memory_starts_in_its_usual_configuration():
    points = (Point(1, 10, 1, 1, 0.1), Point(1, 80, 4, 1, 0.3))
    world = World(cores=8, memory_bytes=100)
    settings = {"max_batch": 4, "keep_alive_s": 5.0, "timeout_s": 600.0}
    world.deploy(spec("f", profile=Profile(weight_bytes=30, macs=1, points=points), **settings))
    alone = Profile(weight_bytes=30, macs=1, points=(Point(1, 95, 1, 1, 0.1),))
    world.deploy(spec("other", profile=alone, **settings))

    def used() -> int:
        [worker] = [worker for worker in world.state.workers.values() if worker.function == "f@1"]
        return worker.point.memory_bytes

    world.arrive("other")
    world.settle_processes()
    world.arrive("f")
    world.finish()
    world.settle()
    while world.alive:
        world.ring()
        world.settle()
    world.arrive("f")
    world.settle()
    assert used() == 10


@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"oracle"}))
def test_a_check_of_the_rate_starts_no_worker_for_a_function_whose_workers_are_stopping(policy):
    world = made(policy)
    play(world, 40, 9.9)
    world.send(MemoryPressure(10**9))
    assert world.alive == world.stopping
    assert world.alive
    world.log.clear()
    world.now = 10.1
    world.send(Alarm())
    assert not [action for action in world.log if isinstance(action, StartWorker)]
    world.settle()
    assert not world.alive


def test_where_too_few_concurrent_runs_are_left_for_one_configuration_a_smaller_one_starts():
    points = (Point(1, 10, 1, 1, 0.1), Point(1, 11, 1, 4, 0.11))
    world = World(cores=4, runs_max=5)
    world.deploy(spec("busy", concurrency=2, has_handler=True))
    world.deploy(spec(profile=Profile(weight_bytes=30, macs=100, points=points), concurrency=4, max_workers=4))
    world.arrive("busy")
    world.settle_processes()
    for _ in range(12):
        world.arrive()
    world.settle_processes()
    assert [worker.point.concurrency for worker in world.state.workers.values()] == [2, 1, 1, 1]

"""When a batch is sent, to which worker, and what happens to late requests."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overwinter.core.actions import Refuse, Reply, Run
from overwinter.core.events import LoadAsked, MemoryPressure
from overwinter.core.profile import Point, Profile
from overwinter.scheduler.operation import Operation
from overwinter.scheduler.policies.batching import RULES, Send, Wait, Waiting, adaptive, greedy, timeout
from overwinter.scheduler.state import Worker
from tests.scheduler.world import World, spec


def worker(id_: int, batch: int, cores: int = 1, runs: int = 0) -> Worker:
    made = Worker(id_, "f@1", None, "t", Point(cores, 1, batch, 4, 0.1), 0.0, {})
    made.runs = {run: Operation(None, 0.0, 0.1, 0.4, 9.0) for run in range(runs)}
    return made


def waiting(count: int, waited_s: float, slo_s: float = 1.0, each_s: float = 0.1) -> Waiting:
    return Waiting(count=count, waited_s=waited_s, slo_s=slo_s, latency=lambda worker, n: each_s * n, keeps_up=False)


def test_adaptive_waits_as_long_as_one_more_request_would_still_be_in_time():
    step = adaptive(waiting(2, 0.1), [worker(1, 8)])
    assert isinstance(step, Wait)
    assert step.seconds == pytest.approx(1.0 * 2 / 3 - 0.2 - 0.1)
    step = adaptive(waiting(2, 0.1 + step.seconds), [worker(1, 8)])
    assert isinstance(step, Send)
    assert step.count == 2
    assert not step.late


def test_adaptive_takes_the_smallest_worker_whose_batch_holds_all_requests():
    small, middle, large = worker(1, 2), worker(2, 4), worker(3, 8)
    step = adaptive(waiting(3, 0.69), [large, small, middle])
    assert isinstance(step, Send)
    assert step.worker is middle


def test_a_full_batch_of_the_largest_worker_does_not_wait():
    step = adaptive(waiting(9, 0.0), [worker(1, 2), worker(2, 4)])
    assert isinstance(step, Send)
    assert (step.worker.id, step.count) == (2, 4)


@pytest.mark.parametrize(("waited_s", "used", "is_late"), [(0.1, 1, False), (0.5, 2, False), (0.9, 2, True)])
def test_a_full_batch_goes_to_the_smallest_worker_that_answers_it_in_time(waited_s, used, is_late):
    by_cores = msgspec.structs.replace(waiting(4, waited_s), latency=lambda worker, n: 0.2 * n / worker.point.cores)
    step = adaptive(by_cores, [worker(1, 4), worker(2, 4, cores=2)])
    assert isinstance(step, Send)
    assert (step.worker.id, step.count, step.late) == (used, 4, is_late)


def test_requests_that_no_worker_can_answer_in_time_are_sent_late_to_the_worker_with_most_cores():
    step = adaptive(waiting(3, 0.95), [worker(1, 4), worker(2, 4, cores=2)])
    assert isinstance(step, Send)
    assert step.late
    assert step.worker.id == 2


def test_timeout_sends_a_full_batch_or_any_batch_when_only_the_time_of_a_full_run_is_left():
    assert isinstance(timeout(waiting(4, 0.0), [worker(1, 4)]), Send)
    step = timeout(waiting(1, 0.1), [worker(1, 4)])
    assert isinstance(step, Wait)
    assert step.seconds == pytest.approx(1.0 - 0.4 - 0.1)
    assert isinstance(timeout(waiting(1, 0.6), [worker(1, 4)]), Send)


def test_the_default_marks_late_requests_even_when_it_does_not_wait():
    keeps_up = msgspec.structs.replace(waiting(1, 0.95), keeps_up=True)
    assert RULES["overwinter"](keeps_up, [worker(1, 4)]) == Send(worker(1, 4), 1, late=True)
    in_time = msgspec.structs.replace(waiting(1, 0.9), keeps_up=True)
    assert RULES["overwinter"](in_time, [worker(1, 4)]) == Send(worker(1, 4), 1)


def test_greedy_prefers_the_least_busy_worker_then_the_most_recently_used_one():
    first, second, busy = worker(1, 4), worker(2, 4), worker(3, 4, runs=1)
    second.since = 5.0
    step = greedy(waiting(2, 0.0), [busy, first, second])
    assert isinstance(step, Send)
    assert step.worker is second


@given(
    rule=st.sampled_from(sorted(RULES)),
    count=st.integers(1, 40),
    waited=st.floats(0, 3),
    slo=st.floats(0.001, 2),
    each=st.floats(1e-4, 1),
    batches=st.lists(st.integers(1, 16), min_size=1, max_size=4),
    keeps_up=st.booleans(),
)
def test_every_rule_sends_what_fits_or_waits_a_finite_time(rule, count, waited, slo, each, batches, keeps_up):
    workers = [worker(id_, batch) for id_, batch in enumerate(batches)]
    asked = Waiting(count=count, waited_s=waited, slo_s=slo, latency=lambda worker, n: each * n, keeps_up=keeps_up)
    step = RULES[rule](asked, workers)
    if isinstance(step, Send):
        assert 1 <= step.count <= min(count, step.worker.point.batch)
    else:
        assert 0 < step.seconds <= slo
        later = Waiting(
            count=count, waited_s=waited + step.seconds, slo_s=slo, latency=asked.latency, keeps_up=asked.keeps_up
        )
        assert isinstance(RULES[rule](later, workers), Send), "nothing came, and it still waits"


PROFILE = Profile(weight_bytes=30, macs=1, points=(Point(1, 1, 4, 1, 0.3),))


def test_a_waiting_batch_is_sent_by_its_timer_at_the_latest():
    world = World(policy="batch+")
    world.deploy(spec(profile=PROFILE, slo_ms=1000, max_batch=4, keep_alive_s=100))
    world.arrive()
    world.settle()
    assert not world.answers, "a single request waits for others"
    while not world.answers:
        world.ring()
        world.settle()
    assert isinstance(world.answers[1], Reply)
    assert world.now < 1.0


def late(world: World) -> list[str]:
    """Let three requests wait for a full batch until they are late, while a worker is idle; return the types of their
    answers.
    """
    world.now += 0.1
    world.send(LoadAsked("f@1"))
    world.settle_processes()
    for _ in range(3):
        world.arrive()
    world.now += 0.95
    world.ring()
    return [type(world.answers.get(id_)).__name__ for id_ in (1, 2, 3)]


def test_late_requests_are_served_unless_the_function_is_set_to_refuse_them():
    world = World(policy="batch+")
    world.deploy(spec(profile=PROFILE, slo_ms=1000, max_batch=4, late="serve"))
    assert late(world) == ["NoneType"] * 3
    world.settle()
    assert all(isinstance(world.answers[id_], Reply) for id_ in (1, 2, 3))
    world = World(policy="batch+")
    world.deploy(spec(profile=PROFILE, slo_ms=1000, max_batch=4, late="refuse"))
    assert late(world) == ["Refuse"] * 3
    refusal = world.answers[1]
    assert isinstance(refusal, Refuse)
    assert refusal.error == "OverloadedError"
    assert "1000 ms" in refusal.message


def test_a_stage_is_not_refused_before_its_pipeline_is_late():
    world = World(policy="batch+")
    world.deploy(spec(profile=PROFILE, slo_ms=1000, max_batch=4, late="refuse"))
    world.send(LoadAsked("f@1"))
    world.settle_processes()
    requests = [world.arrive(due=world.now + due_s) for due_s in (5.0, 0.5)]
    world.now += 0.95
    world.ring()
    world.settle()
    assert [type(world.answers[id_]) for id_ in requests] == [Reply, Refuse]


def test_requests_run_in_the_order_of_their_priorities_and_then_of_their_arrival():
    world = World(policy="fixed")
    world.deploy(spec())
    for priority in (0, 200, 3, 0, 1, 3):
        world.arrive(priority=priority)
    world.settle()
    assert [action.requests[0] for action in world.log if isinstance(action, Run)] == [5, 3, 6, 1, 4, 2]


def test_what_has_expired_is_refused_and_never_run():
    world = World()
    world.deploy(spec())
    world.arrive(deadline=1.0)
    world.arrive()
    world.now = 2.0
    world.load_blocks()
    world.ready()
    world.settle()
    assert world.answers[1].error == "DeadlineError"
    assert [action.requests for action in world.log if isinstance(action, Run)] == [(2,)]


def test_a_worker_gets_as_many_concurrent_runs_as_its_concurrency_and_no_more():
    world = World(cores=4)
    world.deploy(spec(concurrency=3, max_workers=1))
    for _ in range(5):
        world.arrive()
    world.load_blocks()
    world.ready()
    assert len(world.running) == 3
    world.finish()
    assert len(world.running) == 3
    world.die()
    assert not world.running
    world.ring()
    world.settle()
    assert all(isinstance(world.answers[id_], Reply) for id_ in range(1, 6))


def test_an_urgent_request_does_not_hide_how_long_those_behind_it_wait():
    world = World(policy="batch+")
    world.deploy(spec(profile=PROFILE, slo_ms=1000, max_batch=4, keep_alive_s=100.0))
    world.arrive()
    world.settle()
    came = world.now
    first = world.arrive()
    world.now = world.alarm - 0.01
    world.arrive(priority=1)
    while not world.running:
        world.ring()
    [run] = world.running.values()
    assert first in run.requests
    assert world.now - came <= 1.0 - PROFILE.latency_s(1, len(run.requests), 1)


def test_a_function_that_refuses_late_requests_answers_one_after_each_wake():
    """A wake takes longer than the SLO: refusing all requests that waited for it each time would answer none."""
    made = Profile(weight_bytes=30, macs=1, points=(Point(1, 5, 1, 1, 0.01),), wake_s=0.5)
    world = World(cores=2)
    world.deploy(spec(profile=made, slo_ms=100, late="refuse", keep_alive_s=1.0))
    for _ in range(3):
        requests = [world.arrive() for _ in range(3)]
        world.now += 0.5
        world.calm()
        answers = [type(world.answers[request]) for request in requests]
        assert answers == [Refuse, Refuse, Reply]
        assert world.answers[requests[0]].error == "OverloadedError"


@pytest.mark.parametrize(("load_s", "start_s", "bound"), [(0.0, 0.3, False), (0.3, 0.03, False), (0.3, 0.03, True)])
def test_a_function_that_starts_cold_each_time_answers_each_time(load_s, start_s, bound):
    """Its start or load takes longer than the SLO, although its expected wake takes 30 ms."""
    world = World(cores=2)
    for name in "fg":
        settings = {"keep_alive_s": 0.0} if name == "f" and not bound else {}
        made = spec(name, 1, (("shared", 10), (name, 1)), family="pair", slo_ms=200, late="refuse", **settings)
        world.deploy(made)
    for _ in range(4):
        if bound:
            world.arrive("g")
            world.settle()
        request = world.arrive()
        while world.loads:
            world.now += load_s
            world.load_blocks()
        if world.starting:
            world.now += start_s
            world.ready()
        world.settle()
        assert isinstance(world.answers[request], Reply)
        world.now += 100.0
        for _ in range(2 if load_s else 0):
            world.send(MemoryPressure(1 << 40))
            world.settle()
        while world.alarm is not None and world.alarm <= world.now:
            world.ring()
            world.settle()


def test_a_slow_run_does_not_make_a_function_that_refuses_late_requests_refuse_all_later_ones():
    """Only further runs can show that it is faster now."""
    world = World(cores=2)
    world.deploy(spec(slo_ms=100, late="refuse"))
    for run_s in (1.0, 2.0, *[0.05] * 20):
        request = world.arrive()
        world.settle_processes()
        world.now += run_s
        world.finish()
        assert isinstance(world.answers[request], Reply)
    assert world.state.functions["f@1"].latency.run_s < 0.1
    waits = [world.arrive() for _ in range(2)]
    world.now += 0.2
    world.settle()
    assert [type(world.answers[each]) for each in waits] == [Reply, Refuse]


def test_of_the_requests_that_no_run_can_answer_in_time_the_newest_of_the_first_level_is_answered():
    world = World(cores=2)
    world.deploy(spec(slo_ms=100, late="refuse"))
    world.arrive()
    world.settle_processes()
    first = world.arrive(priority=1)
    world.now += 1.0
    past_due, waits = first, []
    for priority in (1, 1, 200):
        waits.append(world.arrive(priority=priority))
        world.now += 0.01
    world.settle()
    assert isinstance(world.answers[past_due], Refuse)
    assert [type(world.answers[each]) for each in waits] == [Refuse, Reply, Refuse]

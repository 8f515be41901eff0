"""Idle workers are a cache: which stay, for how long, and which are stopped first."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overwinter.core.actions import Drop, StartWorker, StopWorker, Unbind
from overwinter.core.events import Alarm, MemoryMeasured, MemoryPressure
from overwinter.core.policies import POLICIES
from overwinter.core.profile import Point, Profile
from overwinter.scheduler import idle
from overwinter.scheduler.victims import KEPT_FOR_TENANT_S
from tests.scheduler.world import World, spec

MIB = 1 << 20
YEAR_S = 31_536_000.0


def made(name, mib=10, **settings):
    """Return a function that shares workers with no other and whose worker needs this much memory."""
    profile = Profile(weight_bytes=1, macs=1, points=(Point(1, mib * MIB, 1, 1, 0.1),))
    return spec(name, blobs=((f"of-{name}", 5),), profile=profile, **settings)


def node(*functions, **config) -> World:
    world = World(**{"memory_bytes": 30 * MIB, "cores": 4, **config})
    for function in functions:
        world.deploy(function)
    return world


def use(world, *names, after_s=1.0, start_s=0.03) -> None:
    """Send requests one after another, each after the answer to the previous one; a worker takes this long to start."""
    for name in names:
        world.now += after_s
        request = world.arrive(name)
        while world.stopping or world.loads:
            if world.stopping:
                world.die(min(world.stopping))
            else:
                world.load_blocks()
        world.now += start_s if world.starting else 0.0
        world.settle()
        assert type(world.answers[request]).__name__ == "Reply"


def awake(world) -> set[str]:
    return {worker.function.partition("@")[0] for worker in world.state.workers.values() if not worker.stopping}


def of(kind, actions) -> list:
    return [action for action in actions if isinstance(action, kind)]


@pytest.mark.parametrize("has_profile", [True, False])
def test_an_idle_worker_stays_while_there_is_room_and_sets_no_alarm(has_profile):
    world = node(made("f") if has_profile else spec("f"))
    use(world, "f")
    world.calm()
    assert world.alarm is None
    world.now += YEAR_S
    world.send(Alarm())
    assert awake(world) == {"f"}
    use(world, "f")
    assert len(of(StartWorker, world.log)) == 1


def test_a_keep_alive_of_the_function_is_an_upper_bound():
    world = node(made("f", keep_alive_s=20.0), made("g"))
    use(world, "f", "g")
    world.calm()
    assert awake(world) == {"g"}
    assert world.now < 120.0


@pytest.mark.parametrize("policy", ["fixed", "tetris", "infless", "mls"])
def test_a_policy_with_a_fixed_keep_alive_stops_the_workers_of_functions_that_set_none(policy):
    world = node(made("f"), made("g", keep_alive_s=5.0), policy=policy)
    use(world, "g", "f")
    began = world.now
    while "f" in awake(world):
        world.ring()
        world.settle()
        assert world.now - began < 5.0 + POLICIES[policy].period_s or "g" not in awake(world)
    assert world.now - began == pytest.approx(POLICIES[policy].keep_alive_s, abs=POLICIES[policy].period_s)


@pytest.mark.parametrize(("policy", "stays"), [("overwinter", "often"), ("lru", "seldom")])
def test_a_worker_used_often_stays_and_the_baseline_looks_at_the_last_use_alone(policy, stays):
    world = node(made("often"), made("seldom"), made("new"), policy=policy, memory_bytes=20 * MIB)
    use(world, "seldom", *["often"] * 20, "seldom", "new")
    assert awake(world) == {stays, "new"}


@pytest.mark.parametrize(
    ("sizes", "starts"), [((10, 15), (0.03, 0.03)), ((10, 10), (0.2, 0.01)), ((15, 10), (0.2, 0.03))]
)
def test_a_worker_that_is_large_or_quick_to_start_is_stopped_first(sizes, starts):
    world = node(made("one", sizes[0]), made("two", sizes[1]), made("new", 15))
    for name, start_s in zip(("one", "two"), starts, strict=True):
        use(world, name, start_s=start_s)
    use(world, *("one", "two") * 10, "new")
    assert awake(world) == {"one", "new"}


def test_a_wake_costs_what_it_was_measured_to_take():
    world = node(made("f"))
    world.now = 1.0
    world.arrive("f")
    world.load_blocks()
    world.now += 0.4
    world.ready()
    assert world.state.functions["f@1"].family.start_s == pytest.approx(0.4)


@pytest.mark.parametrize(("tenant", "after_s"), [("t", 0.0), ("u", KEPT_FOR_TENANT_S)])
def test_an_idle_worker_is_stopped_immediately_for_its_own_tenant_and_later_for_another(tenant, after_s):
    """In the second case the owner of the idle worker has no larger share than the tenant that needs memory."""
    busy = made("busy", timeout_s=1000.0, max_workers=2)
    world = node(busy, made("idle", tenant=tenant), memory_bytes=20 * MIB)
    use(world, "idle")
    idle_since = world.now
    for _ in range(3):
        world.arrive("busy")
        world.settle_processes()
    while len(world.running) < 2:
        world.ring()
        world.settle_processes()
    assert world.now - idle_since == pytest.approx(after_s)
    assert awake(world) == {"busy"}


def test_under_pressure_the_least_valuable_workers_are_stopped_and_no_more_than_needed():
    world = node(made("often"), made("seldom"), made("large", mib=80), memory_bytes=200 * MIB)
    use(world, "seldom", after_s=50.0)
    use(world, "large", *["often"] * 10)
    for nbytes, left in ((70 * MIB, {"often", "seldom"}), (MIB, {"often"}), (MIB, set())):
        world.send(MemoryPressure(nbytes))
        assert awake(world) == left
        world.settle()


def member(name):
    return spec(name, blobs=(("base", 10), (f"{name}-head", 4 * MIB)), family="one", max_workers=4)


def test_under_pressure_a_member_is_unbound_before_its_worker_stops():
    world = node(member("f"), member("g"), member("h"))
    use(world, "f", "g", "h", "h", "g", "h")
    assert world.bound == {1: {"f@1", "g@1", "h@1"}}
    world.now += idle.UNUSED_S - 3.5
    actions = world.send(MemoryPressure(2 * MIB))
    assert [each.function for each in of(Unbind, actions)] == ["f@1"]
    assert [each.addresses for each in of(Drop, actions)] == [("f-head",)]
    assert not of(StopWorker, actions)
    use(world, "f")
    assert len(of(StartWorker, world.log)) == 1
    world.now += idle.UNUSED_S
    actions = world.send(MemoryPressure(1 << 40))
    assert len(of(Unbind, actions)) == 2
    assert len(of(StopWorker, actions)) == 1
    world.settle()
    assert not world.state.workers


def test_memory_that_members_take_beyond_the_need_of_their_worker_is_freed_by_unbinding():
    world = node(spec("f", family="one"), spec("g", family="one"), memory_bytes=None)
    use(world, "f", "g")
    [worker] = world.state.workers.values()
    world.send(MemoryMeasured(((worker.id, worker.point.memory_bytes + 8 * MIB),)))
    world.now += idle.UNUSED_S - 1.0
    actions = world.send(MemoryPressure(4 * MIB))
    assert [each.function for each in of(Unbind, actions)] == ["f@1"]
    assert not of(StopWorker, actions)


NAMES = "abcdef"


@settings(max_examples=60)
@given(
    policy=st.sampled_from(["overwinter", "lru"]),
    sizes=st.lists(st.integers(5, 20), min_size=len(NAMES), max_size=len(NAMES)),
    uses=st.lists(st.tuples(st.sampled_from(NAMES), st.floats(0.01, 100.0)), max_size=60),
)
def test_only_the_least_valuable_workers_are_stopped_and_only_for_memory(policy, sizes, uses):
    world = node(*(made(name, mib) for name, mib in zip(NAMES, sizes, strict=True)), policy=policy)
    for name, after_s in uses:
        world.now += after_s
        if world.alarm is not None and world.alarm <= world.now:
            world.send(Alarm())
        before = [worker.id for worker in idle.in_order(world.state.tenants.values())]
        free = world.resources.memory.free
        seen = len(world.log)
        world.arrive(name)
        world.settle()
        stopped = [action.worker for action in of(StopWorker, world.log[seen:])]
        assert stopped == before[: len(stopped)]
        assert not stopped or free < sizes[NAMES.index(name)] * MIB
        assert world.resources.memory.taken <= 30 * MIB
    assert awake(world) >= ({uses[-1][0]} if uses else set())


def test_a_worker_counts_against_runs_max_with_its_concurrency():
    world = node(*(spec(name, concurrency=4) for name in "fgh"), memory_bytes=None, runs_max=9)
    use(world, "f", "g")
    assert world.resources.runs.taken == 8
    use(world, "h")
    assert len(awake(world)) == 2
    assert "h" in awake(world)

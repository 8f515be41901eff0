"""The order in which scarce resources are assigned: no function waits forever behind smaller or busier ones."""

import pytest

from overwinter.core.actions import LoadBlocks, StartWorker, StopWorker
from overwinter.core.events import MemoryMeasured, Profiled
from overwinter.core.policies import POLICIES
from overwinter.core.profile import Point, Profile
from overwinter.scheduler import families
from overwinter.scheduler.operations import UNKNOWN_S
from tests.scheduler.world import World, spec

STEPS = 200


def profile(memory_bytes: int) -> Profile:
    return Profile(weight_bytes=30, macs=1, points=(Point(1, memory_bytes, 1, 1, 0.1),))


def go_on(world: World, busy: tuple[str, ...], asked: int, steps: int = STEPS) -> int:
    """Send requests to the busy functions faster than they are run; return the steps until `asked` has its answer."""
    for step in range(steps):
        if asked in world.answers:
            return step
        world.now += 0.1
        for name in (*busy, *busy):
            world.arrive(name)
        if world.running:
            world.finish()
        world.settle_processes()
    return steps


def check_is_answered(world: World, name: str, beside: tuple[str, ...]) -> None:
    """One request is answered, although the other functions always have work."""
    for busy in beside:
        world.arrive(busy)
        world.settle_processes()
    asked = world.arrive(name)
    assert go_on(world, beside, asked) < STEPS
    assert type(world.answers[asked]).__name__ == "Reply"


def started(world: World) -> list[str]:
    return [action.function for action in world.log if isinstance(action, StartWorker)]


@pytest.mark.parametrize("concurrency", [1, 2])
def test_the_worker_of_a_function_that_always_has_work_is_replaced_after_its_time_slice(concurrency):
    world = World(workers_max=1, cores=2)
    for name in "fg":
        world.deploy(spec(name, queue_limit=4096, timeout_s=1000.0, slo_ms=100, concurrency=concurrency))
    check_is_answered(world, "g", beside=("f",))


def test_functions_that_always_have_work_take_turns_without_a_wake_for_each_request():
    world = World(workers_max=1, cores=2)
    for name in "fg":
        world.deploy(spec(name, queue_limit=4096, timeout_s=1000.0, slo_ms=100))
    go_on(world, ("f", "g"), asked=-1)
    starts = started(world)
    assert {"f@1", "g@1"} == set(starts)
    assert starts.count("f@1") == pytest.approx(starts.count("g@1"), abs=1)
    assert 5 < len(starts) < len(world.answers) / 2


def test_a_large_worker_is_not_passed_by_for_ever_by_small_ones():
    world = World(cores=8, memory_bytes=100)
    for name, size in (("large", 80), ("small", 40), ("other", 40)):
        world.deploy(spec(name, profile=profile(size), queue_limit=4096, timeout_s=1000.0, max_workers=2))
    check_is_answered(world, "large", beside=("small", "other"))


def test_a_small_worker_does_not_start_before_a_large_one_that_has_waited_longer():
    world = World(cores=8, memory_bytes=100)
    for name, size in (("busy", 50), ("large", 80), ("small", 20)):
        world.deploy(spec(name, profile=profile(size), timeout_s=1000.0))
    world.arrive("busy")
    world.settle_processes()
    for name in ("large", "small"):
        world.arrive(name)
    world.settle_processes()
    assert started(world) == ["busy@1"]
    world.finish()
    world.settle_processes()
    assert started(world) == ["busy@1", "large@1", "small@1"]


def test_functions_behind_one_whose_request_expired_do_not_wait():
    world = World(cores=8, memory_bytes=100)
    for name, size in (("busy", 50), ("large", 80), ("small", 20)):
        world.deploy(spec(name, profile=profile(size), timeout_s=1000.0))
    world.arrive("busy")
    world.settle_processes()
    world.arrive("large", deadline=1.0)
    world.arrive("small")
    world.settle_processes()
    while world.now < 1.0:
        world.ring()
    world.settle_processes()
    assert started(world) == ["busy@1", "small@1"]


def test_a_function_that_lost_its_place_to_an_urgent_start_replaces_a_worker_whose_time_slice_is_over():
    world = World(memory_bytes=30, cores=1)
    for name, tenant, seconds, slo in (
        ("f", "u", 10.0, None),
        ("y", "u", 0.1, 50.0),
        ("k", "u", 0.1, None),
        ("s", "v", 0.1, None),
    ):
        made = Profile(weight_bytes=30, macs=1, points=(Point(1, 10, 1, 1, seconds),))
        world.deploy(spec(name, blobs=((name, 10),), tenant=tenant, profile=made, slo_ms=slo, timeout_s=1000.0))
    for name in "fy":
        world.arrive(name)
        world.settle()
    world.send(MemoryMeasured(((2, 15),)))
    # Requests of y, which are late, keep waiting, so its worker is not spare while f has the core.
    for name in "yyykf":
        world.arrive(name)
    world.settle_processes()
    world.finish()
    world.send(MemoryMeasured(((2, 10),)))
    world.now += 1.0
    while world.alarm <= world.now:
        world.ring()
    assert [function.waits_in for function in world.state.functions.values()] == [None, "cores", "capacity", None]
    world.arrive("s")
    world.settle_processes()
    assert started(world) == ["f@1", "y@1", "s@1"]
    assert [id_ for id_, worker in world.state.workers.items() if worker.drain is not None] == [1]


def drained_in_a_long_run(before: str, waiting: str) -> tuple[World, dict[str, int]]:
    """The worker of b and a drains, in a run of b that lasts until its timeout, when p runs too and the functions of
    `waiting` wait; those of `before` have run before.
    """
    world = World(cores=4, workers_max=2)
    for name in "ba":
        world.deploy(spec(name, blobs=((name, 10),), family="pair", max_workers=2, timeout_s=60.0))
    for name in "pq":
        world.deploy(spec(name, blobs=((name, 10),), timeout_s=60.0))
    for name in before:
        world.arrive(name)
        world.settle()
    asked: dict[str, int] = {}
    for name in "bp" + waiting:
        asked[name] = world.arrive(name)
        world.settle_processes()
    [pair, _] = world.state.workers.values()
    while pair.drain is None:
        world.ring()
    return world, asked


def finish_short_runs(world: World) -> None:
    """All runs end but those of b."""
    world.settle_processes()
    while short := [run for run in world.running.values() if "b@1" not in world.whose(run)]:
        world.finish_run(short[0])
        world.settle_processes()


def test_a_function_that_waits_for_a_slot_gets_another_worker_when_the_worker_where_it_is_bound_drains():
    world, asked = drained_in_a_long_run("baba", "aq")
    finish_short_runs(world)
    assert list(world.open) == [asked["b"]]
    assert world.now < 1.0


def test_a_worker_that_drains_in_an_overdue_run_does_not_count_as_ended():
    world, asked = drained_in_a_long_run("", "q")
    finish_short_runs(world)
    assert set(world.open) == {asked["b"], asked["q"]}
    [overdue_at] = [run.overdue_at for run in world.state.workers[1].runs.values()]
    while asked["q"] in world.open:
        world.ring()
        finish_short_runs(world)
    assert world.now == overdue_at == UNKNOWN_S


def test_no_more_workers_with_overdue_runs_are_drained_than_needed():
    world = World(cores=8, workers_max=4)
    for name in "abcdq":
        world.deploy(spec(name, blobs=((name, 10),), timeout_s=60.0))
    for name in "abcd":
        world.arrive(name)
        world.settle_processes()
    world.now = 2 * UNKNOWN_S
    world.ring()
    world.arrive("q")
    world.settle_processes()
    assert len([worker for worker in world.state.workers.values() if worker.drain]) == 1


def test_more_workers_drain_for_a_waiting_function_whose_configuration_has_become_larger():
    world = World(cores=8, memory_bytes=40)
    for name in "abf":
        world.deploy(spec(name, blobs=((name, 10),), profile=profile(20), timeout_s=60.0))
    for name in "abf":
        world.arrive(name)
        world.settle_processes()
    while not any(worker.drain for worker in world.state.workers.values()):
        world.ring()
    assert world.state.workers[2].drain is None
    larger = spec("f", profile=profile(40))
    families.use_profile(world.scheduler.cycle, world.state.functions["f@1"].family, larger)
    world.arrive("f")
    assert world.state.workers[2].drain is not None


def test_several_idle_workers_are_stopped_for_one_large_worker():
    world = World(cores=8, memory_bytes=100)
    for name in ("one", "two", "three"):
        world.deploy(spec(name, profile=profile(30), keep_alive_s=1000.0))
        world.arrive(name)
        world.settle()
    world.deploy(spec("large", profile=profile(95), timeout_s=1000.0))
    asked = world.arrive("large")
    world.settle()
    assert type(world.answers[asked]).__name__ == "Reply"


def test_no_worker_is_stopped_for_an_additional_one_that_does_not_fit_beside_the_first():
    world = World(cores=8, memory_bytes=100)
    for name, size in (("idle", 30), ("large", 60)):
        world.deploy(spec(name, profile=profile(size), keep_alive_s=1000.0, max_workers=2))
        world.arrive(name)
        world.settle()
    asked = [world.arrive("large") for _ in range(4)]
    world.settle_processes()
    assert started(world) == ["idle@1", "large@1"]
    assert not [action for action in world.log if isinstance(action, StopWorker)]
    world.settle()
    assert {type(world.answers[id_]).__name__ for id_ in asked} == {"Reply"}


def test_the_bytes_of_a_function_that_always_has_work_are_released_after_its_time_slice():
    world = World(cores=2, host_bytes=50)
    for name in "fg":
        blobs = ((f"{name}-a", 10), (f"{name}-b", 20))
        world.deploy(spec(name, blobs=blobs, queue_limit=4096, timeout_s=1000.0))
    check_is_answered(world, "g", beside=("f",))


def test_functions_that_wait_for_a_worker_do_not_take_the_blocks_from_each_other():
    world = World(workers_max=1, cores=2, host_bytes=20)
    slow = Profile(weight_bytes=10, macs=1, points=(Point(1, 10, 1, 1, 0.1),), wake_s=2.0)
    world.deploy(spec("busy", blobs=(("busy", 10),), profile=slow, queue_limit=4096, timeout_s=1000.0))
    for name in "fg":
        world.deploy(spec(name, blobs=((name, 10),), timeout_s=1000.0))
    world.arrive("busy")
    world.settle_processes()
    asked = [world.arrive(name) for name in "fg"]
    for id_ in asked:
        go_on(world, ("busy",), id_, steps=5 * STEPS)
    assert [type(world.answers[id_]).__name__ for id_ in asked] == ["Reply", "Reply"]
    loaded = [action.function for action in world.log if isinstance(action, LoadBlocks)]
    assert [loaded.count(f"{name}@1") for name in "fg"] == [1, 1]


def test_a_large_function_is_not_passed_by_for_ever_in_the_host_store():
    world = World(cores=8, host_bytes=100)
    for name, nbytes in (("large", 80), ("small", 40), ("other", 40)):
        world.deploy(spec(name, blobs=((f"{name}-a", nbytes),), queue_limit=4096, timeout_s=1000.0))
    check_is_answered(world, "large", beside=("small", "other"))


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("memory", [None, 30])
def test_no_request_waits_behind_an_idle_worker(policy, memory):
    """If memory is bounded, there is some for the simplest configuration, and not for the wanted one."""
    points = (Point(1, 10, 1, 1, 0.3), Point(2, 20, 8, 1, 0.2))
    settings = {"slo_ms": 400, "max_batch": 8, "threads": 2, "timeout_s": 1000.0}
    world = World(policy=policy, cores=3, memory_bytes=memory)
    for name, keep_alive_s in (("one", 1.0), ("two", 1.0), ("idle", 300.0)):
        made = Profile(weight_bytes=30, macs=10**9, points=points)
        world.deploy(spec(name, profile=made, keep_alive_s=keep_alive_s, **settings))
    for name in ("one", "two", "idle"):
        world.now += 100.0
        world.arrive(name)
        while len(world.answers) < world.next_request:
            world.settle()
            world.ring()
        while name != "idle" and world.alive:
            world.settle()
            world.ring()
    begun = world.now
    asked = [world.arrive(name) for name in ("one", "two")]
    while not set(asked) <= set(world.answers):
        world.settle()
        world.ring()
    assert {type(world.answers[id_]).__name__ for id_ in asked} == {"Reply"}
    assert world.now - begun < 10.0


def test_no_more_workers_are_stopped_than_needed():
    points = (Point(1, 40, 1, 1, 0.1), Point(1, 90, 4, 1, 0.2))
    world = World(cores=8, memory_bytes=100)
    for name in ("one", "two"):
        world.deploy(spec(name, profile=profile(45), keep_alive_s=1000.0))
        world.arrive(name)
        world.settle()
    wide = Profile(weight_bytes=30, macs=1, points=points)
    world.deploy(spec("new", profile=wide, max_batch=4, slo_ms=500))
    asked = world.arrive("new")
    world.settle()
    assert type(world.answers[asked]).__name__ == "Reply"
    assert sum(isinstance(action, StopWorker) for action in world.log) == 1


def test_a_waiting_function_that_is_refused_releases_its_bytes_to_the_next():
    world = World(workers_max=1, memory_bytes=10, host_bytes=20, cores=2)
    world.deploy(spec("busy", blobs=(("busy", 10),), profile=profile(5), keep_alive_s=1000.0, pinned=True))
    for name in "fg":
        world.deploy(spec(name, blobs=((name, 10),), profile=profile(5), timeout_s=1000.0))
    world.arrive("busy")
    world.settle_processes()
    asked = [world.arrive(name) for name in "fg"]
    world.settle_processes()
    world.send(Profiled("f@1", profile(50)))
    world.settle()
    assert [type(world.answers[id_]).__name__ for id_ in asked] == ["Refuse", "Reply"]


def test_a_function_that_loses_its_blocks_waits_for_no_core():
    world = World(cores=1)
    for name in ("f", "busy"):
        world.deploy(spec(name, blobs=((name, 10),), timeout_s=1000.0))
        world.arrive(name)
        world.settle_processes()
        if name == "f":
            world.finish()
    asked = world.arrive("f")
    world.die(1, lost_blocks=True)
    while not world.loads:
        world.ring()
    world.settle()
    assert type(world.answers[asked]).__name__ == "Reply"

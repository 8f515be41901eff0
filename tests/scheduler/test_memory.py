"""Workers that take more memory than allowed: which are stopped, which are not, and the errors of their callers."""

import pytest

from overwinter.core.actions import Explanation, LoadFinished, Refuse, Reply, StartWorker, StopWorker
from overwinter.core.events import LoadAsked, MemoryMeasured, MemoryPressure, Removed, UnloadAsked
from overwinter.core.profile import Point, Profile
from tests.scheduler.world import World, spec

MIB = 1 << 20
NEED = 20 * MIB
LIMIT = 1000 * MIB
PROFILE = Profile(weight_bytes=10, macs=100, points=(Point(1, NEED, 1, 1, 0.1),))


def node(**config) -> World:
    return World(**{"memory_bytes": LIMIT, "cores": 4, "workers_max": 16} | config)


def woken(world: World, name: str, tenant="t", busy=True, **settings) -> tuple[int, int]:
    """Deploy a function with one worker; return the worker and its request."""
    before = world.alive.copy()
    settings = {"profile": PROFILE, "keep_alive_s": 900.0, "timeout_s": 900.0, "has_handler": True, **settings}
    world.deploy(spec(name, blobs=((name, 10),), tenant=tenant, **settings))
    request = world.arrive(name)
    world.settle_processes()
    if not busy:
        world.finish()
    [worker] = world.alive - before
    return worker, request


def measured(world: World, **mib: int) -> list[int]:
    """Report the memory of some functions' workers; return the workers that are stopped for it."""
    workers = world.state.workers.values()
    taken = {
        worker.id: mib[worker.function.partition("@")[0]]
        for worker in workers
        if worker.function.partition("@")[0] in mib
    }
    actions = world.send(MemoryMeasured(tuple((worker, each * MIB) for worker, each in taken.items())))
    stops = [action for action in actions if isinstance(action, StopWorker)]
    assert all(stop.kill for stop in stops)
    return [stop.worker for stop in stops]


def test_what_a_worker_takes_beyond_its_need_counts_as_taken():
    world = node(memory_bytes=100 * MIB)
    woken(world, "grown")
    measured(world, grown=85)
    assert world.resources.memory.taken == world.resources.memory.of("t") == 85 * MIB
    world.deploy(spec("next", profile=PROFILE))
    world.arrive("next")
    world.load_blocks()
    assert not world.starting
    measured(world, grown=40)
    assert list(world.starting.values()) == ["next@1"]


def test_a_worker_that_takes_less_than_its_need_counts_with_its_need():
    world = node()
    woken(world, "f")
    measured(world, f=1)
    assert world.resources.memory.taken == NEED


def test_as_long_as_all_fits_no_worker_is_stopped():
    world = node()
    woken(world, "greedy")
    woken(world, "honest")
    assert measured(world, greedy=980, honest=20) == []


def test_the_worker_with_too_much_memory_is_stopped_and_its_caller_gets_the_reason():
    world = node()
    _, mine = woken(world, "honest")
    greedy, request = woken(world, "greedy", tenant="u", memory_mib=4096)
    assert measured(world, greedy=990, honest=20) == [greedy]
    answer = world.answers[request]
    assert (answer.error, answer.retry_after_s) == ("NoSpaceError", 1.0)
    assert all(word in answer.message for word in ("greedy@1", "990.0 MiB", "memory_mib", "--memory-bytes"))
    world.settle()
    assert isinstance(world.answers[mine], Reply)
    assert [each.function for each in world.log if isinstance(each, Explanation) and each.what == "stop"] == [
        "greedy@1"
    ]


def test_a_load_does_not_fail_because_of_a_worker_from_before_the_unload():
    world = node(drain_timeout_s=100.0)
    greedy, request = woken(world, "greedy")
    world.send(UnloadAsked("greedy@1"))
    world.send(LoadAsked("greedy@1"))
    assert measured(world, greedy=2000) == [greedy]
    assert world.answers[request].error == "NoSpaceError"
    world.die(greedy)
    function = world.state.functions["greedy@1"]
    assert (function.failures, function.backoff_until) == (0, 0.0)
    world.settle_processes()
    assert [each.error for each in world.log if isinstance(each, LoadFinished)] == [None]


def test_a_function_whose_workers_are_stopped_for_memory_backs_off_longer_each_time():
    world = node()
    backoffs = []
    woken(world, "greedy")
    for _ in range(3):
        later = world.arrive("greedy")
        measured(world, greedy=2000)
        began = world.now
        assert later not in world.answers
        world.die()
        while not world.starting:
            world.ring()
        backoffs.append(world.now - began)
        world.settle_processes()
    assert backoffs == sorted(set(backoffs))
    assert len([each for each in world.log if isinstance(each, StartWorker)]) == 4


@pytest.mark.parametrize("state", ["runs", "is removed", "starts"])
def test_a_start_does_not_wait_for_memory_that_a_worker_of_another_tenant_takes_beyond_its_need(state):
    world = node()
    if state == "starts":
        world.deploy(spec("greedy", tenant="u", profile=PROFILE))
        request = world.arrive("greedy")
        world.load_blocks()
        [greedy] = world.starting
    else:
        greedy, request = woken(world, "greedy", tenant="u")
    if state == "is removed":
        world.send(Removed("greedy@1"))
    assert measured(world, greedy=990) == []
    world.deploy(spec("honest", blobs=(("h", 10),), profile=PROFILE))
    mine = world.arrive("honest")
    actions = world.load_blocks()
    assert [each.worker for each in actions if isinstance(each, StopWorker)] == [greedy]
    assert world.answers[request].error == "NoSpaceError"
    world.settle()
    assert isinstance(world.answers[mine], Reply)


def test_a_start_waits_for_memory_that_a_worker_of_its_own_tenant_takes():
    world = node()
    woken(world, "mine")
    measured(world, mine=990)
    world.deploy(spec("next", blobs=(("n", 10),), profile=PROFILE))
    world.arrive("next")
    assert not [each for each in world.load_blocks() if isinstance(each, StopWorker)]


def test_a_worker_of_the_tenant_whose_workers_together_exceed_their_needs_most_is_stopped_first():
    world = node()
    [single, *_], *many = (woken(world, name, name[0]) for name in ("a", "b1", "b2", "b3"))
    stopped = measured(world, a=300, b1=200, b2=250, b3=260)
    assert stopped == [many[2][0]]
    assert single not in stopped


def test_the_idle_worker_of_a_tenant_is_stopped_before_its_busy_one():
    world = node()
    idle, request = woken(world, "idle", busy=False)
    woken(world, "busy")
    assert measured(world, busy=600, idle=500) == [idle]
    assert isinstance(world.answers[request], Reply)
    assert not world.state.functions["idle@1"].failures


def test_as_many_workers_are_stopped_as_needed_counting_those_that_stop_already():
    world = node()
    workers = [woken(world, name)[0] for name in ("a", "b", "c")]
    assert measured(world, a=900, b=800, c=700) == workers[:2]
    assert measured(world, c=710) == workers[:2]
    assert measured(world, c=1100) == [*workers[:2], workers[2]]


@pytest.mark.parametrize(("tenant", "idle_s", "goes"), [("t", 0.0, "idle"), ("v", 0.0, "greedy"), ("v", 60.0, "idle")])
def test_an_idle_worker_of_the_same_tenant_or_idle_for_long_is_stopped_before_a_run_is_refused(tenant, idle_s, goes):
    """Idle workers of the tenant that takes too much are stopped, and of other tenants only those idle for long."""
    world = node(memory_bytes=100 * MIB)
    idle, _ = woken(world, "idle", tenant=tenant, busy=False)
    world.now += idle_s
    greedy, request = woken(world, "greedy")
    assert measured(world, idle=20, greedy=90) == [{"idle": idle, "greedy": greedy}[goes]]
    assert (request in world.answers) == (goes == "greedy")


def test_an_idle_worker_is_stopped_for_a_start_before_a_run_is_refused():
    world = node(memory_bytes=200 * MIB)
    idle, _ = woken(world, "idle", tenant="v", busy=False)
    _, request = woken(world, "greedy", tenant="u")
    assert measured(world, idle=20, greedy=170) == []
    world.deploy(spec("honest", blobs=(("h", 10),), profile=PROFILE))
    mine = world.arrive("honest")
    assert [each.worker for each in world.load_blocks() if isinstance(each, StopWorker)] == [idle]
    world.die(idle)
    assert request in world.open
    world.settle()
    assert all(isinstance(world.answers[each], Reply) for each in (request, mine))


def test_where_no_worker_takes_far_more_than_its_need_the_idle_one_is_stopped_and_runs_are_retried():
    world = node(memory_bytes=60 * MIB)
    idle, _ = woken(world, "idle", busy=False)
    busy, request = woken(world, "busy", "u")
    assert measured(world, idle=35, busy=30) == [idle]
    world.die(idle)
    assert measured(world, busy=61) == [busy]
    assert request in world.open
    world.die(busy)
    world.settle()
    assert isinstance(world.answers[request], Reply)


def test_a_request_whose_worker_is_stopped_twice_for_a_small_excess_gets_the_reason():
    world = node(memory_bytes=50 * MIB)
    _, request = woken(world, "f")
    for _ in range(2):
        measured(world, f=51)
        world.die()
        world.settle_processes()
    assert world.answers[request].error == "NoSpaceError"
    assert "--memory-bytes" in world.answers[request].message


def test_a_version_that_takes_too_much_at_its_trial_is_refused():
    world = node()
    world.deploy(spec("greedy", profile=PROFILE), on_trial=True)
    world.load_blocks()
    measured(world, greedy=1001)
    [result] = [action for action in world.log if isinstance(action, LoadFinished)]
    assert (result.function, result.error) == ("greedy@1", "NoSpaceError")
    world.calm()
    assert not world.alive
    assert world.resources.memory.taken == 0


def test_a_function_whose_worker_takes_too_much_before_it_is_ready_gets_no_further_worker():
    world = node()
    world.deploy(spec("greedy", profile=PROFILE))
    request = world.arrive("greedy")
    world.load_blocks()
    measured(world, greedy=1001)
    assert world.answers[request].error == "NoSpaceError"
    world.calm()
    assert len([each for each in world.log if isinstance(each, StartWorker)]) == 1


def test_a_worker_of_a_removed_function_is_stopped_for_its_memory_too():
    world = node()
    worker, request = woken(world, "greedy")
    world.send(Removed("greedy@1"))
    assert measured(world, greedy=1001) == [worker]
    assert "greedy@1" in world.answers[request].message


def test_the_memory_of_a_stopped_worker_counts_until_it_has_exited():
    world = node()
    worker, _ = woken(world, "greedy")
    measured(world, greedy=1001)
    measured(world, greedy=0)
    assert world.resources.memory.taken == 1001 * MIB
    world.die(worker)
    assert world.resources.memory.taken == 0


def test_without_a_bound_no_worker_is_stopped_for_its_memory():
    world = node(memory_bytes=None)
    woken(world, "f")
    assert measured(world, f=1 << 25) == []


def test_a_measurement_of_an_unknown_worker_changes_nothing():
    world = node()
    assert world.send(MemoryMeasured(((99, 1 << 45),))) == []
    assert world.resources.memory.taken == 0


def test_under_memory_pressure_idle_workers_are_stopped_before_those_that_exceed_their_need():
    world = node(memory_bytes=None)
    idle, _ = woken(world, "idle", busy=False)
    woken(world, "honest")
    greedy, request = woken(world, "greedy")
    measured(world, idle=20, honest=40, greedy=900)
    actions = world.send(MemoryPressure(15 * MIB))
    assert [each.worker for each in actions if isinstance(each, StopWorker)] == [idle]
    actions = world.send(MemoryPressure(5000 * MIB))
    assert [each.worker for each in actions if isinstance(each, StopWorker)] == [greedy]
    assert isinstance(world.answers[request], Refuse)

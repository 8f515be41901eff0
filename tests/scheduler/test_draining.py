"""The resources of a removed function are released, whatever its runs do."""

import pytest

from overwinter.core.actions import LoadFinished, Reply, StopWorker
from overwinter.core.events import Demoted, LoadAsked, Removed, UnloadAsked
from tests.scheduler.world import World, spec

DAY_S = 86_400.0
DRAIN_TIMEOUT_S = 30.0


def asleep(world: World) -> int:
    """Send a request to a function whose handler sleeps for a day."""
    world.deploy(spec("sleeper", has_handler=True, timeout_s=DAY_S, blobs=(("s", 10),)))
    request = world.arrive("sleeper")
    world.settle_processes()
    assert world.running
    return request


@pytest.mark.parametrize(("event", "error"), [(Removed, "NotFoundError"), (UnloadAsked, "OverloadedError")])
def test_a_run_that_does_not_end_is_ended_at_the_drain_timeout(event, error):
    world = World(workers_max=1, cores=2)
    request = asleep(world)
    world.deploy(spec("other", blobs=(("o", 10),), timeout_s=1000.0))
    world.send(event("sleeper@1"))
    other = world.arrive("other")
    world.settle_processes()
    assert not [each for each in world.log if isinstance(each, StopWorker)]
    while request not in world.answers:
        world.ring()
    assert world.now == DRAIN_TIMEOUT_S
    assert world.answers[request].error == error
    assert [each.kill for each in world.log if isinstance(each, StopWorker)] == [True]
    world.settle()
    assert isinstance(world.answers[other], Reply)


@pytest.mark.parametrize("event", [Removed, UnloadAsked])
def test_a_run_that_ends_in_time_is_answered(event):
    world = World(cores=2)
    request = asleep(world)
    world.send(event("sleeper@1"))
    world.now += DRAIN_TIMEOUT_S / 2
    world.settle()
    assert isinstance(world.answers[request], Reply)
    world.calm()
    assert not world.alive


@pytest.mark.parametrize("in_time", [True, False])
def test_a_function_that_is_loaded_again_gets_a_new_worker(in_time):
    """The old one has mapped blocks that were dropped: nobody counts or verifies them."""
    world = World(cores=2)
    request = asleep(world)
    [old] = world.alive
    world.send(UnloadAsked("sleeper@1"))
    for _ in range(2):
        assert not any(isinstance(each, LoadFinished) for each in world.send(LoadAsked("sleeper@1")))
    assert [load.function for load in world.loads] == ["sleeper@1"]
    world.settle_processes()
    assert [each.error for each in world.log if isinstance(each, LoadFinished)] == [None]
    [new] = world.alive - {old}
    later = world.arrive("sleeper")
    [run] = [each for each in world.running.values() if later in each.requests]
    assert run.worker == new
    if in_time:
        world.settle()
        assert isinstance(world.answers[request], Reply)
    else:
        world.now += DRAIN_TIMEOUT_S
        world.ring()
        assert world.answers[request].error == "OverloadedError"
        assert "was unloaded" in world.answers[request].message
    world.settle_processes()
    assert old not in world.alive


def reloaded(world: World, **settings) -> tuple[int, int]:
    """Unload and load a function with a run in progress; return its old worker and its request."""
    world.deploy(spec("sleeper", has_handler=True, blobs=(("s", 10),), **settings))
    request = world.arrive("sleeper")
    world.settle_processes()
    [old] = world.alive
    world.send(UnloadAsked("sleeper@1"))
    world.send(LoadAsked("sleeper@1"))
    return old, request


def ended_loads(world: World) -> list[str | None]:
    return [each.error for each in world.log if isinstance(each, LoadFinished)]


def test_a_load_waits_for_the_new_worker_if_the_old_one_dies():
    world = World(cores=2)
    old, request = reloaded(world, timeout_s=DAY_S)
    world.die(old)
    assert ended_loads(world) == []
    world.settle()
    assert ended_loads(world) == [None]
    assert isinstance(world.answers[request], Reply)


def test_a_load_waits_for_the_new_worker_if_the_old_one_hangs():
    world = World(cores=2)
    old, request = reloaded(world, timeout_s=1.0)
    while not any(isinstance(each, StopWorker) for each in world.log):
        world.ring()
    assert world.now < DRAIN_TIMEOUT_S
    assert (world.answers[request].error, ended_loads(world)) == ("DeadlineError", [])
    world.settle_processes()
    assert old not in world.alive
    assert ended_loads(world) == [None]


def test_a_bind_that_ends_in_a_worker_that_the_function_leaves_answers_no_load():
    world = World(cores=2)
    for name in ("f", "g"):
        world.deploy(spec(name, family="pair", concurrency=2, timeout_s=DAY_S, has_handler=True, blobs=((name, 10),)))
    world.arrive("g")
    world.settle_processes()
    [old] = world.alive
    world.arrive("f")
    world.load_blocks()
    [bind] = world.binding
    assert (bind.worker, bind.function) == (old, "f@1")
    for id_ in ("g@1", "f@1"):
        world.send(UnloadAsked(id_))
    world.send(LoadAsked("f@1"))
    world.bind()
    assert ended_loads(world) == []
    world.settle_processes()
    assert ended_loads(world) == [None]
    assert world.alive != {old}


def test_a_load_is_not_answered_by_a_bind_in_a_worker_that_gets_no_more_work():
    world = World(cores=4)
    for name in "fg":
        world.deploy(spec(name, blobs=((name, 10),), family="pair", concurrency=2, max_workers=2))
    world.arrive("g")
    world.settle_processes()
    [old] = world.alive
    world.send(LoadAsked("f@1"))
    world.load_blocks()
    world.send(Demoted(old))
    world.bind()
    assert ended_loads(world) == []
    world.settle_processes()
    assert ended_loads(world) == [None]
    assert world.state.functions["f@1"].is_ready


def test_a_load_is_not_answered_by_the_start_of_a_worker_that_is_stopped_for_the_bytes_of_its_function():
    world = World(cores=4, host_bytes=35)
    for name in "fg":
        world.deploy(spec(name, blobs=((name, 30),), timeout_s=100.0))
    world.arrive("f")
    world.load_blocks()
    world.arrive("g")
    while world.state.releasing is None:
        world.ring()
    world.send(LoadAsked("f@1"))
    world.ready()
    assert ended_loads(world) == []
    world.calm()
    assert ended_loads(world) == [None]


def test_requests_do_not_wait_for_the_old_worker_if_the_new_one_dies():
    world = World(cores=2)
    old, _ = reloaded(world, timeout_s=DAY_S)
    world.settle_processes()
    [new] = world.alive - {old}
    world.die(new)
    later = world.arrive("sleeper")
    while not world.starting:
        world.ring()
    assert world.now < DRAIN_TIMEOUT_S
    world.settle_processes()
    assert any(later in run.requests for run in world.running.values())


def test_the_run_of_an_unloaded_function_in_a_demoted_worker_is_ended_at_the_drain_timeout():
    """The function may be loaded again immediately. Its request is refused because of the unload."""
    world = World(cores=2)
    request = asleep(world)
    [old] = world.alive
    world.send(Demoted(old))
    world.send(UnloadAsked("sleeper@1"))
    world.send(LoadAsked("sleeper@1"))
    world.settle_processes()
    world.now += DRAIN_TIMEOUT_S
    world.ring()
    assert world.answers[request].error == "OverloadedError"
    assert "was unloaded" in world.answers[request].message

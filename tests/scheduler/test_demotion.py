"""A worker that computes outside its runs gets no more work, and may complete its runs."""

from overwinter.core.actions import Reply, StartWorker, StopWorker
from overwinter.core.events import Demoted
from tests.scheduler.world import World, spec


def busy() -> tuple[World, int, int]:
    """The only worker of a function runs a request; returns the world, the worker and the request."""
    world = World(cores=2)
    world.deploy(spec("f", timeout_s=1000.0))
    request = world.arrive("f")
    world.settle_processes()
    [worker] = world.alive
    return world, worker, request


def stops(world: World) -> list[StopWorker]:
    return [each for each in world.log if isinstance(each, StopWorker)]


def test_the_run_of_a_demoted_worker_ends_and_the_next_request_uses_another_worker():
    world, worker, slow = busy()
    world.send(Demoted(worker))
    assert not stops(world)
    world.now += 100.0
    world.finish()
    assert isinstance(world.answers[slow], Reply)
    assert stops(world) == [StopWorker(worker)]
    after = world.arrive("f")
    world.settle()
    assert isinstance(world.answers[after], Reply)
    assert len([each for each in world.log if isinstance(each, StartWorker)]) == 2


def test_an_idle_worker_that_is_demoted_is_stopped_immediately():
    world, worker, _ = busy()
    world.finish()
    world.send(Demoted(worker))
    assert stops(world) == [StopWorker(worker)]


def test_a_demotion_is_harmless_for_a_stopped_or_stopping_worker():
    world, worker, _ = busy()
    world.finish()
    for _ in range(2):
        world.send(Demoted(worker))
    world.settle()
    world.send(Demoted(worker))
    assert len(stops(world)) == 1


def test_a_function_with_only_a_demoted_worker_gets_another_although_the_demoted_one_computes():
    world = World(cores=1)
    world.deploy(spec(max_workers=2))
    world.arrive()
    world.settle_processes()
    [slow] = world.alive
    world.send(Demoted(slow))
    waits = world.arrive()
    # Wait until the run is overdue, so that the start of another worker gets its core.
    while not world.starting and world.now < 30.0:
        world.ring()
    world.settle_processes()
    [run] = [run for run in world.running.values() if run.worker != slow]
    assert run.requests == (waits,)

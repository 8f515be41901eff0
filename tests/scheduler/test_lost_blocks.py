"""Blocks that vanish from memory are loaded again, but not forever; the capacity of a host store may change."""

import pytest

from overwinter.core.actions import LoadFinished, Refuse, Reply
from overwinter.core.events import HostCapacityMeasured, LoadAsked
from tests.scheduler.world import World, spec


def load_results(world: World) -> list[str | None]:
    return [action.error for action in world.log if isinstance(action, LoadFinished)]


def test_a_new_version_whose_blocks_vanished_before_it_started_is_tried_again():
    world = World()
    world.deploy(spec(), on_trial=True)
    world.load_blocks()
    world.die(lost_blocks=True)
    assert [load.function for load in world.loads] == ["f@1"]
    world.settle()
    assert load_results(world) == [None]
    assert isinstance(world.answers[_asked(world)], Reply)


def test_a_load_whose_blocks_vanished_is_tried_again():
    world = World()
    world.deploy(spec())
    world.send(LoadAsked("f@1"))
    world.load_blocks()
    world.die(lost_blocks=True)
    world.settle()
    assert load_results(world) == [None]


def test_blocks_that_vanish_twice_in_a_row_are_a_failure():
    world = World()
    world.deploy(spec(), on_trial=True)
    for _ in range(2):
        world.load_blocks()
        world.die(lost_blocks=True)
    assert load_results(world) == ["WorkerError"]
    assert world.state.functions == {}


def test_a_request_whose_blocks_vanish_twice_is_answered():
    world = World()
    world.deploy(spec())
    request = world.arrive()
    for _ in range(2):
        world.load_blocks()
        world.die(lost_blocks=True)
        while not world.loads:
            world.ring()
    assert request not in world.answers
    world.settle()
    assert isinstance(world.answers[request], Reply)


def running_in_workers(count: int) -> tuple[World, list[int]]:
    world = World(cores=8)
    for name in "fg":
        world.deploy(spec(name, blobs=(("shared", 10), (name, 1)), family="pair", max_workers=count))
    requests = []
    for _ in range(count):
        requests.append(world.arrive())
        world.settle_processes()
    assert len(world.running) == count
    return world, requests


@pytest.mark.parametrize("loaded_after", [1, 2, 3])
def test_a_block_that_several_workers_miss_counts_as_no_failure(loaded_after):
    world, requests = running_in_workers(3)
    for number, worker in enumerate((1, 2, 3)):
        if number == loaded_after:
            world.load_blocks()
        world.die(worker, lost_blocks=True)
    function = world.state.functions["f@1"]
    assert (function.failures, function.backoff_until, function.runs_at_death) == (0, 0.0, None)
    world.settle()
    assert [type(world.answers[request]) for request in requests] == [Reply] * 3


def test_a_bind_that_misses_a_block_excludes_the_function_only_after_the_block_was_loaded_again():
    world = World(cores=8)
    for name in "fg":
        world.deploy(spec(name, blobs=(("shared", 10), (name, 1)), family="pair", max_workers=2, timeout_s=100.0))
    for _ in range(2):
        world.arrive("g")
        world.settle_processes()
    for _ in range(2):
        world.finish()
        world.arrive()
        if world.loads:
            world.load_blocks()
            world.bind()
    [bind] = world.binding
    world.die(next(iter(world.running.values())).worker, lost_blocks=True)
    world.fail_bind(lost_blocks=True)
    assert not world.state.workers[bind.worker].failed_binds
    world.load_blocks()
    assert [each.worker for each in world.binding] == [bind.worker]
    world.fail_bind(lost_blocks=True)
    assert world.state.workers[bind.worker].failed_binds == {"f@1"}


@pytest.mark.parametrize("before", [0, 10])
def test_a_tmpfs_that_was_full_is_used_when_it_has_room(before):
    world = World(host_bytes=before)
    world.deploy(spec())
    assert isinstance(world.answers[world.arrive()], Refuse)
    world.send(HostCapacityMeasured(1000))
    request = world.arrive()
    while not world.loads:
        world.ring()
    world.settle()
    assert isinstance(world.answers[request], Reply)


def test_a_tmpfs_that_shrank_is_not_filled_beyond_its_new_size():
    world = World(host_bytes=1000)
    world.deploy(spec(keep_alive_s=0.0))
    world.deploy(spec("g", blobs=(("c", 30),)))
    world.arrive()
    world.settle()
    world.ring()
    world.settle()
    world.send(HostCapacityMeasured(30))
    request = world.arrive("g")
    world.settle()
    assert isinstance(world.answers[request], Reply)
    assert world.resources.host.taken == 30


def _asked(world: World) -> int:
    request = world.arrive()
    world.settle()
    return request

"""Requests of siblings share a run on a device, if that needs no long transfer and no eviction."""

import pytest

from overwinter.core.actions import Reply, RunOnDevice
from overwinter.core.devices import DeviceConfig
from overwinter.core.events import UnloadAsked
from overwinter.core.policies import Policy
from tests.scheduler.world import World, spec

TRUNK, HEAD = 500_000, 10


def device(number=0, memory_bytes=1 << 20) -> DeviceConfig:
    return DeviceConfig(name=f"virtual:{number}", memory_bytes=memory_bytes, bytes_per_s=1e6, latency_s=0.0)


def variant(name, trunk="trunk", head=HEAD, **settings):
    settings = {"max_batch": 8, "family": "one", **settings}
    return spec(name, 1, [(trunk, TRUNK), (f"{name}-head", head)], device="pool", **settings)


def runs_of(world) -> list[RunOnDevice]:
    return [action for action in world.log if isinstance(action, RunOnDevice)]


def world_of(*functions, **config) -> World:
    """A world in which each function has run twice, and a run takes 0.1 s."""
    world = World(devices=(device(),), **config)
    for function in functions:
        world.deploy(function)
    for function in functions:
        for _ in range(2):
            world.arrive(function.name)
            world.settle_processes()
            world.now += 0.1
            world.settle()
    world.log.clear()
    return world


def arrive_during_a_run(world, *names) -> list[int]:
    """Let requests wait behind a run of the first function until it ends; return these requests."""
    world.arrive(names[0])
    waiting = [world.arrive(name) for name in names]
    world.finish_on_device()
    return waiting


def test_waiting_requests_of_siblings_share_a_run():
    world = world_of(variant("f"), variant("g"), variant("h"))
    waiting = arrive_during_a_run(world, "f", "g", "h")
    shared = runs_of(world)[-1]
    whose = dict(zip(shared.requests, shared.functions, strict=True))
    assert whose == dict(zip(waiting, ["f@1", "g@1", "h@1"], strict=True))
    world.settle()
    assert all(isinstance(world.answers[id_], Reply) for id_ in waiting)
    assert {world.answers[id_].function for id_ in waiting} == {"f@1", "g@1", "h@1"}


@pytest.mark.parametrize(
    "other",
    [
        variant("g", family="two"),
        variant("g", trunk="another"),
        variant("g", max_batch=1),
    ],
    ids=["family", "trunk", "batch"],
)
def test_functions_of_other_families_or_trunks_or_without_batches_run_separately(other):
    world = world_of(variant("f"), other)
    arrive_during_a_run(world, "f", "g")
    world.settle()
    assert all(not run.functions for run in runs_of(world))


@pytest.mark.parametrize(("head", "shares"), [(HEAD, True), (100_000, False)])
def test_a_sibling_that_would_bring_much_runs_separately(head, shares):
    world = world_of(variant("f"))
    # Its blocks are in the host store, and not yet on the device.
    world.deploy(variant("g", head=head), on_trial=True)
    world.settle()
    arrive_during_a_run(world, "f", "g")
    world.settle()
    assert any(run.functions for run in runs_of(world)) == shares


def test_without_the_policy_no_run_is_shared():
    world = world_of(variant("f"), variant("g"), policy=Policy(joins=False))
    arrive_during_a_run(world, "f", "g")
    world.settle()
    assert all(not run.functions for run in runs_of(world))


def test_after_the_death_of_an_executor_its_functions_run_separately():
    world = world_of(variant("f"), variant("g"))
    waiting = arrive_during_a_run(world, "f", "g")
    assert runs_of(world)[-1].functions
    world.die(next(iter(world.devices.executors)))
    before = len(runs_of(world))
    world.calm()
    assert all(isinstance(world.answers[id_], Reply) for id_ in waiting)
    assert [run.functions for run in runs_of(world)[before:]] == [(), ()]


def test_a_shared_run_that_hangs_is_tried_again_separately():
    world = world_of(variant("f", timeout_s=30.0), variant("g", timeout_s=30.0))
    waiting = arrive_during_a_run(world, "f", "g")
    before = len(runs_of(world))
    assert runs_of(world)[-1].functions
    while not world.stopping:
        world.ring()
    world.calm()
    assert all(isinstance(world.answers[id_], Reply) for id_ in waiting)
    assert [run.functions for run in runs_of(world)[before:]] == [(), ()]


@pytest.mark.parametrize("others", ["", "h"])
def test_a_shared_run_without_adjacent_memory_is_tried_again_separately(others):
    world = world_of(*map(variant, ("f", "g", *others)))
    waiting = arrive_during_a_run(world, "f", "g")
    before = len(runs_of(world))
    assert runs_of(world)[-1].functions
    world.finish_on_device(unplaced=True)
    world.settle()
    assert all(isinstance(world.answers[id_], Reply) for id_ in waiting)
    assert runs_of(world)[before].functions == ()


def test_a_sibling_that_leaves_the_host_store_leaves_its_device_after_the_shared_run():
    world = world_of(variant("f"), variant("g"))
    waiting = arrive_during_a_run(world, "f", "g")
    world.send(UnloadAsked("g@1"))
    assert "g@1" in world.devices.resident["virtual:0"]
    world.finish_on_device()
    assert "g@1" not in world.devices.resident["virtual:0"]
    assert all(isinstance(world.answers[id_], Reply) for id_ in waiting)

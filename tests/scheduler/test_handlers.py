"""A handler in workers and its program on the pool are two functions to the scheduler, and one to its readers."""

from random import Random

import pytest

from overwinter.core.actions import Refuse, Reply, StopWorker
from overwinter.core.events import Removed, UnloadAsked
from overwinter.core.policies import Policy
from overwinter.scheduler.published import Published
from tests.scheduler.test_devices import device, of, pooled, served
from tests.scheduler.world import World, spec
from tests.telemetry.test_pool import Watched


def deploy(world: World, **settings) -> None:
    world.deploy(pooled("f:program", **settings))
    world.deploy(spec("f", blobs=(("code", 10),), has_handler=True, device="pool", **settings))


def calling(world: World) -> int:
    """Let a worker of the handler begin a run, and call the program; return the call's request."""
    world.arrive("f")
    world.settle_processes()
    run = next(iter(world.running.values()))
    return world.arrive("f:program", 1, caller=(run.worker, run.run))


def test_a_call_of_a_handler_is_accepted_even_if_its_tenant_has_reached_the_limit_of_requests():
    world = World(devices=(device(),), requests_max=2)
    deploy(world)
    call = calling(world)
    world.arrive("f")
    assert "open requests" in of(world, Refuse)[0].message
    world.settle()
    assert isinstance(world.answers[call], Reply)


def test_a_call_of_a_handler_is_accepted_even_if_all_tenants_together_have_reached_the_limit_of_requests():
    world = World(devices=(device(),), requests_max=2)
    deploy(world)
    world.deploy(spec("g", tenant="other"))
    world.arrive("g")
    call = calling(world)
    assert not of(world, Refuse)
    world.settle()
    assert isinstance(world.answers[call], Reply)


def test_a_worker_that_waits_for_the_pool_does_not_count_as_hung():
    world = World(devices=(device(),), stop_timeout_s=5.0)
    deploy(world, timeout_s=2.0)
    calling(world)
    world.now += 2.5
    world.ring()
    assert {each.error for each in of(world, Refuse)} == {"DeadlineError"}
    # Its handler now learns that nobody waits.
    assert not of(world, StopWorker)
    world.now += 5.0
    world.ring()
    assert of(world, StopWorker)[0].kill


def test_a_handler_has_the_rest_of_its_timeout_after_a_call():
    world = World(devices=(device(),), stop_timeout_s=1.0)
    deploy(world, timeout_s=10.0)
    calling(world)
    world.settle_processes()
    world.finish_on_device()
    world.now += 5.0
    while world.alarm is not None and world.alarm <= world.now:
        world.ring()
    assert not of(world, StopWorker)
    world.settle()
    assert {type(each) for each in world.answers.values()} == {Reply}


def test_a_handler_has_the_stop_timeout_to_end_after_a_call_that_ends_late():
    world = World(devices=(device(),), stop_timeout_s=1.0)
    deploy(world, timeout_s=2.0)
    calling(world)
    world.settle_processes()
    stopped = []
    for passed in (1.9, 0.5, 1.0):
        world.now += passed
        while world.alarm is not None and world.alarm <= world.now:
            world.ring()
        if world.devices.running:
            world.finish_on_device()
        stopped.append(len(of(world, StopWorker)))
    assert stopped == [0, 0, 1]


@pytest.mark.parametrize("called", [False, True])
def test_a_handler_that_hangs_is_killed_at_its_timeout_whether_or_not_it_called_the_pool(called):
    world = World(devices=(device(),))
    deploy(world, timeout_s=10.0)
    if called:
        calling(world)
        world.settle_processes()
        world.finish_on_device()
    else:
        world.arrive("f")
        world.settle_processes()
    world.now += 5.0
    waiting = world.arrive("f")
    world.now += 5.0
    world.ring()
    [stopped] = of(world, StopWorker)
    assert stopped.kill
    world.die(stopped.worker)
    world.ring()
    world.settle_processes()
    assert [run.requests for run in world.running.values()] == [(waiting,)]


def test_a_program_that_no_device_can_run_is_reported_under_the_name_of_its_function():
    world = World(devices=())
    deploy(world)
    published = Published(world.scheduler.cycle)
    for said in (published.function("f@1", world.now).fault, published.detail("f@1", world.now).pool.no_device_reason):
        assert "function f@1 is declared for the pool" in said


def test_readers_see_a_handler_and_its_program_as_one_function():
    world = World(devices=(device(),))
    deploy(world)
    calling(world)
    world.settle()
    published = Published(world.scheduler.cycle)
    seen = published.function("f@1", world.now)
    assert (len(seen.workers), seen.devices, seen.state) == (1, ("virtual:0",), "awake")
    assert published.detail("f@1", world.now).pool.devices == ["virtual:0"]
    steps, snapshot = published.snapshot(world.now), None
    try:
        while True:
            next(steps)
    except StopIteration as taken:
        snapshot = taken.value
    assert [each.spec.name for each in snapshot.functions] == ["f"]
    assert snapshot.families == 1
    assert (published.default("f:program"), published.versions("f:program").numbers) == (None, [])
    assert published.families() == {("t", "f"): "f@1"}
    assert set(published.functions_of("t")) == {"f@1", "f:program@1"}
    world.send(UnloadAsked("f:program@1"))
    assert published.function("f@1", world.now).state == "unloaded"


def test_readers_are_told_of_functions_and_not_of_their_parts():
    world = World(devices=(device(),))
    deploy(world, family="one")
    world.deploy(pooled("g", family="one"))
    calling(world)
    world.settle()
    served(world, "g")
    published = Published(world.scheduler.cycle)
    detail = published.detail("g@1", world.now)
    assert detail.pool.last_device.endswith("; evicted f@1")
    assert detail.members == ("f@1", "g@1")
    assert published.family("g@1").name == "f@1"
    _, waiting = world.arrive("f"), world.arrive("f")
    world.send(Removed("f:program@1"))
    world.send(Removed("f@1"))
    world.settle()
    assert world.answers[waiting].message == "function f@1 was removed"


@pytest.mark.parametrize("policy", ["overwinter", Policy(order="any")])
@pytest.mark.parametrize("removed", [("f@1", "f:program@1"), ("f:program@1", "f@1")])
def test_statistics_have_one_tally_for_a_handler_and_its_program(policy, removed):
    world = Watched(devices=(device(),), policy=policy)
    deploy(world, slo_ms=1000.0)
    for _ in range(3):
        calling(world)
        world.wait(Random(1).random())
        world.settle()
    [tally] = world.statistics.tallies.values()
    assert (tally.name, tally.requests, tally.answered, tally.runs) == ("f", 3, 3, 3)
    assert tally.on_devices.runs == 3
    assert world.reader.report(world.now).total.requests == 3
    assert world.statistics.running() == {"f": 0}
    for id_ in removed:
        assert world.statistics.tallies
        world.send(Removed(id_))
    world.settle()
    assert not world.statistics.tallies
    assert world.statistics.removed_tallies == [tally]

"""A program that no device can hold runs in slices: its requests pass from one to the next."""

import random

import pytest
from msgspec import structs

from overwinter.core.actions import LoadBlocks, Refuse, Reply, RunOnDevice, StartExecutor, StopWorker
from overwinter.core.events import Cancelled, Removed, UnloadAsked
from overwinter.core.function import BlobSize
from overwinter.core.ids import FunctionId
from overwinter.core.policies import Policy
from overwinter.core.profile import Point, Profile
from overwinter.scheduler.published import Published
from tests.scheduler.test_devices import device, of, pooled, served
from tests.scheduler.world import World, spec

NAMES = "f", "f:2", "f:3"


def slices(names=NAMES, size=600_000, **settings):
    """Return the slices of a function, the last first."""
    following, found = None, []
    for name in reversed(names):
        one = spec(name, 1, [(f"{name}-weights", size)], device="pool", **settings)
        found.append(structs.replace(one, following=following))
        following = FunctionId(f"{name}@1")
    return found


def world_of(number=2, **config) -> World:
    world = World(devices=tuple(map(device, range(number))), **config)
    for each in slices(max_batch=2):
        world.deploy(each)
    return world


def runs(world) -> list[RunOnDevice]:
    """Return the runs that had requests."""
    return [run for run in of(world, RunOnDevice) if run.requests]


def test_a_request_runs_through_all_slices_on_all_devices():
    world = world_of()
    for _ in range(3):
        world.arrive("f")
        world.settle()
    assert [run.function for run in runs(world)] == ["f@1", "f:2@1", "f:3@1"] * 3
    assert [(type(each), each.function, each.start) for each in world.answers.values()] == [
        (Reply, "f@1", "disk"),
        (Reply, "f@1", "host"),
        (Reply, "f@1", "host"),
    ]
    assert len(of(world, StartExecutor)) == 2


def test_readers_are_told_of_slices_by_their_numbers():
    world = world_of(1)
    served(world, "f", "f")
    slices = Published(world.scheduler.cycle).detail("f@1", world.now).pool.slices
    evicted = [each.last_device.partition("evicted ")[2] for each in slices]
    assert evicted == ["slice 3 of f@1", "f@1", "slice 2 of f@1"]


def test_with_a_device_for_each_slice_nothing_is_brought_again():
    world = world_of(3)
    for _ in range(3):
        world.arrive("f")
        world.settle()
    assert sum(run.missing_bytes for run in of(world, RunOnDevice)) == 3 * 600_000
    assert [run.missing_bytes for run in runs(world)[3:]] == [0] * 6
    assert [each.start for each in world.answers.values()] == ["disk", "warm", "warm"]


def test_a_slice_is_not_loaded_ahead_into_space_for_which_others_wait():
    world = world_of(1, host_bytes=1_900_000)
    world.deploy(spec("g", 1, [("g-weights", 1_350_000)]))
    requests = [world.arrive("f")]
    world.settle_processes()
    # Without the later slices there would still be too little space for it.
    requests.append(world.arrive("g"))
    for _ in range(10):
        if world.loads:
            world.load_blocks()
    assert not world.loads
    world.calm()
    assert {type(world.answers[each]) for each in requests} == {Reply}


def test_slices_of_several_requests_run_on_several_devices_at_the_same_time():
    world = world_of(3)
    world.arrive("f")
    world.settle()
    for _ in range(2):
        world.arrive("f")
    world.finish_on_device()
    assert {run.function for run in world.devices.running.values()} == {"f@1", "f:2@1"}
    world.settle()
    assert all(isinstance(each, Reply) for each in world.answers.values())


def test_later_slices_run_several_requests_in_a_batch():
    world = world_of(1)
    for _ in range(5):
        world.arrive("f")
    world.settle()
    assert {len(run.requests) for run in of(world, RunOnDevice) if run.function != "f@1"} == {1, 2}
    assert all(isinstance(each, Reply) for each in world.answers.values())


def test_requests_that_wait_for_later_slices_count_against_the_limit_of_the_function():
    world = World(devices=(device(0), device(1)))
    for each in slices(NAMES[:2], queue_limit=2, timeout_s=1000.0):
        world.deploy(each)
    served(world, "f", "f")
    requests = []
    for _ in range(6):
        requests.append(world.arrive())
        for run in [each for each in world.devices.running.values() if each.function == "f@1"]:
            world.now += 0.01
            world.send(world.devices.end(run, (), False))
    assert len(world.state.functions["f:2@1"].queue) == 2
    assert [each for each in requests if each in world.answers] == requests[3:]
    refused = world.answers[requests[-1]]
    assert (refused.error, refused.message) == ("OverloadedError", "function f@1 already has 2 requests waiting")


def test_a_full_queue_of_a_function_in_slices_refuses_with_the_time_of_all_slices():
    world = World(devices=(device(0), device(1)))
    for each, run_s in zip(slices(NAMES[:2], queue_limit=2), (20.0, 10.0), strict=True):
        profile = Profile(weight_bytes=1, macs=1, points=(Point(1, 1, 1, 1, run_s),))
        world.deploy(structs.replace(each, profile=profile))
    world.arrive()
    world.settle_processes()
    refused = [world.arrive() for _ in range(3)][-1]
    assert len(world.state.functions["f@1"].queue) == 2
    assert world.answers[refused].retry_after_s == (2 * 10.0 + 2 * 20.0) / 2


@pytest.mark.parametrize("ended", ["removed", "unloaded"])
def test_a_request_whose_slices_are_removed_or_unloaded_is_refused(ended):
    world = world_of()
    request = world.arrive("f")
    world.settle_processes()
    for name in NAMES:
        world.send((Removed if ended == "removed" else UnloadAsked)(f"{name}@1"))
    world.settle()
    answer = world.answers[request]
    assert isinstance(answer, Refuse)
    assert (answer.function, answer.error) == (
        "f@1",
        "NotFoundError" if ended == "removed" else "OverloadedError",
    )


def test_a_request_is_retried_in_the_slice_whose_executor_died():
    world = world_of(1)
    request = world.arrive("f")
    world.settle_processes()
    world.finish_on_device()
    world.settle_processes()
    [run] = world.devices.running.values()
    assert run.function == "f:2@1"
    world.die(run.executor)
    world.calm()
    assert isinstance(world.answers[request], Reply)
    assert [run.function for run in of(world, RunOnDevice)] == ["f@1", "f:2@1", "f:2@1", "f:3@1"]


def test_a_request_expires_or_is_cancelled_in_any_slice():
    for slice_ in range(3):
        for cancels in (False, True):
            world = world_of(3)
            request = world.arrive("f")
            for _ in range(slice_):
                world.settle_processes()
                world.finish_on_device()
            if cancels:
                world.send(Cancelled(request))
            else:
                while request not in world.answers:
                    world.ring()
                assert world.answers[request].error == "DeadlineError"
                assert world.answers[request].function == "f@1"
            world.calm()
            assert not world.state.requests


@pytest.mark.parametrize("isolation", ["none", "tenant", "function"])
@pytest.mark.parametrize("seed", range(6))
def test_every_request_of_a_program_in_slices_ends_whatever_happens(seed, isolation):
    chance = random.Random(seed)
    world = world_of(2, device_isolation=isolation)
    world.deploy(spec("g", 1, [("g-weights", 500_000)], device="pool"))
    for _ in range(200):
        world.now += chance.random() / 4
        while world.alarm is not None and world.alarm <= world.now:
            world.ring()
        may = [lambda: world.arrive(chance.choice("fg"))] * 3
        may += [world.load_blocks] * 3 if world.loads else []
        may += [world.ready] * 3 if world.starting else []
        may += [world.finish_on_device] * 4 if world.devices.running else []
        may += [lambda: world.finish_on_device(unplaced=True)] if world.devices.running else []
        may += [lambda: world.send(Cancelled(chance.choice(list(world.open))))] if world.open else []
        may += [world.die] if world.alive and chance.random() < 0.2 else []
        may += [world.ring] if world.alarm is not None else []
        chance.choice(may)()
    world.end_well(["f", "g"], 60.0)
    assert not world.open
    assert not world.state.requests


def with_another(**config) -> World:
    """Return a world with three devices, on which a program in slices ran, and then another one."""
    world = world_of(3, **config)
    for each in slices(("g", "g:2", "g:3")):
        world.deploy(each)
    for name in ("f", "g"):
        world.arrive(name)
        world.settle()
    return world


def test_an_executor_is_not_taken_for_hung_while_a_transfer_takes_long():
    world = with_another(start_timeout_s=0.5)
    world.arrive("f")
    world.settle_processes()
    assert any(not run.requests for run in world.devices.running.values())
    world.now += 0.59
    while world.alarm is not None and world.alarm <= world.now:
        world.ring()
    assert not of(world, StopWorker)


def test_all_later_slices_are_brought_to_idle_devices_while_the_first_runs():
    world = with_another()
    before = len(of(world, RunOnDevice))
    request = world.arrive("f")
    world.settle_processes()
    begun = of(world, RunOnDevice)[before:]
    assert [(run.function, len(run.requests), run.missing_bytes) for run in begun] == [
        ("f@1", 1, 600_000),
        ("f:2@1", 0, 600_000),
        ("f:3@1", 0, 600_000),
    ]
    assert len({run.device for run in begun}) == 3
    world.settle()
    assert isinstance(world.answers[request], Reply)
    assert [run.missing_bytes for run in of(world, RunOnDevice)[before + 3 :]] == [0, 0]


def begin_first(world):
    """Begin the run of the first slice, and load the blocks of the later ones."""
    while world.loads or not world.devices.running:
        if world.loads:
            world.load_blocks()
        else:
            world.ready()


def test_executors_for_later_slices_start_while_the_first_runs():
    world = world_of(4)
    request = world.arrive("f")
    begin_first(world)
    # One for each slice, and none for the fourth device.
    assert [each.device for each in of(world, StartExecutor)] == ["virtual:0", "virtual:1", "virtual:2"]
    world.settle()
    assert isinstance(world.answers[request], Reply)
    assert len({run.device for run in runs(world)}) == 3
    assert len(of(world, StartExecutor)) == 3


def test_later_slices_are_not_brought_while_a_function_waits_for_a_device():
    world = with_another()
    world.deploy(spec("other", 1, [("other-weights", 10)], device="pool", tenant="u"))
    waiting = world.arrive("other")
    world.load_blocks()
    world.arrive("f")
    brought = [run for run in of(world, RunOnDevice) if not run.requests]
    assert world.stopping
    assert not [run for run in world.devices.running.values() if not run.requests]
    world.settle()
    assert isinstance(world.answers[waiting], Reply)
    later = [run.function for run in of(world, RunOnDevice) if not run.requests][len(brought) :]
    assert later == ["f:2@1"]


def test_a_slice_that_backs_off_is_not_brought():
    world = with_another()
    world.state.functions[FunctionId("f:2@1")].backoff_until = world.now + 60
    world.arrive("f")
    world.settle_processes()
    assert [run.function for run in world.devices.running.values()] == ["f@1", "f:3@1"]


def test_a_slice_waits_for_its_transfer():
    world = with_another()
    world.arrive("f")
    world.settle_processes()
    # The run of the first slice ends before the transfers of the others.
    world.finish_on_device()
    assert [(run.function, run.requests) for run in world.devices.running.values()] == [("f:2@1", ()), ("f:3@1", ())]
    world.settle()
    assert [each.missing_bytes for each in runs(world)[-2:]] == [0, 0]


def test_a_slice_whose_blocks_are_lost_during_its_transfer_is_loaded_again():
    world = world_of(2)
    for name in ("g", "h"):
        world.deploy(pooled(name, 1000))
        world.arrive(name)
    world.settle()
    request = world.arrive("f")
    world.load_blocks()
    # The executor of the idle device prepares the first slice, and then brings the second one.
    world.load_blocks()
    [executor] = world.devices.preparing
    world.finish_on_device()
    assert [(run.executor, run.function) for run in world.devices.running.values()] == [(executor, "f:2@1")]
    world.die(executor, lost_blocks=True)
    assert not world.devices.running
    world.settle()
    assert isinstance(world.answers[request], Reply)


@pytest.mark.parametrize(
    ("number", "moved"), [(4, [4] + [0] * 6), (3, [4, 1, 1, 2, 1, 1, 2]), (2, [4, 2, 3, 3, 2, 3, 3])]
)
def test_each_slice_takes_the_place_of_the_one_that_is_needed_last(number, moved):
    """As few transfers as the best cache needs: of four slices in turn, (devices - 1) / 3 are there (Belady)."""
    names = ("f", "f:2", "f:3", "f:4")
    world = World(devices=tuple(map(device, range(number))))
    for each in slices(names):
        world.deploy(each)
    found = []
    for _ in moved:
        before = len(of(world, RunOnDevice))
        world.arrive("f")
        world.settle()
        found.append(sum(bool(run.missing_bytes) for run in of(world, RunOnDevice)[before:]))
    assert found == moved


def test_the_blocks_of_later_slices_are_loaded_while_the_first_runs():
    world = world_of(1)
    world.arrive("f")
    world.settle_processes()
    assert [each.function for each in of(world, LoadBlocks)] == ["f@1", "f:2@1", "f:3@1"]


def test_where_the_host_store_has_no_space_later_slices_are_loaded_when_they_are_reached():
    world = world_of(1, host_bytes=1_000_000)
    request = world.arrive("f")
    world.settle_processes()
    assert [each.function for each in of(world, LoadBlocks)] == ["f@1"]
    world.settle()
    assert isinstance(world.answers[request], Reply)


@pytest.mark.parametrize(("devices", "keep_alive_s"), [(1, 0.0), (1, 1.0), (2, 1.0)])
def test_slices_whose_keep_alive_ends_are_loaded_once_while_the_first_runs(devices, keep_alive_s):
    world = world_of(devices, host_keep_alive_s=keep_alive_s)
    request = world.arrive("f")
    world.settle_processes()
    for _ in range(20):
        for run in [each for each in world.devices.running.values() if not each.requests]:
            world.send(world.devices.end(run, (), False))
        world.now += 0.5
        if world.alarm is not None and world.alarm <= world.now:
            world.ring()
        world.settle_processes()
    assert [each.function for each in of(world, LoadBlocks)] == ["f@1", "f:2@1", "f:3@1"]
    world.settle()
    assert isinstance(world.answers[request], Reply)
    assert [each.function for each in of(world, LoadBlocks)].count("f:2@1") == 2


def test_a_slice_waits_for_the_device_that_has_it_if_that_is_free_sooner_than_its_transfer():
    world = world_of(3)
    for _ in range(2):
        world.arrive("f")
        world.settle()
    brought = len([run for run in of(world, RunOnDevice) if run.missing_bytes])
    for _ in range(3):
        world.arrive("f")
        world.settle_processes()
    # Its run takes no time here, and a transfer does; another device is free.
    assert [run.function for run in world.devices.running.values()] == ["f@1"]
    world.settle()
    assert len([run for run in of(world, RunOnDevice) if run.missing_bytes]) == brought
    assert all(isinstance(each, Reply) for each in world.answers.values())


def test_a_slice_does_not_wait_for_a_run_that_hangs():
    world = world_of(3)
    for _ in range(2):
        world.arrive("f")
        world.settle()
    world.arrive("f")
    world.settle_processes()
    [hung] = world.devices.running.values()
    behind = world.arrive("f")
    while behind not in world.answers:
        run = next((each for each in world.devices.running.values() if each is not hung), None)
        if run is None:
            world.ring()
        else:
            world.send(world.devices.end(run, (), False))
        world.settle_processes()
    assert isinstance(world.answers[behind], Reply)


@pytest.mark.parametrize("start_timeout_s", [1.0, 120.0])
def test_a_slice_does_not_wait_for_an_executor_whose_start_hangs(start_timeout_s):
    world = world_of(2, start_timeout_s=start_timeout_s)
    request = world.arrive("f")
    begin_first(world)
    # The second slice has a device for itself, if its executor becomes ready.
    assert world.devices.executors.keys() & world.starting.keys()
    world.finish_on_device()
    while request not in world.answers:
        if world.loads:
            world.load_blocks()
        elif world.devices.running:
            world.finish_on_device()
        else:
            world.ring()
    assert isinstance(world.answers[request], Reply)


def test_a_later_slice_fills_a_device_rather_than_take_the_place_of_another_function():
    world = World(devices=(device(0), device(1)), policy=Policy(device_ahead="nothing"))
    world.deploy(pooled("other", 900_000))
    first, last = slices(("f", "f:2"), 400_000)[::-1]
    filling = structs.replace(last, blobs=(BlobSize("f:2-weights", (1 << 20) - 400_000),))
    for each in (filling, first):
        world.deploy(each)
    world.arrive("other")
    world.arrive("f")
    world.settle_processes()
    [other] = [each for each in world.devices.running.values() if each.function == "other@1"]
    world.send(world.devices.end(other, (), False))
    # The device of the other function is idle for longer.
    world.now += 1.0
    world.settle()
    assert [run.evict for run in runs(world)] == [()] * 3
    assert runs(world)[-1].device != other.device


def without_second_executor() -> World:
    """Return a world with two devices, the second of which has lost its executor, and waits before it gets another."""
    world = world_of(2, policy=Policy(device_ahead="nothing"), backoff_first_s=10.0)
    served(world, "f")
    [second] = [each.executor for each in world.devices.executors.values() if each.device == "virtual:1"]
    world.die(second)
    return world


def test_a_slice_does_not_wait_for_a_device_that_backs_off():
    world = without_second_executor()
    world.arrive("f")
    for name in NAMES:
        [run] = world.devices.running.values()
        assert (run.function, run.device) == (f"{name}@1", "virtual:0")
        world.finish_on_device()


def test_the_first_slice_does_not_wait_for_an_executor_and_the_second_does():
    world = without_second_executor()
    world.now += 20.0
    world.arrive("f")
    assert [run.function for run in world.devices.running.values()] == ["f@1"]
    assert not world.starting
    world.finish_on_device()
    assert (list(world.devices.running), list(world.starting.values())) == ([], ["virtual:1"])
    world.settle()
    assert [run.device for run in runs(world)[-3:-1]] == ["virtual:0", "virtual:1"]


def test_the_last_slice_waits_for_the_device_that_has_it():
    world = world_of(3)
    served(world, "f", "f")
    brought = len([run for run in of(world, RunOnDevice) if run.missing_bytes])
    world.arrive("f")
    for _ in NAMES[1:]:
        world.finish_on_device()
    world.arrive("f")
    for _ in NAMES[1:]:
        [run] = [each for each in world.devices.running.values() if each.function != "f:3@1"]
        world.send(world.devices.end(run, (), False))
    assert [run.function for run in world.devices.running.values()] == ["f:3@1"]
    world.settle()
    assert len([run for run in of(world, RunOnDevice) if run.missing_bytes]) == brought


def test_a_slice_waits_for_no_busy_device_that_lacks_it():
    world = with_another()
    world.arrive("g")
    world.arrive("f")
    world.settle_processes()
    assert {"g@1", "f@1"} <= {run.function for run in world.devices.running.values() if run.requests}


def test_no_slice_is_brought_for_which_the_evictions_would_free_too_little():
    world = World(devices=tuple(map(device, range(2))))
    third, second, first = slices(size=0)
    sizes = {"f": 1_000_000, "f:3": 700_000, "f:2": 300_000}
    for each in (third, second, first):
        blobs = [BlobSize(each.blobs[0].address, sizes[each.name])]
        if each is second:
            # The function that would be evicted has one of its blocks.
            blobs.append(BlobSize("shared", 300_000))
        world.deploy(structs.replace(each, blobs=tuple(blobs)))
    world.deploy(spec("a", 1, [("shared", 300_000)], device="pool"))
    world.arrive("f")
    world.calm()
    requests = world.arrive("f"), world.arrive("a")
    world.settle_processes()
    [own] = [run for run in world.devices.running.values() if run.function == "a@1"]
    before = len(of(world, RunOnDevice))
    world.send(world.devices.end(own, (), False))
    assert [run for run in of(world, RunOnDevice)[before:] if "a@1" in run.evict] == []
    world.calm()
    assert {type(world.answers[each]) for each in requests} == {Reply}

"""A function with `device = "any"` runs in a worker or on a device, wherever each request is answered sooner."""

import copy

import pytest
from msgspec import structs

from overwinter.core.actions import Refuse, Reply, Run, RunOnDevice, StartWorker
from overwinter.core.events import Cancelled, Deployed, LoadAsked, MemoryMeasured, RunEnded, RunFailure, UnloadAsked
from overwinter.core.ids import program_id, program_name
from overwinter.core.policies import Policy
from overwinter.core.profile import Point, Profile
from overwinter.scheduler.published import Published
from tests.scheduler.test_devices import device, of
from tests.scheduler.world import World, spec
from tests.telemetry.test_pool import Watched

BYTES_PER_S = 1e6
SIZE = 400_000


def profiled(run_s: float) -> Profile:
    return Profile(weight_bytes=SIZE, macs=100, points=(Point(1, 10, 1, 1, run_s),), wake_s=0.03)


def either(name="f", run_s: float | None = 0.5, **settings):
    profile = None if run_s is None else profiled(run_s)
    return spec(name, 1, [(f"{name}-weights", SIZE)], device="any", profile=profile, **settings)


def serve(world: World, seconds: float, name="f") -> str:
    """Let a request be answered by a run of this time; return where it ran."""
    before = len(world.log)
    world.arrive(name)
    world.settle_processes()
    world.now += seconds
    world.settle()
    [where] = [each for each in world.log[before:] if isinstance(each, (Run, RunOnDevice))]
    return "workers" if isinstance(where, Run) else where.device


def known(cpu_s=0.5, device_s=0.1, number=1, **config) -> Watched:
    """A world with a function that has run on the first device, which has its blocks; its profile has `cpu_s`."""
    world = Watched(devices=tuple(map(device, range(number))), **config)
    world.deploy(either(run_s=cpu_s))
    world.arrive()
    world.settle_processes()
    world.now += SIZE / BYTES_PER_S + device_s
    world.settle()
    assert serve(world, device_s) == "virtual:0"
    return world


def test_workers_and_devices_are_each_tried_once_the_workers_first():
    world = World(devices=(device(),))
    world.deploy(either(run_s=None))
    assert [serve(world, 0.5) for _ in range(2)] == ["workers", "virtual:0"]
    assert "never measured" in world.state.functions["f@1"].estimates.text()
    world = World(devices=(device(),))
    world.deploy(either(run_s=None))
    for _ in range(3):
        world.arrive()
    world.settle_processes()
    assert (len(of(world, Run)), len(of(world, RunOnDevice))) == (1, 1)


def test_a_request_goes_where_it_is_answered_sooner():
    assert serve(known(cpu_s=0.5, device_s=0.1), 0.1) == "virtual:0"
    world = known(cpu_s=0.01, device_s=0.1)
    assert serve(world, 0.01) == "workers"
    assert "workers 40.0 ms (30.0 until it runs); virtual:0 100.0 ms (0.0 until it runs)" in (
        world.state.functions["f@1"].estimates.text()
    )


def test_missing_blocks_are_part_of_the_estimate():
    world = known(cpu_s=0.3, device_s=0.1)
    world.deploy(spec("g", 1, [("g-weights", 900_000)], device="pool"))
    world.arrive("g")
    world.settle()
    assert of(world, RunOnDevice)[-1].evict == ("f:program@1",)
    assert serve(world, 0.3) == "workers"


def test_a_request_goes_to_a_worker_while_the_devices_are_busy():
    world = known(cpu_s=0.3, device_s=1.0)
    world.deploy(spec("g", 1, [("g-weights", 10)], device="pool"))
    world.arrive("g")
    world.settle_processes()
    request = world.arrive()
    world.settle_processes()
    assert [run.requests for run in world.running.values()] == [(request,)]


def test_a_request_goes_to_a_device_while_the_workers_are_busy():
    world = known(cpu_s=0.5, device_s=0.6)
    first = world.arrive()
    world.settle_processes()
    assert [run.requests for run in world.running.values()] == [(first,)]
    second = world.arrive()
    assert [run.requests for run in world.devices.running.values()] == [(second,)]
    assert of(world, RunOnDevice)[-1].function == "f:program@1"
    world.settle()
    assert {world.answers[each].function for each in (first, second)} == {"f@1"}


def test_a_request_that_waits_for_a_device_moves_to_a_free_worker():
    world = known(cpu_s=0.3, device_s=0.1)
    requests = [world.arrive() for _ in range(8)]
    world.settle_processes()
    on_device, waiting = world.state.functions["f:program@1"], len(world.state.functions["f:program@1"].queue)
    assert waiting > 1
    for _ in range(2):
        world.finish()
    assert len(on_device.queue) < waiting
    world.settle()
    assert {type(world.answers[each]) for each in requests} == {Reply}


def test_a_request_that_waits_for_a_worker_moves_to_a_free_device():
    world = known(cpu_s=0.1, device_s=0.15)
    requests = [world.arrive() for _ in range(6)]
    world.settle_processes()
    waiting = len(world.state.functions["f@1"].queue)
    assert waiting > 1
    for _ in range(2):
        world.now += 0.15
        world.finish_on_device()
    assert len(world.state.functions["f@1"].queue) < waiting
    assert world.devices.running
    world.settle()
    assert {type(world.answers[each]) for each in requests} == {Reply}


def test_a_request_that_waits_for_a_worker_that_hangs_moves_to_a_free_device():
    world = known(cpu_s=0.1, device_s=0.35)
    world.arrive()
    world.settle_processes()
    waiting, began = world.arrive(), world.now
    assert list(world.state.functions["f@1"].queue) == [waiting]
    while not world.devices.running:
        world.ring()
    assert [run.requests for run in world.devices.running.values()] == [(waiting,)]
    assert world.running
    assert world.now - began < 1.0


def without_executor(backoff_over=True, **config) -> Watched:
    """A world in which the executors of the devices have died, with a request in a worker."""
    world = known(cpu_s=0.1, device_s=0.35, **config)
    for executor in sorted(world.devices.executors):
        world.die(executor)
    if backoff_over:
        world.now += 100
    world.arrive()
    world.settle_processes()
    assert world.running
    return world


@pytest.mark.parametrize("backoff_over", [False, True])
def test_an_executor_starts_for_a_request_that_waits_for_a_worker_that_hangs(backoff_over):
    world = without_executor(backoff_over)
    waiting = world.arrive()
    hanging, began = next(iter(world.running.values())), world.now
    assert list(world.state.functions["f@1"].queue) == [waiting]
    while not world.devices.executors:
        world.ring()
    assert world.now - began < 3.0
    world.settle_processes()
    assert [run.requests for run in world.devices.running.values()] == [(waiting,)]
    assert list(world.running.values()) == [hanging]
    world.settle()
    assert {type(each) for each in world.answers.values()} == {Reply}


def test_no_executor_starts_while_workers_are_expected_to_be_free_sooner():
    world = without_executor()
    requests = [world.arrive() for _ in range(3)]
    while world.running:
        world.now += 0.1
        world.finish()
        world.settle_processes()
    assert not world.devices.executors
    assert {type(world.answers[each]) for each in requests} == {Reply}


def test_a_request_for_which_an_executor_starts_returns_to_a_worker_that_is_free_first():
    world = without_executor()
    waiting = world.arrive()
    while not world.devices.executors:
        world.ring()
    assert list(world.state.functions["f:program@1"].queue) == [waiting]
    world.finish()
    assert [run.requests for run in world.running.values()] == [(waiting,)]
    world.settle()
    assert {type(each) for each in world.answers.values()} == {Reply}


def test_one_executor_starts_for_all_requests_behind_workers_that_hang():
    world = without_executor(number=2)
    waiting = [world.arrive() for _ in range(4)]
    while not world.devices.executors:
        world.ring()
    assert len(world.devices.executors) == 1
    assert len(world.state.functions["f:program@1"].queue) == 1
    world.settle()
    assert {type(world.answers[each]) for each in waiting} == {Reply}


@pytest.mark.parametrize("has_worker", [False, True])
def test_a_request_that_waits_for_a_device_that_hangs_moves_to_a_worker(has_worker):
    world = known(cpu_s=0.5, device_s=0.1)
    if has_worker:
        world.send(LoadAsked("f@1"))
    world.settle_processes()
    assert bool(world.state.workers) == has_worker
    world.arrive()
    waiting, began = world.arrive(), world.now
    assert list(world.state.functions["f:program@1"].queue) == [waiting]
    while not world.running:
        world.ring()
        world.settle_processes()
    assert [run.requests for run in world.running.values()] == [(waiting,)]
    assert world.devices.running
    assert world.now - began < 1.0


def test_a_worker_without_a_core_takes_no_request_from_a_device_that_hangs():
    world = known(cpu_s=0.5, device_s=0.1, cores=1)
    world.send(LoadAsked("f@1"))
    world.deploy(spec("g", 1, [("g-weights", 10)], profile=profiled(20.0)))
    world.arrive("g")
    world.settle_processes()
    world.arrive()
    waiting = world.arrive()
    while world.alarm < world.now + 5.0:
        world.ring()
    assert list(world.state.functions["f:program@1"].queue) == [waiting]
    world.finish()
    while not world.running:
        world.ring()
    assert [run.requests for run in world.running.values()] == [(waiting,)]


def test_a_request_whose_executor_does_not_start_moves_to_a_worker():
    world = World(devices=(device(),))
    world.deploy(either())
    request = world.arrive()
    world.load_blocks()
    assert (list(world.starting.values()), of(world, StartWorker)) == (["virtual:0"], [])
    while not of(world, StartWorker):
        world.ring()
        for _ in range(len(world.loads)):
            world.load_blocks()
    assert not world.stopping
    world.settle()
    assert isinstance(world.answers[request], Reply)


def test_an_executor_that_starts_as_slowly_as_others_is_waited_for():
    world = World(devices=(device(),))
    world.now = 100.0
    world.deploy(spec("slow", 1, [("slow-weights", 10)], device="pool"))
    world.arrive("slow")
    world.load_blocks()
    world.now += 10.0
    world.settle()
    world.die(min(world.devices.executors))
    world.now += 1.0
    world.deploy(either())
    request = world.arrive()
    world.load_blocks()
    left = []
    for _ in range(2):
        world.now += 8.0
        while world.alarm <= world.now:
            world.ring()
        left.append([each.function for each in world.loads])
    assert list(world.starting.values()) == ["virtual:0"]
    # The request has moved to f@1, and a worker needs the blocks of that function.
    assert left == [[], ["f@1"]]
    world.settle()
    assert isinstance(world.answers[request], Reply)


def test_a_request_without_capacity_for_a_worker_goes_to_a_device():
    world = known(cpu_s=0.01, device_s=0.5, workers_max=1)
    assert serve(world, 0.01) == "workers"
    world.deploy(spec("g", 1, [("g-own", 10)]))
    world.arrive("g")
    world.settle_processes()
    for _ in range(3):
        world.arrive()
    world.settle_processes()
    assert not world.state.functions["f@1"].queue
    assert world.devices.running
    world.settle()
    assert {type(each) for each in world.answers.values()} == {Reply}


def test_an_executor_starts_for_a_request_that_lacks_a_worker_when_the_backoff_of_its_device_is_over():
    world = Watched(devices=(device(),), memory_bytes=15)
    world.deploy(either(run_s=0.5, max_workers=1, timeout_s=100.0))
    world.deploy(spec("g", 1, [("g-weights", 100)], profile=profiled(0.5), timeout_s=1000.0))
    world.arrive()
    world.settle_processes()
    world.now += 0.9
    world.settle()
    world.arrive("g")
    world.settle_processes()
    world.die(next(iter(world.devices.executors)))
    request = world.arrive()
    world.settle_processes()
    while request not in world.answers:
        if world.devices.running:
            world.finish_on_device()
        else:
            world.ring()
            world.settle_processes()
    assert isinstance(world.answers[request], Reply)


def test_an_executor_that_nobody_needs_is_replaced_for_a_request_that_waits_for_a_worker_that_hangs():
    world = Watched(devices=(device(),), device_isolation="tenant")
    world.deploy(either(run_s=0.5, max_workers=1, timeout_s=100.0))
    world.deploy(spec("g", 1, [("g-weights", 100)], device="pool", tenant="u"))
    world.arrive()
    world.settle_processes()
    world.now += 0.9
    world.settle()
    world.now += 60
    world.arrive("g")
    world.settle()
    assert [each.owner for each in world.state.pool.devices.values()] == [("u", None)]
    hung = world.arrive()
    world.settle_processes()
    behind = world.arrive()
    while behind not in world.answers:
        if world.devices.running:
            world.finish_on_device()
        else:
            world.ring()
            world.settle_processes()
    assert isinstance(world.answers[behind], Reply)
    assert hung in world.open


def test_a_request_whose_worker_dies_goes_to_a_device():
    world = known(cpu_s=0.01, device_s=0.5)
    request = world.arrive()
    world.settle_processes()
    world.die(next(iter(world.running.values())).worker)
    assert [run.requests for run in world.devices.running.values()] == [(request,)]
    world.settle()
    assert isinstance(world.answers[request], Reply)


def test_a_request_whose_executor_dies_goes_to_a_worker():
    world = known(cpu_s=0.5, device_s=0.1)
    request = world.arrive()
    world.die(min(world.devices.executors))
    world.settle_processes()
    assert [run.requests for run in world.running.values()] == [(request,)]
    world.settle()
    assert isinstance(world.answers[request], Reply)


def test_waiting_requests_leave_devices_that_back_off():
    world = known(cpu_s=0.5, device_s=0.01)
    requests = [world.arrive() for _ in range(4)]
    world.die(min(world.devices.executors))
    assert not world.state.functions["f:program@1"].queue
    world.settle()
    assert {type(world.answers[each]) for each in requests} == {Reply}


def test_a_function_too_large_for_the_devices_runs_in_workers():
    world = World(devices=(device(0, SIZE + (700_000)),))
    world.deploy(spec("f", 1, [("f-weights", 2 << 20)], device="any"))
    assert [serve(world, 0.1) for _ in range(2)] == ["workers"] * 2


def test_a_request_too_large_for_the_devices_runs_in_a_worker():
    world = known(cpu_s=0.5, device_s=0.1)
    request = world.arrive()
    run = next(iter(world.devices.running.values()))
    failure = RunFailure(request, "ActivationsError", "too large")
    del world.devices.running[run.run]
    world.send(RunEnded(run.executor, run.run, (failure,)))
    world.settle_processes()
    assert [each.requests for each in world.running.values()] == [(request,)]
    world.settle()
    assert isinstance(world.answers[request], Reply)


def too_large(world: World, request: int) -> None:
    """Let the device refuse the run of this request, which has no other request."""
    [run] = world.devices.running.values()
    assert run.requests == (request,)
    del world.devices.running[run.run]
    world.send(RunEnded(run.executor, run.run, (RunFailure(request, "ActivationsError", "too large"),)))


def test_a_request_too_large_for_the_devices_waits_for_the_end_of_the_backoff_of_its_function():
    world = known(cpu_s=0.5, device_s=0.1)
    first = world.arrive()
    too_large(world, first)
    world.settle_processes()
    second = world.arrive()
    [run] = world.running.values()
    world.die(run.worker)
    assert world.state.functions["f@1"].backoff_until > world.now
    assert [run.requests for run in world.devices.running.values()] == [(second,)], "the first one must not return"
    too_large(world, second)
    while len(world.answers) < second:
        world.ring()
        world.settle()
    assert all(isinstance(world.answers[request], Reply) for request in (first, second))


def test_requests_whose_worker_takes_too_much_memory_while_it_starts_go_to_a_device():
    world = World(devices=(device(),), memory_bytes=400 << 20)
    world.deploy(either(run_s=None))
    request = world.arrive()
    world.load_blocks()
    [worker] = world.starting
    world.send(MemoryMeasured(((worker, 600 << 20),)))
    world.settle_processes()
    world.settle()
    assert world.answers[request] == Reply(request, "f@1", "disk")


@pytest.mark.parametrize("has_handler", [False, True])
def test_a_function_whose_program_is_loaded_only_for_devices_is_tried_in_a_worker(has_handler):
    world = World(devices=(device(),))
    function = spec("f", 1, [("weights", 1000)], device="any", has_handler=has_handler)
    part = structs.replace(function, id=program_id("f@1"), name=program_name("f"), has_handler=False)
    world.deploy(part, on_trial=True)
    world.settle()
    world.blobs["f@1"], world.stores["f@1"], world.families["f@1"] = ("weights",), function.store, ("t", "f@1")
    world.send(Deployed(function, on_trial=True))
    world.settle()
    assert [each.warm_up for each in of(world, StartWorker)] == [True]


def test_a_refused_run_on_a_device_does_not_count_as_a_fast_one():
    world = known(cpu_s=0.5, device_s=0.1)
    times = world.state.functions["f:program@1"].pool.times
    before = copy.deepcopy(times)
    request = world.arrive()
    [run] = world.devices.running.values()
    del world.devices.running[run.run]
    world.now += 0.001
    world.send(RunEnded(run.executor, run.run, (RunFailure(request, "CallerError", "wrong sizes"),)))
    assert isinstance(world.answers[request], Refuse)
    assert times == before


def test_a_reserved_device_is_free_again_when_the_request_that_waited_for_it_is_cancelled():
    world = known(cpu_s=0.05, device_s=0.5)
    world.deploy(spec("h", 1, [("h-weights", 10)], device="pool", tenant="u"))
    world.now += 100.0
    leaving = world.arrive("h")
    world.load_blocks()
    reserved = world.state.pool.devices["virtual:0"]
    assert (reserved.next_owner, len(world.stopping)) == (("u", None), 1)
    world.send(Cancelled(leaving))
    world.settle_processes()
    assert (reserved.executor, reserved.next_owner) == (None, None)
    hung = world.arrive()
    world.settle_processes()
    assert [run.requests for run in world.running.values()] == [(hung,)]
    waits = world.arrive()
    while not world.starting and world.now < 200.0:
        world.ring()
    world.settle_processes()
    assert [run.requests for run in world.devices.running.values()] == [(waits,)]


def test_a_device_that_another_tenant_may_still_keep_is_not_chosen():
    world = known(cpu_s=2.0, device_s=0.1)
    world.deploy(spec("h", 1, [("h-weights", 10)], device="pool", tenant="u"))
    world.now += 100.0
    world.arrive("h")
    world.settle_processes()
    world.now += 0.1
    world.finish_on_device()
    for _ in range(2):
        world.arrive("h")
    request = world.arrive("f")
    world.settle_processes()
    assert [run.requests for run in world.running.values()] == [(request,)], world.state.functions["f@1"].estimates


def test_without_devices_the_function_runs_in_workers():
    world = World()
    world.deploy(either())
    assert [serve(world, 0.1) for _ in range(2)] == ["workers"] * 2
    assert world.state.functions["f@1"].estimates is None


def test_waiting_and_new_requests_of_an_unloaded_function_are_refused_and_its_run_is_answered():
    world = known()
    running, waiting = world.arrive(), world.arrive()
    world.manage(UnloadAsked("f@1"))
    late = world.arrive()
    world.settle()
    answers = [world.answers[each] for each in (running, waiting, late)]
    assert isinstance(answers[0], Reply)
    assert [each.message for each in answers[1:]] == ["function f@1 is unloaded; load it first"] * 2
    assert {each.function for each in answers} == {"f@1"}


def test_the_queues_for_workers_and_for_devices_both_count_against_the_queue_limit():
    world = World(devices=(device(),))
    world.deploy(either(queue_limit=3))
    requests = [world.arrive() for _ in range(6)]
    waiting = {id_: list(world.state.functions[id_].queue) for id_ in ("f@1", "f:program@1")}
    assert all(waiting.values())
    refused = [each for each in requests if each in world.answers]
    assert refused == [each for each in requests if each not in waiting["f@1"] + waiting["f:program@1"]]
    assert len(refused) == 3
    assert {(each.error, each.message) for each in of(world, Refuse)} == {
        ("OverloadedError", "function f@1 already has 3 requests waiting")
    }


def test_devices_serve_a_function_whose_choice_between_workers_and_devices_fails(monkeypatch):
    world = known(cpu_s=0.5, device_s=0.1)
    monkeypatch.setattr("overwinter.scheduler.policies.worker_or_device.sooner", lambda estimates: 1 / 0)
    requests = [world.arrive(), world.arrive()]
    assert world.state.functions["f@1"].fault
    world.settle()
    assert {type(world.answers[each]) for each in requests} == {Reply}
    known_of = Published(world.scheduler.cycle).function("f@1", world.now)
    assert (known_of.state, known_of.fault) == ("awake", "")


def test_readers_see_one_function_and_both_estimates():
    world = known(cpu_s=0.5, device_s=0.1)
    published = Published(world.scheduler.cycle)
    seen = published.function("f@1", world.now)
    assert (seen.devices, seen.state, seen.fault) == (("virtual:0",), "awake", "")
    detail = published.detail("f@1", world.now)
    assert "virtual:0" in detail.last_choice
    assert "workers" in detail.last_choice
    assert detail.pool.last_device.startswith("virtual:0")
    assert published.default("f:program") is None
    assert published.families() == {("t", "f"): "f@1"}
    world.agree()
    tally = world.statistics.tallies["f"]
    assert (tally.requests, tally.answered, tally.runs) == (2, 2, 2)
    assert world.statistics.calls.requests == 0
    assert sum(world.statistics.versions["f@1"].durations.counts) == 2


@pytest.mark.parametrize("binding", ["native", "infless"])
def test_policies_that_bind_functions_before_their_first_run_serve_them_too(binding):
    world = World(devices=(device(),), policy=Policy(device_binding=binding, keep_alive_s=5.0))
    for name in "fgh":
        world.deploy(either(name))
    requests = [world.arrive(name) for name in "fghfgh"]
    world.settle()
    assert {type(world.answers[each]) for each in requests} == {Reply}
    assert of(world, StartWorker)

"""Executors of devices that hang or die: what that costs their device, their function and their requests."""

import pytest

from overwinter.core.actions import (
    Evict,
    LoadBlocks,
    LoadFinished,
    Reply,
    RunOnDevice,
    StopWorker,
    Unbind,
)
from overwinter.core.events import Cancelled, LoadAsked, Removed, UnloadAsked
from overwinter.scheduler import shared_runs
from overwinter.scheduler.replacement import START_MAX_S, TIME_SLICE_STARTS
from tests.scheduler.test_device_ahead import loaded
from tests.scheduler.test_device_sharing import arrive_during_a_run, variant, world_of
from tests.scheduler.test_devices import device, of, pooled, served
from tests.scheduler.world import World, spec


def running(*functions, **config) -> World:
    """Return a world in which the first of these functions runs on the only device."""
    world = World(devices=(device(),), **config)
    for each in functions:
        world.deploy(each)
    world.arrive(functions[0].name)
    world.settle_processes()
    return world


def kills(world) -> list[bool]:
    return [each.kill for each in of(world, StopWorker)]


def until_killed(world) -> None:
    while True not in kills(world):
        world.ring()


def backs_off(world) -> bool:
    return world.state.functions["f@1"].backoff_until > world.now


def known(world):
    return world.state.pool.devices["virtual:0"]


def test_an_executor_that_does_not_stop_is_killed():
    world = World(devices=(device(),))
    for name, tenant in (("f", "t"), ("g", "u")):
        world.deploy(pooled(name, tenant=tenant))
    served(world, "f")
    request = world.arrive("g")
    world.load_blocks()
    assert kills(world) == [False]
    until_killed(world)
    assert kills(world) == [False, True]
    assert request in world.open
    world.settle()
    assert isinstance(world.answers[request], Reply)


def test_an_executor_that_is_stopping_is_told_nothing_of_functions_that_are_unloaded():
    world = World(devices=(device(),))
    for name, tenant in (("f", "t"), ("g", "u")):
        world.deploy(pooled(name, tenant=tenant))
    served(world, "f")
    world.arrive("g")
    world.load_blocks()
    assert world.stopping
    world.send(UnloadAsked("f@1"))
    assert not of(world, Unbind)


def test_an_executor_whose_start_hangs_is_killed_and_counts_against_its_device():
    world = World(devices=(device(),), start_timeout_s=5.0)
    world.deploy(pooled(timeout_s=1000.0))
    request = world.arrive()
    world.load_blocks()
    for failures in (1, 2, 3):
        while len(kills(world)) < failures:
            world.ring()
        assert known(world).failures == failures
        world.die(min(world.stopping))
    assert kills(world) == [True] * 3
    assert "virtual:0: its executor did not start in time" in world.answers[request].message


def test_a_run_that_hangs_costs_its_device_a_failure_and_its_function_a_backoff():
    world = World(devices=(device(),))
    world.deploy(pooled(timeout_s=5.0))
    served(world, "f")
    while world.alarm < 8.0:
        world.ring()
    world.now = 8.0
    # The check of the function's rate sets its timer to the deadline, after the executor's timer was set.
    hung = world.arrive("f")
    until_killed(world)
    for named in ("f@1", "virtual:0", "5 s", "timeout_s"):
        assert named in world.answers[hung].message
    assert (known(world).failures, known(world).fault) == (1, "a run of function f@1 hung")
    assert backs_off(world)
    served(world, "f")
    world.calm()
    assert isinstance(world.answers[max(world.answers)], Reply)
    assert (known(world).failures, known(world).fault) == (0, "")


def deaths(world, lost_blocks=False) -> int:
    """Let runs of `f` kill their executors until it backs off; return how many."""
    count = 0
    while not backs_off(world):
        if not world.open:
            world.arrive("f")
        world.settle_processes()
        while not world.devices.running:
            world.ring()
            world.settle_processes()
        world.die(min(world.devices.executors), lost_blocks=lost_blocks)
        count += 1
    return count


@pytest.mark.parametrize(("lost_blocks", "count"), [(False, 2), (True, 3)])
def test_a_function_backs_off_when_its_executors_die_twice_not_counting_the_first_loss_of_blocks(lost_blocks, count):
    world = running(pooled())
    assert deaths(world, lost_blocks) == count
    assert len(of(world, LoadBlocks)) == (count if lost_blocks else 1)
    # A run that ends well makes up for that.
    world.calm()
    served(world, "f")
    world.calm()
    assert deaths(world, lost_blocks) == count


def test_blocks_that_are_lost_again_after_a_good_run_do_not_count_against_their_function():
    world = running(pooled())
    for _ in range(2):
        world.die(min(world.devices.executors), lost_blocks=True)
        world.calm()
        world.arrive("f")
        world.settle_processes()
    world.die(min(world.devices.executors), lost_blocks=True)
    assert deaths(world) == 2
    assert all(isinstance(each, Reply) for each in list(world.answers.values())[:2])


def test_a_block_that_several_executors_miss_is_no_repeated_failure():
    world = World(devices=tuple(map(device, range(3))))
    world.deploy(pooled(max_batch=1))
    requests = []
    for _ in range(3):
        requests.append(world.arrive("f"))
        world.settle_processes()
    assert len(world.devices.running) == 3
    for executor in sorted(world.devices.executors):
        world.die(executor, lost_blocks=True)
    function = world.state.functions["f@1"]
    assert (function.failures, function.backoff_until) == (0, 0.0)
    world.calm()
    assert all(isinstance(world.answers[each], Reply) for each in requests)


def test_functions_that_shared_the_run_of_an_executor_that_died_have_not_failed():
    world = world_of(variant("f"), variant("g"))
    waiting = arrive_during_a_run(world, "f", "g")
    assert of(world, RunOnDevice)[-1].functions == ("f@1", "g@1")
    world.die(min(world.devices.executors))
    world.calm()
    assert {type(world.answers[each]) for each in waiting} == {Reply}
    # While `is_suspect` holds for them, they share no runs.
    waiting = arrive_during_a_run(world, "f", "g")
    world.calm()
    assert of(world, RunOnDevice)[-1].functions == ()
    assert deaths(world) == 2


@pytest.mark.parametrize("event", [Cancelled, Removed])
def test_a_run_for_which_nobody_waits_is_not_repeated_when_its_executor_dies(event):
    world = running(pooled(), pooled("g"))
    [(request,)] = [run.requests for run in world.devices.running.values()]
    world.send(event(request if event is Cancelled else "f@1"))
    world.die(min(world.devices.executors))
    world.calm()
    served(world, "g")
    world.calm()
    assert [run.function for run in of(world, RunOnDevice)] == ["f@1", "g@1"]


def test_a_request_of_a_removed_function_expires_while_its_run_continues():
    world = World(devices=(device(),))
    world.deploy(pooled(timeout_s=1000.0))
    request = world.arrive(deadline=3.0)
    world.settle_processes()
    world.send(Removed("f@1"))
    while request not in world.answers:
        world.ring()
    assert world.answers[request].error == "DeadlineError"
    assert (kills(world), len(world.devices.running)) == ([], 1)


def test_after_a_preparation_that_lacks_blocks_the_run_behind_it_has_its_blocks_loaded_again():
    world = loaded(pooled("f", 1000), pooled("g", 1000))
    world.arrive("f")
    world.ready()
    world.finish_on_device()
    [executor] = world.devices.preparing
    request = world.arrive("f")
    world.die(executor, lost_blocks=True)
    assert [each.function for each in of(world, Evict)] == ["g@1"]
    # Those of the run that was ordered behind it may be missing, too.
    assert [each.function for each in world.loads] == ["f@1"]
    world.settle()
    assert isinstance(world.answers[request], Reply)
    assert known(world).failures == 0


def long_run(*others, **config) -> tuple[World, int]:
    """Return a world in which the only device runs a request of `f` with a long timeout, and that request."""
    world = running(pooled(timeout_s=3600.0), *others, drain_timeout_s=5.0, **config)
    [(request,)] = [run.requests for run in world.devices.running.values()]
    return world, request


def pass_the_limit_for_a_cancelled_request(world) -> float:
    """Cancel a request of `g` that waits for the device, and pass the limit that `f` got for it; return the limit."""
    waiting = world.arrive("g")
    world.load_blocks()
    while (at := known(world).operation.drain_until) == float("inf"):
        world.ring()
    world.send(Cancelled(waiting))
    world.now = at + 1.0
    return at


def test_a_limit_for_a_cancelled_request_does_not_end_a_run_early_when_its_function_is_unloaded():
    world, request = long_run(pooled("g", tenant="u", timeout_s=3600.0), device_isolation="tenant")
    at = pass_the_limit_for_a_cancelled_request(world)
    world.send(UnloadAsked("f@1"))
    until_killed(world)
    assert world.now == at + 6.0
    assert world.answers[request].error == "OverloadedError"


@pytest.mark.parametrize(
    ("events", "error", "why"),
    [
        ([Removed], "NotFoundError", "function f@1 was removed"),
        ([UnloadAsked], "OverloadedError", "function f@1 is unloaded; load it first"),
        ([UnloadAsked, LoadAsked], "OverloadedError", "function f@1 was unloaded"),
    ],
)
def test_a_run_of_a_removed_or_unloaded_function_ends_within_the_drain_timeout(events, error, why):
    world, request = long_run(pooled("g"))
    left = world.now
    for event in events:
        world.send(event("f@1"))
    waiting = world.arrive("g")
    until_killed(world)
    assert world.now == left + 5.0
    refused = world.answers[request]
    assert (refused.error, refused.message) == (error, f"{why}, and its run did not end within 5 s")
    # That is no failure of the device.
    assert known(world).failures == 0
    world.settle()
    assert isinstance(world.answers[waiting], Reply)


@pytest.mark.parametrize("end", ["hangs", "dies", "breaks"])
def test_how_a_run_ends_is_no_failure_of_a_function_that_was_unloaded_and_loaded_since(end):
    world = running(pooled(timeout_s=1.0 if end == "hangs" else 3600.0))
    function = world.state.functions["f@1"]
    if end != "hangs":
        # The second such end would be a failure.
        world.die(min(world.devices.executors))
        run_of(world, "f@1")
    failures = function.failures
    world.send(UnloadAsked("f@1"))
    world.send(LoadAsked("f@1"))
    if end == "hangs":
        until_killed(world)
    elif end == "dies":
        world.die(min(world.devices.executors))
    else:
        broken(world)
    assert (of(world, LoadFinished), function.failures, backs_off(world)) == ([], failures, False)
    world.settle_processes()
    assert [each.error for each in of(world, LoadFinished)] == [None]


@pytest.mark.parametrize("tenant", ["t", "u"])
def test_a_run_keeps_blocks_in_the_host_store_from_another_tenant_only_for_the_drain_timeout(tenant):
    waits = spec("waits", blobs=[("w", 10)], tenant=tenant, timeout_s=500.0)
    world, request = long_run(waits, host_bytes=600_000)
    waiting = world.arrive("waits")
    while world.state.releasing is None:
        world.ring()
    began = world.now
    while waiting not in world.answers and not kills(world):
        world.ring()
    if tenant == "t":
        assert (world.answers[waiting].error, kills(world), request in world.open) == ("DeadlineError", [], True)
        return
    assert (world.now, kills(world)) == (began + 5.0, [True])
    why = "the blocks of function f@1 had to leave the host store for another tenant"
    assert world.answers[request].message == f"{why}, and its run did not end within 5 s"
    assert (world.answers[request].error, backs_off(world)) == ("OverloadedError", False)
    world.settle()
    assert isinstance(world.answers[waiting], Reply)


def test_a_request_whose_blocks_must_leave_for_its_own_tenant_runs_again_when_its_shared_run_is_ended():
    world = world_of(variant("f", timeout_s=3600.0), variant("g", timeout_s=3600.0), host_bytes=500_020)
    world.deploy(spec("waits", blobs=[("w", 100)], timeout_s=1000.0))
    first, second = arrive_during_a_run(world, "f", "g")
    world.arrive("waits")
    while world.state.releasing is None:
        world.ring()
    assert world.state.releasing == "f@1"
    world.send(Removed("g@1"))
    until_killed(world)
    assert "was removed, and its run did not end within 30 s" in world.answers[second].message
    world.calm()
    assert isinstance(world.answers[first], Reply)


def test_a_request_that_shares_a_run_with_a_removed_function_runs_again():
    world = world_of(variant("f", timeout_s=3600.0), variant("g", timeout_s=3600.0))
    first, second = arrive_during_a_run(world, "f", "g")
    assert of(world, RunOnDevice)[-1].functions == ("f@1", "g@1")
    world.send(Removed("f@1"))
    until_killed(world)
    assert "was removed, and its run did not end within 30 s" in world.answers[first].message
    world.settle()
    assert isinstance(world.answers[second], Reply)


def test_a_run_whose_time_slice_is_over_ends_within_the_drain_timeout_if_another_tenant_waits():
    world, request = long_run(pooled("g", tenant="u", timeout_s=3600.0))
    ready_at, time_slice_s = known(world).executor.ready_at, TIME_SLICE_STARTS * world.state.pool.start_s
    waiting = world.arrive("g")
    world.load_blocks()
    until_killed(world)
    assert world.now == ready_at + time_slice_s + 5.0
    refused = world.answers[request]
    assert refused.error == "OverloadedError"
    assert refused.message == "the device of function f@1 was needed by others, and its run did not end within 5 s"
    assert (known(world).failures, backs_off(world)) == (0, False)
    # The tenant that waited gets the device, although the other one waits again.
    world.arrive("f", priority=1)
    world.settle()
    assert [each.function for each in of(world, RunOnDevice)][:2] == ["f@1", "g@1"]
    assert isinstance(world.answers[waiting], Reply)


def test_a_long_run_continues_while_no_other_tenant_waits_for_the_device():
    world, request = long_run(pooled("g", tenant="u", timeout_s=3600.0))
    pass_the_limit_for_a_cancelled_request(world)
    world.arrive("f")
    assert (kills(world), request in world.open) == ([], True)
    # The run is ended as soon as a request of another tenant waits.
    world.arrive("g")
    assert (kills(world), request in world.open) == ([True], False)


def test_a_tenant_with_several_waiting_functions_drains_only_one_device():
    world = World(devices=(device(0), device(1)), drain_timeout_s=5.0)
    for name, tenant in (("f", "t"), ("g", "t"), ("h", "u"), ("i", "u")):
        world.deploy(pooled(name, tenant=tenant, timeout_s=3600.0))
    for name in "fghi":
        world.arrive(name)
        world.settle_processes()
    assert len(world.devices.running) == 2
    until_killed(world)
    assert (kills(world), len(world.devices.running)) == ([True], 2)


def broken(world) -> None:
    """Let the oldest run break its device, whose executor then ends."""
    run = next(iter(world.devices.running.values()))
    world.finish_on_device(run.requests, fault="an illegal address")
    assert world.stopping == {run.executor}
    assert not world.devices.running
    world.die(run.executor, reason="exit 0")


def run_of(world, id_) -> None:
    """Go on until a function runs on a device."""
    while all(each.function != id_ for each in world.devices.running.values()):
        world.settle_processes()
        if not world.devices.running:
            world.ring()


def test_a_run_that_breaks_its_device_fails_and_counts_against_no_other_function():
    world = World(devices=(device(),))
    for name, tenant in (("f", "t"), ("g", "t"), ("h", "u")):
        world.deploy(pooled(name, 100_000, tenant=tenant, timeout_s=1000.0))
    served(world, "f", "g")
    for number in (1, 2):
        request = world.arrive("f")
        run_of(world, "f@1")
        waits = world.arrive("g")
        broken(world)
        assert world.answers[request].error == "ProgramError"
        assert waits in world.open
        assert world.state.functions["f@1"].failures == number
        assert world.state.functions["g@1"].failures == 0
        assert backs_off(world) == (number == 2)
        assert known(world).blamed == {"f@1": "t"}
        assert (known(world).failures, known(world).fault) == (1, "an illegal address")
        if number == 1:
            # An answer would clear what is counted.
            world.send(Cancelled(waits))
    run_of(world, "g@1")
    world.settle()
    assert isinstance(world.answers[waits], Reply)
    assert known(world).blamed == {}


def test_a_tenant_whose_runs_did_not_fail_waits_for_a_device_that_others_took_out_of_service():
    world = World(devices=(device(),), device_isolation="none")
    for name, tenant in (("f", "t"), ("g", "u"), ("h", "v"), ("k", "w")):
        world.deploy(pooled(name, 100_000, tenant=tenant, timeout_s=1000.0))
    served(world, "f", "g", "h", "k")
    for name in "fgh":
        world.arrive(name)
        run_of(world, f"{name}@1")
        broken(world)
    assert known(world).state(world.now) == "out"
    refused, waits = world.arrive("f"), world.arrive("k")
    assert world.answers[refused].error == "WorkerError"
    assert waits in world.open
    run_of(world, "k@1")
    world.settle()
    assert isinstance(world.answers[waits], Reply)
    assert (known(world).failures, known(world).blamed) == (0, {})
    again = world.arrive("f")
    world.settle()
    assert isinstance(world.answers[again], Reply)


def test_good_runs_between_runs_that_break_a_device_clear_no_failures_for_a_while():
    world = World(devices=(device(),))
    world.deploy(pooled("f", 100_000, timeout_s=1000.0))
    served(world, "f")
    function = world.state.functions["f@1"]
    for number in (1, 2, 3):
        request = world.arrive("f")
        run_of(world, "f@1")
        broken(world)
        assert world.answers[request].error == "ProgramError"
        assert (function.failures, backs_off(world)) == (number, number > 1)
        request = world.arrive("f")
        run_of(world, "f@1")
        world.settle()
        assert (type(world.answers[request]), function.failures) == (Reply, number)
    for _ in range(shared_runs.SUSPECT_RUNS + 1):
        served(world, "f")
    assert function.failures == 0


def test_functions_whose_shared_run_breaks_a_device_are_suspect_and_have_not_failed():
    world = world_of(variant("f"), variant("g"))
    arrive_during_a_run(world, "f", "g")
    [run] = world.devices.running.values()
    assert run.functions == ("f@1", "g@1")
    broken(world)
    functions = [world.state.functions[id_] for id_ in run.functions]
    assert [each.failures for each in functions] == [0, 0]
    assert all(shared_runs.is_suspect(each) for each in functions)


def test_starts_that_a_tenant_delays_lengthen_time_slices_only_up_to_a_limit():
    world, _ = long_run(pooled("g", tenant="u", timeout_s=3600.0))
    world.state.pool.start_s = 100.0
    ready_at = known(world).executor.ready_at
    world.arrive("g")
    world.load_blocks()
    until_killed(world)
    assert world.now == ready_at + TIME_SLICE_STARTS * START_MAX_S + 5.0

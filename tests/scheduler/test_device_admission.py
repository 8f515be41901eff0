"""Which devices get an executor for whom, and which executors are replaced."""

from math import inf

import pytest

from overwinter.core.actions import Reply, RunOnDevice, StartExecutor, StopWorker
from overwinter.core.events import Cancelled, Removed
from overwinter.scheduler import device_admission
from overwinter.scheduler.device_order import behind_s
from overwinter.scheduler.replacement import time_slice_ends
from overwinter.scheduler.victims import KEPT_FOR_TENANT_S
from tests.scheduler.test_devices import device, of, pooled, served
from tests.scheduler.world import World

RUN_S = 0.3


def world_of(number, tenants="tuv", **config) -> World:
    """Return a world with this many devices, and for each tenant a function with the tenant's name."""
    world = World(devices=tuple(map(device, range(number))), **config)
    for tenant in tenants:
        world.deploy(pooled(tenant, 1000, tenant=tenant, timeout_s=1000.0))
    return world


def answered(world, name) -> None:
    world.now += 1.0
    world.arrive(name)
    world.settle_processes()
    world.now += RUN_S
    world.settle()


def stopped(world) -> list[str]:
    """Return the devices whose executors were stopped."""
    by_id = {each.executor: each.device for each in of(world, StartExecutor)}
    return [by_id[each.worker] for each in of(world, StopWorker)]


def started(world) -> list[tuple[str, str]]:
    return [(each.device, each.tenant) for each in of(world, StartExecutor)]


def test_a_further_executor_starts_where_waiting_takes_longer_than_a_start():
    world = world_of(3)
    for tenant in "tuvtt":
        answered(world, tenant)
    world.now += KEPT_FOR_TENANT_S
    # The device of u has been idle for longest.
    world.arrive("t")
    waiting = 0
    while not world.stopping:
        world.arrive("t")
        waiting += 1
    start_s = world.state.pool.start_s
    assert (waiting - 1) * RUN_S <= start_s < waiting * RUN_S
    assert stopped(world) == ["virtual:1"]
    world.settle()
    assert started(world) == [("virtual:0", "t"), ("virtual:1", "u"), ("virtual:2", "v"), ("virtual:1", "t")]
    assert {type(each) for each in world.answers.values()} == {Reply}


def test_the_only_device_of_a_tenant_that_used_it_lately_is_kept_for_it():
    world = world_of(2)
    for tenant in "tu":
        answered(world, tenant)
    used_at = world.now
    while not stopped(world) and world.now < used_at + 2 * KEPT_FOR_TENANT_S:
        while len(world.state.functions["t@1"].queue) < 100:
            world.arrive("t")
        world.now += RUN_S
        if world.devices.running:
            world.finish_on_device()
    assert stopped(world) == ["virtual:1"]
    assert world.now >= used_at + KEPT_FOR_TENANT_S


@pytest.mark.parametrize("end", ["dies", "hangs"])
def test_a_tenant_whose_executor_ended_in_a_run_waits_for_that_device_and_takes_none_of_another_tenant(end):
    world = World(devices=(device(0), device(1)), backoff_first_s=10.0)
    for tenant in "tu":
        world.deploy(pooled(tenant, 1000, tenant=tenant, timeout_s=30.0))
        answered(world, tenant)
    world.deploy(pooled("other", 1000, tenant="t"))
    request = world.arrive("t")
    failed_at = world.now
    if end == "dies":
        world.die(next(iter(world.devices.running.values())).executor)
    else:
        while world.open:
            world.ring()
        assert world.answers[request].error == "DeadlineError"
        [killed] = world.stopping
        world.die(killed)
        failed_at = world.now
    world.arrive("other")
    world.settle_processes()
    assert stopped(world).count("virtual:1") == 0
    while not world.devices.running:
        world.ring()
        world.settle_processes()
    assert world.now >= failed_at + 10.0
    assert started(world) == [("virtual:0", "t"), ("virtual:1", "u"), ("virtual:0", "t")]
    # A tenant that has used no device gets the idle one without waiting.
    world.deploy(pooled("v", 1000, tenant="v"))
    answered(world, "v")
    assert started(world)[-1] == ("virtual:1", "v")


def test_the_only_device_of_a_tenant_is_not_taken_for_a_function_whose_tenant_has_one():
    world = World(devices=(device(0), device(1)), device_isolation="function", drain_timeout_s=30.0)
    for name, tenant in (("victim", "v"), *((f"f{number}", "t") for number in range(4))):
        world.deploy(pooled(name, 1000, tenant=tenant, timeout_s=1000.0))
    answered(world, "victim")
    ends = world.now + 300.0
    while world.now < ends:
        for number in range(4):
            if not world.state.functions[f"f{number}@1"].queue:
                world.arrive(f"f{number}")
        world.arrive("victim")
        world.settle_processes()
        world.now += 1.0
        for run in list(world.devices.running.values()):
            if run.function == "victim@1":
                world.send(world.devices.end(run, (), unplaced=False))
        if world.alarm is not None and world.alarm <= world.now:
            world.ring()
    assert {name for name, tenant in started(world) if tenant == "v"} == {"virtual:0"}
    assert {name for name, tenant in started(world) if tenant == "t"} == {"virtual:1"}
    assert {run.function for run in of(world, RunOnDevice)} == {"victim@1", *(f"f{number}@1" for number in range(4))}


@pytest.mark.parametrize(("isolation", "drained", "tries"), [("tenant", 1, 1), ("function", 4, 5)])
def test_the_length_of_a_step_does_not_grow_with_the_functions_of_a_tenant(isolation, drained, tries, monkeypatch):
    devices, functions = 4, 100
    world = world_of(devices, (), device_isolation=isolation, drain_timeout_s=300.0)
    for number in range(devices):
        world.deploy(pooled(f"holder{number}", 1000, tenant="holder", timeout_s=1000.0))
        world.arrive(f"holder{number}")
    world.settle_processes()
    for number in range(functions):
        # A smaller one each time.
        world.deploy(pooled(f"f{number}", 900 - number, tenant="t", timeout_s=1000.0))
    compared: list[str] = []

    def counted(cycle, device, owner, fitting):
        compared.append(device.config.name)
        return time_slice_ends(cycle, device, owner, fitting)

    monkeypatch.setattr(device_admission, "time_slice_ends", counted)
    world.now += 100.0
    for number in range(functions):
        compared.clear()
        world.arrive(f"f{number}")
        world.settle_processes()
        assert len(compared) == devices * min(tries, number + 1)
    limited = [each for each in world.state.pool.devices.values() if each.operation.drain_until < inf]
    assert len(limited) == drained


def test_a_tenant_with_less_device_time_has_a_longer_time_slice():
    world = World(devices=(device(),), drain_timeout_s=30.0)
    for tenant, timeout_s in (("long", 300.0), ("short", 100.0)):
        world.deploy(pooled(tenant, 1000, tenant=tenant, timeout_s=timeout_s))
    spent = dict.fromkeys(("long", "short"), 0.0)
    while len(started(world)) < 7:
        for tenant in spent:
            if len(world.state.functions[f"{tenant}@1"].queue) < 3:
                world.arrive(tenant)
        world.settle_processes()
        before = world.now
        [run] = world.devices.running.values() or [None]
        if run is None:
            world.ring()
            continue
        if run.function == "short@1":
            world.now += RUN_S
            world.finish_on_device()
        else:
            # The runs of `long` end only with the drain timeout.
            world.ring()
        spent[run.function.partition("@")[0]] += world.now - before
    assert [tenant for _, tenant in started(world)] == ["long", "short"] * 3 + ["long"]
    assert 0.8 < spent["short"] / spent["long"] < 1.25


def world_after_a_long_run() -> World:
    """Return a world with a device, a function of each of two tenants, and a run of the first that took 20 s."""
    world = World(devices=(device(),))
    for tenant in "tu":
        world.deploy(pooled(tenant, 1000, tenant=tenant, timeout_s=300.0))
    world.arrive("t")
    world.settle_processes()
    world.now += 20.0
    world.finish_on_device()
    return world


def test_the_device_time_of_a_tenant_that_removes_its_functions_is_still_counted():
    world = world_after_a_long_run()
    pool, tag = world.state.pool, world.state.pool.finish_tags["t"]
    assert tag == pool.virtual_time + 20.0
    world.send(Removed("t@1"))
    world.settle()
    assert "t" not in world.state.tenants
    answered(world, "u")
    assert pool.finish_tags["t"] == tag
    world.deploy(pooled("t", 1000, tenant="t"))
    assert behind_s(world.scheduler.cycle, "u", "t") == tag - pool.finish_tags["u"] > 0.0
    # Nothing is left of a tenant that is not ahead of the others.
    world.send(Removed("t@1"))
    for _ in range(100):
        answered(world, "u")
    assert pool.virtual_time > tag
    assert set(pool.finish_tags) == {"u"}


def test_a_tenant_with_less_device_time_keeps_its_device_in_short_pauses():
    world = world_after_a_long_run()
    answered(world, "u")
    [executor] = world.devices.executors.values()
    world.arrive("t")
    assert not world.stopping, "the device of the other tenant has been idle for a moment only"
    world.arrive("u")
    world.finish_on_device()
    idle_since, start_s = world.now, world.state.pool.start_s
    while not world.stopping:
        world.ring()
    assert world.stopping == {executor.executor}
    assert world.now >= idle_since + start_s


def test_tenants_whose_requests_always_wait_take_turns_on_too_few_devices():
    world = world_of(1)
    while len(started(world)) < 9:
        for tenant in "tuv":
            if len(world.state.functions[f"{tenant}@1"].queue) < 3:
                world.arrive(tenant)
        world.settle_processes()
        world.now += RUN_S
        if world.devices.running:
            world.finish_on_device()
        else:
            world.ring()
    assert [tenant for _, tenant in started(world)] == list("tuv" * 3)


def test_the_executor_that_was_idle_for_longest_is_replaced():
    world = world_of(2)
    for tenant in "tutvu":
        answered(world, tenant)
    assert stopped(world) == ["virtual:1", "virtual:0"]
    assert started(world)[2:] == [("virtual:1", "v"), ("virtual:0", "u")]


def test_a_tenant_gets_a_larger_device_although_a_smaller_one_serves_it():
    world = World(devices=(device(0), device(1, 4 << 20)))
    for name, size, tenant in (("small", 1000, "t"), ("large", 2 << 20, "t"), ("other", 1000, "u")):
        world.deploy(pooled(name, size, tenant=tenant))
    served(world, "small", "other", "large")
    assert started(world) == [("virtual:0", "t"), ("virtual:1", "u"), ("virtual:1", "t")]


def test_each_waiting_function_gets_an_executor_and_only_one():
    world = World(devices=tuple(map(device, range(4))))
    for name in "fgh":
        world.deploy(pooled(name, 1000, max_batch=1))
        world.arrive(name)
        world.arrive(name)
        world.load_blocks()
    assert len(of(world, StartExecutor)) == 3
    world.arrive("f")
    assert len(of(world, StartExecutor)) == 3


def test_a_function_does_not_wait_for_an_executor_that_starts_on_a_device_too_small_for_it():
    world = World(devices=(device(0), device(1, 4 << 20)))
    world.deploy(pooled("small", 1000))
    world.deploy(pooled("large", 2 << 20))
    request = world.arrive("small")
    world.load_blocks()
    world.send(Cancelled(request))
    world.arrive("large")
    world.load_blocks()
    assert [each.device for each in of(world, StartExecutor)] == ["virtual:0", "virtual:1"]


def test_a_device_that_was_freed_for_a_tenant_goes_to_it():
    world = world_of(1)
    answered(world, "t")
    world.arrive("u")
    world.load_blocks()
    assert world.stopping
    world.arrive("t", priority=1)
    world.settle()
    assert [tenant for _, tenant in started(world)] == ["t", "u", "t"]
    assert {type(each) for each in world.answers.values()} == {Reply}


def test_of_two_devices_the_one_with_fewer_failures_gets_the_executor():
    world = world_of(2)
    answered(world, "t")
    world.die(min(world.devices.executors))
    answered(world, "t")
    assert [name for name, _ in started(world)] == ["virtual:0", "virtual:1"]


def test_functions_for_which_all_devices_are_out_of_service_are_refused_and_others_are_served():
    world = World(devices=(device(0), device(1, 4 << 20), device(2, 4 << 20)), backoff_first_s=10.0)
    world.deploy(pooled("small", 1000, tenant="u"))
    world.deploy(pooled("large", 2 << 20, timeout_s=1000.0))
    answered(world, "small")
    request = world.arrive("large")
    world.load_blocks()
    while request in world.open:
        while not world.starting:
            world.ring()
        world.die(next(iter(world.starting)), reason="no memory")
        world.now += 1.0
    first, second = [world.state.pool.devices[f"virtual:{number}"] for number in (1, 2)]
    assert (first.state(world.now), second.state(world.now)) == ("out", "out")
    sooner = min(first, second, key=lambda each: each.backoff_until)
    refused = world.answers[world.arrive("large")]
    assert refused.message == f"all devices for function large@1 are out of service: {sooner.config.name}: no memory"
    assert refused.retry_after_s == sooner.backoff_until - world.now
    served(world, "small")
    assert of(world, RunOnDevice)[-1].function == "small@1"

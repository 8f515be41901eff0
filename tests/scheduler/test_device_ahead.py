"""Idle devices prepare functions before their first request, and a run ends a preparation early."""

import pytest

from overwinter.core.actions import Evict, PrepareOnDevice, Reply, RunOnDevice, StopWorker, Unbind
from overwinter.core.events import LoadAsked, Removed, UnloadAsked
from overwinter.core.policies import Policy
from overwinter.scheduler import device_ahead
from overwinter.scheduler.ahead import KEEP_S
from overwinter.scheduler.device_ahead import DELAY_MAX_S, IDLE_S, UNPREPARED_S
from overwinter.scheduler.device_runs import INTERRUPTED_S
from tests.scheduler.test_devices import device, of, pooled, served
from tests.scheduler.world import World


def loaded(*functions, **config) -> World:
    """Return a world with these functions in the host store, in which nothing is prepared yet."""
    world = World(**{"devices": (device(),), **config})
    for number, function in enumerate(functions):
        world.now = float(number)
        world.deploy(function, on_trial=True)
        world.settle()
    return world


def prepared(world) -> list[str]:
    return [each.function for each in of(world, PrepareOnDevice)]


def test_an_idle_device_prepares_one_program_at_a_time_the_last_used_first():
    world = loaded(pooled("f"), pooled("g"), pooled("h"))
    world.arrive("f")
    world.ready()
    assert prepared(world) == []
    world.finish_on_device()
    assert prepared(world) == ["h@1"]
    world.end_preparation()
    assert prepared(world) == ["h@1", "g@1"]
    world.end_preparation()
    assert prepared(world) == ["h@1", "g@1"]


def test_functions_with_the_program_of_one_that_has_run_need_no_preparation():
    world = loaded(*(pooled(name, 1000, family="one") for name in "fgh"))
    served(world, "f")
    assert prepared(world) == []


def test_a_run_does_not_wait_for_a_preparation_of_its_function_which_is_not_repeated():
    world = loaded(pooled("f", 1000), pooled("g", 1000))
    world.arrive("f")
    world.ready()
    world.finish_on_device()
    assert world.devices.preparing
    world.arrive("g")
    assert world.devices.running
    world.end_preparation(interrupted=True)
    assert prepared(world) == ["g@1"]
    world.arrive("f")
    world.finish_on_device()
    world.finish_on_device()
    assert [type(each) for each in world.answers.values()] == [Reply] * 3
    # The run of g has prepared it.
    assert prepared(world) == ["g@1"]


def test_an_interrupted_preparation_is_repeated_when_the_device_has_been_idle_for_a_while():
    world = loaded(pooled("f", 1000), pooled("g", 1000))
    world.arrive("f")
    world.ready()
    world.finish_on_device()
    for number in range(5):
        assert bool(world.devices.preparing) == (number == 0)
        world.arrive("f")
        if world.devices.preparing:
            world.end_preparation(interrupted=True)
        world.now += IDLE_S / 2
        world.finish_on_device()
    assert prepared(world) == ["g@1"]
    world.now += IDLE_S
    world.ring()
    assert prepared(world) == ["g@1", "g@1"]
    served(world, "f")
    assert prepared(world) == ["g@1", "g@1"]


def test_nothing_is_prepared_while_a_function_waits():
    sizes = {"f": 500_000, "g": 400_000, "h": 400_000, "k": 1000}
    functions = [pooled(name, size) for name, size in sizes.items()]
    world = loaded(*functions, devices=(device(), device(1)), policy=Policy(device_binding="native"))
    # The last waits for the device of the second.
    for name in "fgh":
        world.arrive(name)
    world.ready()
    world.ready()
    world.finish_on_device()
    assert [run.function for run in of(world, RunOnDevice)] == ["f@1", "g@1"]
    assert prepared(world) == []
    world.finish_on_device()
    assert [run.function for run in of(world, RunOnDevice)] == ["f@1", "g@1", "h@1"]
    assert prepared(world) == ["k@1"]


def test_nothing_is_prepared_for_another_tenant():
    world = loaded(pooled("f"), pooled("g"), pooled("h", tenant="u"))
    world.arrive("f")
    world.ready()
    world.arrive("g")
    world.finish_on_device()
    world.settle()
    assert prepared(world) == []
    # Without isolation executors serve all tenants.
    world = loaded(pooled("f"), pooled("h", tenant="u"), device_isolation="none")
    served(world, "f")
    assert prepared(world) == ["h@1"]


@pytest.mark.parametrize("event", [Removed, UnloadAsked])
def test_an_executor_forgets_a_prepared_function_that_leaves_the_host_store(event):
    world = loaded(pooled("f", 1000), pooled("g", 1000))
    served(world, "f")
    assert prepared(world) == ["g@1"]
    world.send(event("g@1"))
    assert [each.function for each in of(world, Unbind)] == ["g@1"]
    world.send(event("f@1"))
    assert [each.function for each in of(world, Unbind)] == ["g@1", "f@1"]


def test_an_evicted_function_is_unbound_when_it_leaves_the_host_store():
    world = loaded(pooled("f"), pooled("g"))
    served(world, "f", "g")
    assert of(world, RunOnDevice)[-1].evict == ("f@1",)
    world.send(Removed("f@1"))
    assert [each.function for each in of(world, Unbind)] == ["f@1"]


@pytest.mark.parametrize("hangs", [False, True])
def test_a_preparation_that_kills_its_executor_counts_against_no_request_and_no_device(hangs):
    world = loaded(pooled("f", 1000), pooled("g", 1000), start_timeout_s=5.0)
    world.arrive("f")
    world.ready()
    world.finish_on_device()
    [executor] = world.devices.preparing
    if hangs:
        world.now += 10.0
        world.ring()
        world.settle()
    else:
        world.arrive("f")
        world.die(executor)
        [request] = world.state.requests.values()
        assert request.failures == 0
    [known] = world.state.pool.devices.values()
    assert (known.failures, known.fault) == (0, "")
    assert not of(world, Evict)
    served(world, "f", "g")
    assert all(isinstance(each, Reply) for each in world.answers.values())
    assert prepared(world) == ["g@1"]


def test_a_run_waits_at_most_a_second_for_a_preparation_that_does_not_end():
    world = loaded(
        pooled("f", 1000), pooled("g", 1000, tenant="u"), pooled("h", 1000, tenant="u"), device_isolation="none"
    )
    world.arrive("f")
    world.ready()
    world.finish_on_device()
    assert prepared(world) == ["h@1"]
    [hung] = world.devices.preparing
    request, ordered = world.arrive("f"), world.now
    while not of(world, StopWorker):
        world.ring()
    assert world.now == pytest.approx(ordered + INTERRUPTED_S)
    assert [(each.worker, each.kill) for each in of(world, StopWorker)] == [(hung, True)]
    world.settle()
    assert isinstance(world.answers[request], Reply)
    # Nor is another function of this tenant prepared soon.
    world.now += UNPREPARED_S / 2
    world.deploy(pooled("k", 1000, tenant="u"), on_trial=True)
    served(world, "f")
    assert prepared(world) == ["h@1"]
    world.now += UNPREPARED_S / 2
    world.deploy(pooled("m", 1000, tenant="u"), on_trial=True)
    served(world, "f")
    assert prepared(world)[:2] == ["h@1", "k@1"]


@pytest.mark.parametrize(("delay_s", "later"), [(DELAY_MAX_S / 2, ["h@1", "m@1"]), (DELAY_MAX_S * 2, ["h@1"])])
def test_functions_of_a_tenant_whose_preparation_delayed_a_run_for_long_are_not_prepared(delay_s, later):
    world = loaded(pooled("f", 1000), pooled("h", 1000, tenant="u"), device_isolation="none")
    world.arrive("f")
    world.ready()
    world.finish_on_device()
    assert prepared(world) == ["h@1"]
    world.arrive("f")
    world.now += delay_s
    world.end_preparation(interrupted=True)
    world.finish_on_device()
    world.deploy(pooled("m", 1000, tenant="u"), on_trial=True)
    served(world, "f")
    world.now += IDLE_S
    world.ring()
    assert [each for each in dict.fromkeys(prepared(world)) if each in ("h@1", "m@1")] == later


@pytest.mark.parametrize("preparing", [True, False])
def test_an_executor_that_prepares_is_killed_when_another_tenant_gets_the_device(preparing):
    world = loaded(pooled("f"), pooled("g"), pooled("h", tenant="u"))
    world.arrive("f")
    world.ready()
    world.finish_on_device()
    [executor] = world.devices.preparing
    if not preparing:
        world.end_preparation()
    world.now += 60.0
    world.arrive("h")
    assert [(each.worker, each.kill) for each in of(world, StopWorker)] == [(executor, preparing)]


def test_no_function_is_prepared_under_the_policy_nothing():
    world = loaded(pooled("f", 1000), pooled("g", 1000), policy=Policy(device_ahead="nothing"))
    served(world, "f", "g")
    assert prepared(world) == []


def test_a_preparation_is_chosen_among_a_bounded_number_of_functions(monkeypatch):
    suits = device_ahead._suits
    asked: list[str] = []
    monkeypatch.setattr(device_ahead, "CANDIDATES_MAX", 3)
    monkeypatch.setattr(
        device_ahead,
        "_suits",
        lambda cycle, device, each: (asked.append(each.spec.name), suits(cycle, device, each))[1],
    )
    world = loaded(*(pooled(name, 1000) for name in "abcdefgh"))
    world.arrive("a")
    world.ready()
    world.finish_on_device()
    # The most recently used one is on the device.
    assert asked == ["h", "g"]
    assert prepared(world) == ["h@1"]
    asked.clear()
    world.end_preparation()
    assert (asked, prepared(world)) == (["g"], ["h@1", "g@1"])


def run(world: World, name: str) -> None:
    """Let a request be answered, and leave a preparation in progress."""
    request = world.arrive(name)
    while request not in world.answers:
        if world.loads or world.starting:
            world.settle_processes()
        elif world.devices.running:
            world.finish_on_device()
        else:
            world.ring()


def test_other_functions_are_prepared_when_the_pause_after_the_death_of_an_executor_is_over():
    world = loaded(pooled("f", 1000), pooled("g", 1000), pooled("h", 1000))
    run(world, "f")
    [preparing] = world.devices.preparing.values()
    world.die(preparing.executor)
    run(world, "f")
    assert not world.devices.preparing
    world.now += UNPREPARED_S
    world.ring()
    [again] = world.devices.preparing.values()
    assert {again.function, preparing.function} == {"g@1", "h@1"}


def test_a_preparation_that_lacked_a_block_is_repeated_after_its_load_but_not_twice_in_a_row():
    world = loaded(pooled("f", 1000), pooled("g", 1000))
    run(world, "f")
    for repeated in (True, False):
        lose_a_block(world)
        assert [each.function for each in world.devices.preparing.values()] == ["g@1"] * repeated


def lose_a_block(world: World) -> None:
    """Let the preparation of `g` fail because a block is missing, and load the blocks again."""
    [preparing] = world.devices.preparing.values()
    world.die(preparing.executor, lost_blocks=True)
    assert not world.state.functions["g@1"].loaded
    run(world, "f")
    world.manage(LoadAsked("g@1"))
    world.load_blocks()


def test_a_preparation_that_lacks_a_block_is_repeated_again_after_one_that_succeeded():
    world = loaded(pooled("f", 1000), pooled("g", 1000), backoff_first_s=1.0)
    run(world, "f")
    lose_a_block(world)
    world.end_preparation()
    world.now += 100.0
    world.die(next(iter(world.state.pool.executors)))
    world.now += 100.0
    run(world, "f")
    lose_a_block(world)
    assert [each.function for each in world.devices.preparing.values()] == ["g@1"]


def test_a_function_is_prepared_when_its_backoff_is_over():
    world = loaded(pooled("f", 1000), pooled("g", 1000))
    function = world.state.functions["g@1"]
    function.failures, function.backoff_until = 2, world.now + 20.0
    world.scheduler.cycle.timers.arm("g@1", function.backoff_until)
    run(world, "f")
    assert not world.devices.preparing
    while world.now < function.backoff_until:
        world.ring()
    assert [each.function for each in world.devices.preparing.values()] == ["g@1"]


def test_a_device_may_prepare_when_the_pause_of_a_tenant_ends_although_that_of_another_begins():
    world = loaded(pooled("f", 1000), pooled("g", 1000, tenant="u"), pooled("h", 1000), device_isolation="none")
    run(world, "f")
    [preparing] = world.devices.preparing.values()
    pool, cycle = world.state.pool, world.scheduler.cycle
    pool.unprepared_until[{"h@1": "u", "g@1": "t"}[preparing.function]] = world.now
    device_ahead.preparation_failed(cycle, world.state.functions[preparing.function], None)
    [executor] = [device.executor for device in pool.executors.values()]
    executor.may_prepare, executor.preparing = False, None
    device_ahead.check(cycle)
    assert executor.may_prepare or executor.preparing


def test_a_function_that_was_not_used_for_long_is_prepared_when_it_is_used_again():
    world = loaded(pooled("f", 1000), pooled("g", 1000), devices=(device(0), device(1)))
    for name in "fg":
        run(world, name)
    while world.devices.preparing:
        world.end_preparation()
    world.now += KEEP_S + 1
    for _ in range(3):
        world.arrive("f")
    while len(world.state.pool.executors) < 2:
        world.now += 0.05
        world.ring()
        world.arrive("f")
    while world.devices.running or world.starting:
        if world.starting:
            world.settle_processes()
        else:
            world.finish_on_device()
    assert not world.devices.preparing
    run(world, "g")
    assert [each.function for each in world.devices.preparing.values()] == ["g@1"]

"""A function whose rate is too high for its devices gets a further one before a request waits for its blocks."""

import pytest

from overwinter.core.actions import Evict, Explanation, Reply, RunOnDevice
from overwinter.core.events import MemoryPressure, RateForecast, Removed, UnloadAsked
from overwinter.core.policies import Policy
from overwinter.scheduler import replicas
from tests.scheduler.test_devices import device, of, pooled, served
from tests.scheduler.world import World

RUN_S = 0.1


def answered(world, name="f", seconds=RUN_S) -> None:
    world.arrive(name)
    world.settle_processes()
    world.now += seconds
    world.finish_on_device()


def quick(world, times, name="f") -> None:
    """Send requests one after the other, with hardly a pause between them."""
    for _ in range(times):
        answered(world, name)
        world.now += RUN_S / 4


def brought(world) -> list[tuple[str, str, int]]:
    return [(each.function, each.device, each.missing_bytes) for each in of(world, RunOnDevice) if not each.requests]


def two_devices(*functions, **config) -> World:
    """Return a world with these functions, in which both devices have an executor, and the first one has f."""
    world = World(**{"devices": (device(0), device(1)), **config})
    for each in functions:
        world.deploy(each)
    world.arrive("f")
    world.arrive("other")
    world.settle()
    return world


OTHER = pooled("other", 1000)
F = pooled("f", slo_ms=300.0)


def until_brought(world) -> None:
    for _ in range(20):
        if brought(world):
            return
        quick(world, 1)
    raise AssertionError("nothing is brought")


def test_a_function_with_a_high_rate_gets_a_further_device_and_its_first_request_there_moves_nothing():
    world = two_devices(F, OTHER)
    until_brought(world)
    [(function, other, nbytes)] = brought(world)
    assert (function, nbytes) == ("f@1", 600_000)
    holders = {each.config.name for each in world.state.pool.holders(world.state.functions["f@1"])}
    [home] = holders - {other}
    why = [each.why for each in of(world, Explanation) if each.what == "ahead" and "gets its blocks" in each.why]
    assert len(why) == 1
    assert home in why[0]
    world.settle()
    world.arrive("f")
    world.arrive("f")
    last = of(world, RunOnDevice)[-2:]
    assert {run.device for run in last} == {home, other}
    assert [run.missing_bytes for run in last] == [0, 0]
    world.settle()
    quick(world, 10)
    assert len(brought(world)) == 1


@pytest.mark.parametrize(
    "function",
    [pooled("f"), pooled("f", slo_ms=900.0), pooled("f", slo_ms=50.0)],
    ids=["no SLO", "fast enough on demand", "never fast enough"],
)
def test_a_function_gets_no_further_device_if_it_needs_none_or_none_would_help(function):
    world = two_devices(function, OTHER)
    quick(world, 20)
    assert brought(world) == []


@pytest.mark.parametrize(
    "policy",
    [Policy(device_ahead="nothing"), Policy(device_ahead="programs"), Policy(device_binding="native")],
    ids=["nothing", "programs", "native"],
)
def test_other_policies_bring_nothing(policy):
    world = two_devices(F, OTHER, policy=policy)
    quick(world, 20)
    assert brought(world) == []


def forecast(world, rate) -> None:
    """Let a run show how long one takes, and after a pause give the rate of f."""
    answered(world)
    world.calm()
    world.now += 100.0
    world.send(RateForecast("f@1", rate))


ORACLE = Policy(rate="oracle")


@pytest.mark.parametrize(("rate", "number"), [(0.1, 0), (0.3, 1), (3.0, 2), (100.0, 3)])
def test_a_function_gets_as_many_further_devices_as_its_rate_needs(rate, number):
    world = World(devices=tuple(map(device, range(4))), policy=ORACLE)
    for each in (F, *(pooled(name, 1000) for name in "abc")):
        world.deploy(each)
        world.arrive(each.name)
    world.settle()
    world.send(RateForecast("nobody@1", 100.0))
    forecast(world, rate)
    world.settle()
    assert len(brought(world)) == len({name for _, name, _ in brought(world)}) == number


def busy(world) -> None:
    """Let both devices run, and then give a high rate of f."""
    forecast(world, 0.0)
    world.arrive("other")
    world.arrive("f")
    world.send(RateForecast("f@1", 10.0))
    assert [run.function for run in world.devices.running.values()] == ["other@1", "f@1"]


def test_a_function_is_brought_when_a_device_is_idle_for_which_nobody_waits():
    world = two_devices(F, OTHER, policy=ORACLE)
    busy(world)
    assert brought(world) == []
    world.finish_on_device()
    assert len(brought(world)) == 1


def test_nothing_is_brought_of_a_function_that_was_unloaded_during_its_run():
    world = two_devices(F, OTHER, policy=ORACLE)
    busy(world)
    world.send(UnloadAsked("f@1"))
    world.send(RateForecast("f@1", 20.0))
    world.finish_on_device()
    assert brought(world) == []


def test_nothing_is_brought_to_a_device_that_is_too_small():
    world = two_devices(
        pooled("f", 2 << 20, slo_ms=300.0), OTHER, policy=ORACLE, devices=(device(0, 4 << 20), device(1))
    )
    forecast(world, 10.0)
    assert brought(world) == []


def test_nothing_is_brought_behind_a_switch_through_which_a_request_gets_blocks():
    world = World(devices=(device(0, switch="one"), device(1, switch="one"), device(2)), policy=ORACLE)
    for each in (F, OTHER, pooled("third", 1000), pooled("large", 1_000_000)):
        world.deploy(each)
    for name in ("f", "other", "third"):
        world.arrive(name)
    world.settle()
    forecast(world, 0.0)
    world.arrive("large")
    world.settle_processes()
    world.send(RateForecast("f@1", 10.0))
    assert brought(world) == []
    world.finish_on_device()
    world.send(RateForecast("f@1", 10.0))
    assert len(brought(world)) == 1


def test_of_a_family_only_the_function_with_many_requests_is_brought():
    world = two_devices(pooled("f", slo_ms=300.0, family="one"), OTHER, policy=ORACLE)
    world.deploy(pooled("rare", 300_000, slo_ms=150.0, family="one"))
    for _ in range(30):
        world.now += 10.0
        answered(world, "f")
    for _ in range(2):
        world.now += 1000.0
        answered(world, "rare")
    world.calm()
    world.now += 100.0
    world.send(RateForecast("f@1", 1.0))
    world.settle()
    world.send(RateForecast("rare@1", 0.0))
    assert [name for name, _, _ in brought(world)] == ["f@1"]


def test_nothing_is_brought_to_a_device_of_another_tenant():
    world = two_devices(F, pooled("other", 1000, tenant="u"))
    quick(world, 20)
    assert brought(world) == []


def test_a_replica_replaces_less_valuable_functions_only():
    # The other function is on the second device, and leaves no room for f there.
    world = two_devices(F, pooled("other", 700_000, slo_ms=300.0))
    world.now += 1000.0
    world.calm()
    until_brought(world)
    assert of(world, RunOnDevice)[-1].evict == ("other@1",)
    world = two_devices(F, pooled("other", 1_000_000, slo_ms=300.0))
    for _ in range(20):
        answered(world, "other", 0.01)
        quick(world, 1)
    assert brought(world) == []


@pytest.mark.parametrize("event", [Removed, UnloadAsked])
def test_a_function_that_is_removed_or_unloaded_while_it_is_brought_leaves_the_device(event):
    world = two_devices(F, OTHER)
    until_brought(world)
    [(_, name, _)] = brought(world)
    world.send(event("f@1"))
    world.settle()
    assert "f@1" not in world.state.pool.devices[name].residents
    served(world, "other")
    assert isinstance(world.answers[max(world.answers)], Reply)


@pytest.mark.parametrize("how", ["dies", "hangs", "lacks a block"])
def test_an_executor_that_fails_while_it_brings_a_function_counts_against_no_device_and_fails_no_request(how):
    world = two_devices(F, OTHER)
    until_brought(world)
    [(_, name, _)] = brought(world)
    [executor] = [run.executor for run in world.devices.running.values() if not run.requests]
    while how == "hangs" and not world.stopping:
        world.ring()
    world.die(executor, lost_blocks=how == "lacks a block")
    assert world.state.pool.devices[name].failures == 0
    assert [each.function for each in of(world, Evict)] == (["f@1"] if how == "lacks a block" else [])
    world.arrive("f")
    world.arrive("other")
    world.settle()
    assert len(world.devices.executors) == 2
    quick(world, 10)
    # A block that is missing for the first time is loaded again, and then the function is brought again.
    assert len(brought(world)) == (2 if how == "lacks a block" else 1)
    assert all(isinstance(each, Reply) for each in world.answers.values())


def test_blocks_that_find_no_place_are_forgotten():
    world = two_devices(F, OTHER)
    until_brought(world)
    [(_, name, _)] = brought(world)
    world.finish_on_device(unplaced=True)
    assert "f@1" not in world.state.pool.devices[name].residents
    quick(world, 10)
    assert all(isinstance(each, Reply) for each in world.answers.values())


def test_a_step_looks_at_a_bounded_number_of_the_functions_whose_rates_have_changed(monkeypatch):
    monkeypatch.setattr(replicas, "CHECKED_MAX", 2)
    names = [f"f{number}" for number in range(5)]
    world = two_devices(F, OTHER, *(pooled(name, 1000, slo_ms=300.0) for name in names))
    looked: list[str] = []
    monkeypatch.setattr(replicas, "_add_replica", lambda cycle, function, idle: looked.append(function.spec.name))
    served(world, *names)
    world.settle()
    looked.clear()
    changed = world.state.pool.rate_changed
    changed.clear()
    changed.update(dict.fromkeys(f"{name}@1" for name in names))
    counts = []
    while changed:
        before = len(looked)
        world.send(MemoryPressure(0))
        counts.append(len(looked) - before)
    assert counts == [2, 2, 1]
    assert looked == names

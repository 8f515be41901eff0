"""Every order of the queue for devices serves all, and by default no request waits for ever while others come."""

from bisect import bisect_right

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overwinter.core.actions import RunOnDevice
from overwinter.core.devices import DeviceConfig
from overwinter.core.policies import Policy
from overwinter.scheduler.policies.device_queueing import LONG, LONG_EVERY
from tests.scheduler.test_devices import device
from tests.scheduler.world import World, spec

NAMES = "abcd"
DEVICE = DeviceConfig(name="virtual:0", memory_bytes=1 << 20)
TIMEOUT_S = 40.0
IN_VAIN_MS, EASY_MS = 1.0, 4_000.0
"""An SLO that is never met, and one that always is."""


def pooled(name, slo_ms):
    return spec(name, 1, [(f"{name}-weights", 10)], device="pool", slo_ms=slo_ms, timeout_s=TIMEOUT_S)


def runs_of(world) -> list[RunOnDevice]:
    return [action for action in world.log if isinstance(action, RunOnDevice)]


@settings(max_examples=60, deadline=None)
@given(
    slos=st.lists(st.sampled_from([IN_VAIN_MS, EASY_MS]), min_size=len(NAMES), max_size=len(NAMES)),
    steps=st.lists(st.tuples(st.lists(st.sampled_from(NAMES), max_size=4), st.floats(0.01, 2.0)), max_size=80),
)
def test_a_request_that_has_waited_for_long_is_overtaken_a_bounded_number_of_times(slos, steps):
    world = World(devices=(DEVICE,), policy=Policy(device_order="overwinter"))
    for name, slo_ms in zip(NAMES, slos, strict=True):
        world.deploy(pooled(name, slo_ms))
    behind: dict[int, tuple[float, int]] = {}
    began: list[float] = []
    for names, seconds in steps:
        for name in names:
            waiting = len(world.open)
            request = world.arrive(name)
            behind[request] = world.now + LONG * TIMEOUT_S, waiting
        world.settle_processes()
        began += [world.now] * (len(runs_of(world)) - len(began))
        world.now += seconds
        if world.devices.running:
            world.finish_on_device()
    world.settle()
    begun = {request: number for number, run in enumerate(runs_of(world)) for request in run.requests}
    for request, (long_at, waiting) in behind.items():
        before = bisect_right(began, long_at)
        assert begun.get(request, len(begun)) - before <= LONG_EVERY * (waiting + 1)


@pytest.mark.parametrize("order", ["overwinter", "rrc"])
def test_a_function_of_low_priority_is_served_under_overload_only_by_default(order):
    world = World(devices=(DEVICE,), policy=Policy(device_order=order))
    for name, slo_ms in (("a", IN_VAIN_MS), ("b", EASY_MS)):
        world.deploy(pooled(name, slo_ms))
    for _ in range(3):
        world.arrive("a")
        world.settle_processes()
        world.now += 1.0
        world.settle()
    world.arrive("b")
    world.settle()
    world.state.pool.alpha, world.state.pool.is_stale = 0.0, True
    world.arrive("b")
    low = world.arrive("a")
    for _ in range(3 * LONG_EVERY):
        world.arrive("b")
        world.now += 1.0
        world.finish_on_device()
    assert (low in world.answers) == (order == "overwinter")


def busy_world(**slos) -> World:
    """Return a world whose device runs a function, and has run each of these before."""
    world = World(devices=(DEVICE,))
    for name, slo_ms in {"first": None, **slos}.items():
        world.deploy(pooled(name, slo_ms))
        world.arrive(name)
        world.settle()
    world.arrive("first")
    world.settle_processes()
    return world


def test_those_behind_a_late_request_can_still_be_in_time():
    world = busy_world(f=4_000.0, other=None)
    late = world.arrive("f")
    others = [world.arrive("other") for _ in range(3)]
    world.now += 5.0
    timely = world.arrive("f")
    before = len(runs_of(world))
    world.settle()
    served = [request for run in runs_of(world)[before:] for request in run.requests]
    assert served == [timely, *others, late]


def test_of_those_that_waited_for_long_one_without_an_slo_has_the_first_turn():
    world = busy_world(f=4_000.0, other=None)
    late = world.arrive("f")
    world.now += 1.0
    other = world.arrive("other")
    world.now += LONG * TIMEOUT_S + 1.0
    timely = world.arrive("f")
    before = len(runs_of(world))
    world.settle()
    served = [request for run in runs_of(world)[before:] for request in run.requests]
    assert served == [other, timely, late]


def two_devices(sizes, first, second) -> World:
    """Return a world with two devices, the first of which has `first`; the other one has `busy`, and runs it."""
    world = World(devices=(first, second))
    for name, (size, slo_ms) in {"busy": (10, None), **sizes}.items():
        world.deploy(spec(name, 1, [(f"{name}-weights", size)], device="pool", slo_ms=slo_ms, max_batch=1))
    for name in ("first", "busy"):
        world.arrive(name)
    world.settle()
    world.arrive("busy")
    return world


def next_run(world, *names) -> RunOnDevice:
    """Let requests come, and then the run that began first end; return the run that follows."""
    for name in names:
        world.arrive(name)
    world.settle_processes()
    world.finish_on_device()
    return runs_of(world)[-1]


def test_what_comes_fast_from_a_peer_goes_first():
    sizes = {"first": (600_000, EASY_MS), "other": (200_000, EASY_MS)}
    world = two_devices(sizes, device(0), device(1, peers={"virtual:0": 1e9}))
    world.arrive("first")
    run = next_run(world, "other", "first")
    assert (run.function, run.device, run.peer) == ("first@1", "virtual:1", "virtual:0")


@pytest.mark.parametrize(("switch", "goes"), [("", "timely@1"), ("one", "other@1")])
def test_what_a_neighbour_brings_can_make_a_request_late(switch, goes):
    sizes = {"first": (10, None), "large": (900_000, None), "timely": (200_000, 300.0), "other": (10, None)}
    world = two_devices(sizes, device(0, switch=switch), device(1, switch=switch))
    world.arrive("large")
    world.settle_processes()
    assert next_run(world, "timely", "other").function == goes


def test_a_request_whose_run_takes_too_long_goes_behind_others():
    world = busy_world(late=300.0, other=EASY_MS)
    world.settle()
    world.arrive("late")
    world.now += 0.5
    world.settle()
    world.arrive("first")
    assert next_run(world, "late", "other").function == "other@1"

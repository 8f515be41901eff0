"""The orders of the queue for devices; by default no request waits for ever while others come."""

from bisect import bisect_right
from itertools import chain, repeat

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from overwinter.core.actions import RunOnDevice
from overwinter.core.devices import DeviceConfig
from overwinter.core.events import Removed
from overwinter.core.policies import Policy
from overwinter.scheduler.policies.device_queueing import LONG, LONG_EVERY
from tests.scheduler.test_devices import device
from tests.scheduler.world import World, spec

NAMES = "abcd"
DEVICE = DeviceConfig(name="virtual:0", memory_bytes=1 << 20)
TIMEOUT_S = 40.0
IN_VAIN_MS, EASY_MS = 1.0, 4_000.0
"""An SLO that no request meets, and one that a request meets unless it waits for long."""


def pooled(name, slo_ms, **other):
    settings = {"slo_ms": slo_ms, "timeout_s": TIMEOUT_S, "max_batch": 1}
    return spec(name, 1, [(f"{name}-weights", 10)], device="pool", **(settings | other))


def runs_of(world) -> list[RunOnDevice]:
    return [action for action in world.log if isinstance(action, RunOnDevice)]


@settings(max_examples=60, deadline=None)
@given(
    slos=st.lists(st.sampled_from([IN_VAIN_MS, EASY_MS]), min_size=len(NAMES), max_size=len(NAMES)),
    steps=st.lists(st.tuples(st.lists(st.sampled_from(NAMES), max_size=4), st.floats(0.01, 2.0)), max_size=80),
)
# Few of the drawn steps let a request wait for long.
@example(slos=[IN_VAIN_MS, *[EASY_MS] * 3], steps=[([*"bbb"], 0.3), ([*"ab"], 0.3), *[([*"b"], 0.3)] * 140])
def test_a_request_that_has_waited_for_long_is_overtaken_a_bounded_number_of_times(slos, steps):
    world = World(devices=(DEVICE,), policy=Policy(device_order="overwinter"))
    for name, slo_ms in zip(NAMES, slos, strict=True):
        world.deploy(pooled(name, slo_ms))
    behind: dict[int, tuple[float, int]] = {}
    began: list[float] = []
    for names, seconds in chain(steps, repeat(([], 0.1))):
        for name in names:
            waiting = len(world.open)
            request = world.arrive(name)
            behind[request] = world.now + LONG * TIMEOUT_S, waiting
        world.settle_processes()
        began += [world.now] * (len(runs_of(world)) - len(began))
        world.now += seconds
        if world.devices.running:
            world.finish_on_device()
        elif world.open:
            world.ring()
        if len(behind) == sum(len(each) for each, _ in steps) and not world.open:
            break
    begun = {request: number for number, run in enumerate(runs_of(world)) for request in run.requests}
    for request, (long_at, waiting) in behind.items():
        before, expired = bisect_right(began, long_at), bisect_right(began, long_at + (1 - LONG) * TIMEOUT_S)
        assert begun.get(request, expired) - before <= LONG_EVERY * (waiting + 1)


@pytest.mark.parametrize("order", ["overwinter", "rrc", "fifo", "due-time"])
def test_tenants_get_equal_device_time_whatever_their_slos_priorities_and_functions(order):
    world = World(devices=(DEVICE,), device_isolation="none", policy=Policy(device_order=order))
    seconds = {"greedy": 1.0, "more": 2.0, "modest": 1.0}
    for name in seconds:
        tenant, slo_ms = ("u", None) if name == "modest" else ("t", EASY_MS)
        world.deploy(pooled(name, slo_ms, tenant=tenant, timeout_s=1000.0))
    had = dict.fromkeys(seconds, 0.0)
    for _ in range(200):
        waiting = {name: len(world.state.functions[f"{name}@1"].queue) for name in seconds}
        for name in seconds:
            if waiting[name] < 3:
                world.arrive(name, priority=0 if name == "modest" else -1)
        world.settle_processes()
        [run] = world.devices.running.values()
        name = run.function.removesuffix("@1")
        world.now += seconds[name]
        had[name] += seconds[name]
        world.finish_on_device()
    assert abs(had["modest"] - had["greedy"] - had["more"]) <= 0.1 * sum(had.values())


def test_a_tenant_that_had_no_runs_has_saved_up_no_device_time():
    world = World(devices=(DEVICE,), device_isolation="none")
    for name, tenant in (("f", "t"), ("g", "u")):
        world.deploy(pooled(name, None, tenant=tenant, timeout_s=1000.0))
    for _ in range(100):
        answered(world, "f")
    for _ in range(10):
        world.arrive("g")
        world.arrive("f")
    world.settle_processes()
    for _ in range(20):
        world.now += 1.0
        world.finish_on_device()
    last = [run.function for run in runs_of(world)][-20:]
    assert all({*pair} == {"f@1", "g@1"} for pair in zip(last[::2], last[1::2], strict=True))


def rrc_world() -> World:
    """Return a world under `rrc` in which `late` has just begun to miss its SLO, and alpha was halved."""
    world = World(devices=(DEVICE,), policy=Policy(device_order="rrc"))
    for name, slo_ms in (("late", IN_VAIN_MS), ("later", IN_VAIN_MS), ("timely", EASY_MS)):
        world.deploy(pooled(name, slo_ms))
    answered(world, "timely")
    while world.state.pool.ratio is None:
        world.ring()
    for _ in range(3):
        answered(world, "late")
    assert first_of(world, "timely", "late") == "late@1"
    while world.state.pool.ratio == 1.0:
        world.ring()
    assert world.state.pool.alpha == 0.5
    return world


def answered(world, name) -> None:
    world.arrive(name)
    world.settle_processes()
    world.now += 1.0
    world.settle()


def first_of(world, *names) -> str:
    """Let requests wait for a busy device; return the function that runs next."""
    world.arrive("timely")
    world.settle_processes()
    for name in names:
        world.arrive(name)
    world.settle_processes()
    before = len(runs_of(world))
    world.settle()
    return runs_of(world)[before].function


def test_a_function_that_misses_its_slo_most_has_low_priority_under_overload_until_that_is_forgotten():
    world = rrc_world()
    assert first_of(world, "late", "timely") == "timely@1"
    answered(world, "later")
    # It needs fewer answers in time than `late`.
    assert first_of(world, "timely", "late", "later") == "later@1"
    world.calm()
    assert not world.state.pool.with_answers
    assert first_of(world, "late", "timely") == "late@1"


def test_under_rrc_a_function_of_low_priority_waits_as_long_as_others_come():
    world = rrc_world()
    world.arrive("timely")
    low = world.arrive("late")
    for _ in range(3 * LONG_EVERY):
        world.arrive("timely")
        world.now += 1.0
        world.finish_on_device()
    assert low in world.open


def test_the_answers_of_removed_functions_do_not_count():
    world = rrc_world()
    world.arrive("late")
    world.settle_processes()
    for name in ("late", "later", "timely"):
        world.send(Removed(f"{name}@1"))
    assert world.state.pool.with_answers == world.state.pool.required == {}
    world.settle()
    assert world.state.pool.with_answers == world.state.pool.required == {}


def busy_world(**slos) -> World:
    """Return a world whose device runs a function, and has run each of these before."""
    world = World(devices=(DEVICE,))
    world.now = 1000.0
    for name, slo_ms in {"first": None, **slos}.items():
        world.deploy(pooled(name, slo_ms))
        world.arrive(name)
        world.settle()
    world.arrive("first")
    world.settle_processes()
    return world


def served_by(world) -> list[int]:
    """Let all requests be answered; return them in the order of their runs."""
    before = len(runs_of(world))
    world.settle()
    return [request for run in runs_of(world)[before:] for request in run.requests]


@pytest.mark.parametrize("slo_ms", [4_000.0, None], ids=["of the function", "of the pipeline"])
def test_requests_behind_a_late_request_can_still_be_in_time(slo_ms):
    world = busy_world(f=slo_ms, other=None)
    late = world.arrive("f", due=world.now + 4.0)
    others = [world.arrive("other") for _ in range(3)]
    world.now += 5.0
    timely = world.arrive("f", due=world.now + 4.0)
    assert served_by(world) == [timely, *others, late]


def test_requests_without_an_slo_stay_in_their_order():
    world = busy_world(f=None)
    requests = [world.arrive("f")]
    world.now += 15.0
    requests.append(world.arrive("f"))
    assert served_by(world) == requests


def test_one_of_every_few_runs_is_for_the_request_that_has_waited_longest():
    world = busy_world(late=IN_VAIN_MS, timely=EASY_MS)
    late = [world.arrive("late") for _ in range(4)]
    world.now += LONG * TIMEOUT_S + 1.0
    before = len(runs_of(world))
    for _ in range(4 * LONG_EVERY):
        world.arrive("timely")
        world.now += 0.1
        world.finish_on_device()
    served = {number: run.requests[0] for number, run in enumerate(runs_of(world)[before:]) if run.function == "late@1"}
    assert served == {number * LONG_EVERY: request for number, request in enumerate(late)}


def test_of_the_requests_that_waited_for_long_one_without_an_slo_goes_first():
    world = busy_world(f=4_000.0, other=None)
    late = world.arrive("f")
    world.now += 1.0
    other = world.arrive("other")
    world.now += LONG * TIMEOUT_S + 1.0
    timely = world.arrive("f")
    assert served_by(world) == [other, timely, late]


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
    """Send requests, and then end the oldest run; return the run that follows."""
    for name in names:
        world.arrive(name)
    world.settle_processes()
    world.finish_on_device()
    return runs_of(world)[-1]


def test_a_function_whose_blocks_come_fast_from_a_peer_goes_first():
    sizes = {"first": (600_000, EASY_MS), "other": (200_000, EASY_MS)}
    world = two_devices(sizes, device(0), device(1, peers={"virtual:0": 1e9}))
    world.arrive("first")
    run = next_run(world, "other", "first")
    assert (run.function, run.device, run.peer) == ("first@1", "virtual:1", "virtual:0")


@pytest.mark.parametrize(("switch", "goes"), [("", "timely@1"), ("one", "other@1")])
def test_a_transfer_behind_the_same_switch_can_make_a_request_late(switch, goes):
    sizes = {"first": (10, None), "large": (900_000, None), "timely": (200_000, 300.0), "other": (10, None)}
    world = two_devices(sizes, device(0, switch=switch), device(1, switch=switch))
    world.arrive("large")
    world.settle_processes()
    assert next_run(world, "timely", "other").function == goes


def test_a_request_whose_run_takes_longer_than_its_slo_goes_behind_others():
    world = busy_world(late=300.0, other=EASY_MS)
    world.settle()
    world.arrive("late")
    world.now += 0.5
    world.settle()
    world.arrive("first")
    assert next_run(world, "late", "other").function == "other@1"

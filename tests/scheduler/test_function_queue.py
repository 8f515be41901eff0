"""Many functions of a tenant wait for devices: a step compares a bounded number of them, and all are served."""

import pytest

from overwinter.core.actions import RunOnDevice
from overwinter.scheduler import function_queue, swaps
from overwinter.scheduler.device_admission import backlog_s
from overwinter.scheduler.pool import pool_record
from tests.scheduler.test_devices import device, of, pooled, served
from tests.scheduler.world import World, spec

FEW = 4
RUN_S = 0.3
NAMES = [f"f{number:02}" for number in range(3 * FEW)]


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(function_queue, "CHECKED", FEW)


def count(monkeypatch, module, name) -> list[object]:
    """Return a list that gets an element for each call of this function of a module."""
    calls, function = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: (calls.append(args), function(*args))[1])
    return calls


def running(world) -> set[int]:
    return {id_ for run in world.devices.running.values() for id_ in run.requests}


def overloaded() -> World:
    """Return a world in which all functions wait for the only device, on which the first one runs."""
    world = World(devices=(device(),))
    for name in NAMES:
        world.deploy(pooled(name, 1000, max_batch=1, timeout_s=1000.0))
    world.arrive(NAMES[0])
    world.settle_processes()
    world.now += RUN_S
    world.settle()
    for name in (NAMES[0], *NAMES):
        world.arrive(name)
    world.settle_processes()
    assert len(world.state.pool.waiting) == len(NAMES)
    return world


def test_the_end_of_a_run_ranks_a_bounded_number_of_functions(monkeypatch):
    world = overloaded()
    ranked = count(monkeypatch, swaps, "least_swap_wait_s")
    for ended in range(1, FEW):
        world.finish_on_device()
        assert len(ranked) <= ended * FEW


def test_an_arrival_ranks_no_function_while_no_device_is_free(monkeypatch):
    world = overloaded()
    ranked = count(monkeypatch, swaps, "least_swap_wait_s")
    world.arrive(NAMES[1])
    world.deploy(pooled("g"))
    world.arrive("g")
    world.load_blocks()
    assert not ranked


def test_all_functions_of_a_long_queue_are_served_in_turn():
    world = overloaded()
    seen: set[str] = set()
    for _ in range(3 * len(NAMES)):
        for name in NAMES[:FEW]:
            # The first functions have new requests all the time.
            world.arrive(name)
        world.now += RUN_S
        world.finish_on_device()
        world.settle_processes()
        seen.add(of(world, RunOnDevice)[-1].function)
    assert seen == {f"{name}@1" for name in NAMES}


def test_a_function_behind_others_gets_the_device_that_these_do_not_fit_on():
    world = World(devices=(device(0), device(1, 4 << 20)))
    world.deploy(pooled("small", 1000))
    for name in NAMES:
        world.deploy(pooled(name, 2 << 20, max_batch=1, timeout_s=1000.0))
    served(world, "small", NAMES[0])
    for name in NAMES:
        world.arrive(name)
    world.settle_processes()
    request = world.arrive("small")
    world.settle_processes()
    assert request in running(world)


def test_the_backlog_of_many_functions_is_estimated_from_the_first_ones():
    world = overloaded()
    cycle = world.scheduler.cycle
    known = [each for each in NAMES[:FEW] if pool_record(world.state.functions[f"{each}@1"]).times.is_known]
    assert known == NAMES[:1]
    assert backlog_s(cycle, (world.state.functions["f00@1"].spec.tenant, None)) == pytest.approx(
        RUN_S * len(NAMES) / FEW
    )


def test_a_tenant_is_served_beside_a_long_queue_of_another():
    world = World(devices=(device(0), device(1)))
    world.deploy(pooled("g", tenant="u"))
    for name in NAMES:
        world.deploy(pooled(name, 1000, max_batch=1, timeout_s=1000.0))
    served(world, "g", NAMES[0])
    for name in NAMES:
        world.arrive(name)
    world.settle_processes()
    request = world.arrive("g")
    world.settle_processes()
    assert request in running(world)


def test_functions_that_had_their_turn_let_those_behind_come_first():
    waiting = overloaded().state.pool.waiting
    seen = list[str]()
    for _ in range(len(NAMES) // FEW):
        for function in list(waiting.first()):
            waiting.requeue(function)
            seen.append(function.spec.name)
    assert sorted(seen) == NAMES


def test_a_step_looks_at_fewer_functions_of_many_blocks(monkeypatch):
    monkeypatch.setattr(function_queue, "CHECKED", 100)
    monkeypatch.setattr(function_queue, "BLOCKS_CHECKED", FEW)
    world = overloaded()
    ranked = count(monkeypatch, swaps, "least_swap_wait_s")
    world.finish_on_device()
    assert 0 < len(ranked) <= FEW
    world.settle()
    assert len(world.answers) == len(NAMES) + 2


def test_a_step_looks_at_some_of_those_behind_the_first_and_later_steps_at_the_others():
    waiting = overloaded().state.pool.waiting
    first = [each.spec.name for each in waiting.first()]
    assert len(first) == FEW
    seen = [[each.spec.name for each in waiting.further({"t"}, 1 << 20)] for _ in range(3)]
    assert [len(each) for each in seen] == [FEW] * 3
    assert sorted([*first, *seen[0], *seen[1]]) == NAMES
    assert seen[2] == seen[0]
    assert [each.spec.name for each in waiting.first()] == first
    assert waiting.further({"u"}, 1 << 20) == []
    # None of them is that small.
    assert waiting.further({None}, 999) == []


def test_few_slices_are_compared_because_the_comparison_of_each_takes_long(monkeypatch):
    monkeypatch.setattr(function_queue, "SLICE_COUNT", 2)
    world = World(devices=(device(),))
    for name in "fghk":
        world.deploy(spec(name, blobs=((f"{name}1", 300_000), (f"{name}2", 300_000)), device="pool"), cut=True)
        world.arrive(name)
    while world.loads:
        world.load_blocks()
    assert len(world.state.pool.waiting) == FEW
    assert len(list(world.state.pool.waiting.first())) == FEW // 2

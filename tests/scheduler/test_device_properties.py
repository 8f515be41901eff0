"""For any order of events, every request of a function of the pool gets exactly one answer, in time."""

from itertools import cycle, product
from random import Random
from typing import get_args

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from overwinter.core import devices
from overwinter.core.actions import RunOnDevice
from overwinter.core.bounds import Bound
from overwinter.core.devices import DeviceConfig, DeviceIsolation
from overwinter.core.policies import DeviceBinding, DeviceEviction, DeviceOrder, Policy
from overwinter.scheduler import replicas
from tests.scheduler import replayed
from tests.scheduler.test_properties import AnyOrder, journal_of
from tests.scheduler.world import World

OTHERS = cycle(product(get_args(DeviceOrder), get_args(DeviceEviction)))
CASES = [
    (Policy(device_binding=binding, device_order=order, device_eviction=eviction, keep_alive_s=5.0), isolation)
    for binding, isolation, (order, eviction) in zip(
        *zip(*product(get_args(DeviceBinding), get_args(DeviceIsolation)), strict=True), OTHERS, strict=False
    )
]


def name_of(case) -> str:
    return case if isinstance(case, str) else f"{case.device_binding}, {case.device_order}, {case.device_eviction}"


@pytest.fixture
def few(monkeypatch) -> tuple[DeviceConfig, ...]:
    """Three devices. Two hold one or two functions each, are behind one switch, and have links to each other."""
    monkeypatch.setitem(devices.DEVICE_BOUNDS, "memory_bytes", Bound(1, 1 << 50, "bytes", "a test has small blocks"))
    common = {"bytes_per_s": 4096.0, "latency_s": 0.0, "switch": "one"}
    return (
        DeviceConfig(name="virtual:0", memory_bytes=20, peers={"virtual:1": 1e6}, **common),
        DeviceConfig(name="virtual:1", memory_bytes=13, peers={"virtual:0": 1e6}, **common),
        DeviceConfig(name="virtual:2", memory_bytes=9),
    )


class OnDevices(AnyOrder):
    """Functions of several tenants, most of which may run on devices."""

    kinds = ("pool", "any", "pool", "cpu")
    tenants = {"g": "u"}  # noqa: RUF012
    soon_s = 150.0

    @precondition(lambda self: self.world.devices.running)
    @rule(fails=st.booleans(), unplaced=st.sampled_from([False, False, False, True]))
    def finish_on_device(self, fails, unplaced):
        run = next(iter(self.world.devices.running.values()))
        self.world.finish_on_device(run.requests[:1] if fails else (), unplaced)

    @precondition(lambda self: self.world.devices.preparing)
    @rule(interrupted=st.booleans())
    def end_preparation(self, interrupted):
        self.world.end_preparation(interrupted)

    @precondition(lambda self: self.world.devices.executors)
    @rule(data=st.data(), lost=st.sampled_from([False, False, True]))
    def executor_dies(self, data, lost):
        self.world.die(data.draw(st.sampled_from(sorted(self.world.devices.executors))), lost_blocks=lost)


@pytest.mark.parametrize(("policy", "isolation"), CASES, ids=name_of)
def test_no_request_is_forgotten_on_devices(policy, isolation, few):
    bounds = {"devices": few, "device_isolation": isolation}
    machine = type("OnDevices", (OnDevices,), {"policy": policy, "bounds": bounds})
    examples = settings(max_examples=12, stateful_step_count=50, deadline=None)
    run_state_machine_as_test(machine, settings=examples)


@pytest.mark.parametrize(("policy", "isolation"), CASES, ids=name_of)
def test_no_request_is_forgotten_under_load(policy, isolation, few):
    few = tuple(msgspec.structs.replace(each, memory_bytes=2 * each.memory_bytes) for each in few)
    world = World(policy=policy, devices=few, device_isolation=isolation, host_bytes=80)
    replayed.play(world, Random(f"{name_of(policy)} {isolation}"), 400)
    world.end_well(replayed.NAMES, OnDevices.soon_s)
    seen = {type(action).__name__ for action in world.log}
    # Executors of one function are replaced before it leaves the host store.
    wanted = {"RunOnDevice", "StartExecutor", "Run"} | (set() if isolation == "function" else {"Unbind"})
    assert wanted <= seen


WORLDS, WORLDS_MOST = 3, 12
WITHOUT_HOMES = [case for case in CASES if case[0].device_binding not in ("native", "infless")]


@pytest.mark.parametrize(("policy", "isolation"), WITHOUT_HOMES, ids=name_of)
def test_no_request_is_forgotten_while_functions_are_brought_to_every_idle_device(policy, isolation, few, monkeypatch):
    monkeypatch.setattr(replicas, "wants_replica", lambda demand: True)
    bounds = {"devices": few, "device_isolation": isolation}
    machine = type("OnDevices", (OnDevices,), {"policy": policy, "bounds": bounds})
    examples = settings(max_examples=10, stateful_step_count=50, deadline=None)
    run_state_machine_as_test(machine, settings=examples)
    roomy = tuple(msgspec.structs.replace(each, memory_bytes=100 + each.memory_bytes, switch="") for each in few)
    # If each function has executors of its own, it gets a second one only if it waits for long.
    brought, seed = isolation == "function", 0
    while seed < WORLDS or not brought:
        assert seed < WORLDS_MOST, "nothing is brought"
        world = World(policy=policy, devices=roomy, device_isolation=isolation)
        replayed.play(world, Random(f"{seed} {name_of(policy)} {isolation}"), 600)
        world.end_well(replayed.NAMES, OnDevices.soon_s)
        brought |= any(isinstance(each, RunOnDevice) and not each.requests for each in world.log)
        seed += 1


def test_the_same_events_give_the_same_actions_on_devices_whatever_the_hash_seed():
    [logs] = {journal_of(seed, 600, "devices") for seed in ("0", "1", "2")}
    [actions] = msgspec.json.decode(logs)
    assert {"RunOnDevice", "StartExecutor", "Unbind"} <= {action["type"] for action in actions}

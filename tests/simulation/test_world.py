"""The scheduler in the simulation: no lost request, equal journals for equal seeds, and the given times."""

import io
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from overwinter.core.actions import Refuse, Reply, Run
from overwinter.core.events import Alarm, Arrived, BlocksLoaded, LoadFailed, RunEnded, WorkerExited, ZygoteLost
from overwinter.core.journal import read_journal
from overwinter.scheduler.scheduler import Scheduler
from overwinter.simulation.models import MIB
from overwinter.simulation.scenario import read_scenario
from overwinter.simulation.world import World
from tests.simulation.scenes import function, scene

FAULTS = Path(__file__).parent.parent.parent / "scenarios" / "faults.toml"


def journal_of(scenario) -> bytes:
    file = io.BytesIO()
    World(scenario, journal=file, checked=True).run()
    return file.getvalue()


def test_every_request_is_answered_by_a_machine_that_is_large_enough():
    report = World(scene(function(variants=3)), checked=True).run()
    assert report.total.requests > 200
    assert report.total.answered == report.total.requests
    assert report.total.lost == 0
    assert report.total.refused == {}
    assert report.total.attainment > 0.95


def test_times_are_those_of_the_scenario():
    alone = function(
        rate=0.01, blocks=[{"mib": 50}], start_s=0.02, prepare_s=0.03, latency_ms={"1": 40}, settings={"slo_ms": 400}
    )
    report = World(scene(alone, node={"disk_mib_per_s": 500, "fork_s": 0.005}, seed=4)).run()
    assert report.total.requests == 1
    assert report.total.p50_ms == pytest.approx(100 + 5 + 20 + 30 + 40, rel=0.01)
    assert report.total.answered_by_start == report.total.wakes == {"disk": 1}
    assert report.total.busy_seconds == pytest.approx(0.04)


def test_a_wake_in_a_process_forked_ahead_saves_the_fork_and_the_containment():
    alone = function(rate=0.1, start_s=0.02, prepare_s=0.03, latency_ms={"1": 40}, settings={"keep_alive_s": 0.01})
    node = {"fork_s": 0.005, "contain_s": 0.004}
    made = [scene(alone, node=node, seed=4, duration_s=300, scheduler={"workers_ahead": each}) for each in (0, 1)]
    without, ahead = (World(each, checked=True).run().total for each in made)
    assert without.wakes == ahead.wakes
    assert without.requests == ahead.requests > 10
    assert without.p50_ms == pytest.approx(5 + 20 + 40, rel=0.01)
    assert ahead.p50_ms == pytest.approx(20 - 4 + 40, rel=0.01)


def test_no_request_is_lost_if_processes_that_were_forked_ahead_die():
    alone = function(rate=0.5, settings={"keep_alive_s": 0.01})
    faults = {"worker_life_s": 3.0, "zygote_life_s": 60.0}
    made = scene(alone, duration_s=600, scheduler={"workers_ahead": 2}, faults=faults)
    report = World(made, checked=True).run()
    assert report.total.answered > 200
    assert report.total.lost == 0
    assert journal_of(made) == journal_of(made)


def test_shared_blocks_are_read_and_kept_once():
    report = World(scene(function(variants=4))).run()
    assert report.total.loaded_bytes == report.memory.blocks_peak == (3 * 10 + 4 * 1) * MIB


def test_tenants_with_dedicated_stores_share_no_blocks_and_are_all_served():
    apart = [
        function(name, tenant=name, settings={"dedicated": True, "keep_alive_s": 1, "slo_ms": 900}) for name in "fg"
    ]
    report = World(
        scene(*apart, function("h"), node={"host_mib": 70}, scheduler={"host_keep_alive_s": 2}), checked=True
    ).run()
    assert report.memory.blocks_peak == 2 * 31 * MIB
    assert report.total.wakes["disk"] > 3
    assert report.total.refused == {}
    assert report.total.lost == 0


def test_loaded_blocks_name_their_store():
    own = function("own", tenant="red", settings={"dedicated": True, "keep_alive_s": 1})
    shared = function("shared", blocks=[{"mib": 40}], settings={"keep_alive_s": 1})
    steps = read_journal(io.BytesIO(journal_of(scene(own, shared, node={"host_mib": 45}))))[1]
    loaded = [step.event for step in steps if isinstance(step.event, BlocksLoaded)]
    assert {(event.function, event.store) for event in loaded} == {("own@1", "red"), ("shared@1", "")}


def test_workers_are_stopped_after_their_keep_alive():
    report = World(scene(function(rate=0.05), duration_s=600)).run()
    assert report.total.wakes["host"] > 5
    assert report.total.worker_seconds < 0.5 * 600


def test_a_small_machine_has_a_lower_attainment():
    busy = function(rate=16.0, variants=4)
    large = World(scene(busy, node={"cores": 8})).run()
    small = World(scene(busy, node={"cores": 1})).run()
    assert small.total.requests == large.total.requests
    assert small.total.attainment < 0.8 < 0.95 < large.total.attainment
    assert small.total.lost == 0


def test_weights_that_siblings_do_not_share_make_their_shared_runs_longer():
    """Half of their bytes differ: half of a run is shared, half runs per function."""
    times = {1: 0.05, 2: 0.06, 3: 0.07, 4: 0.08}
    half = function(
        rate=8.0,
        variants=4,
        blocks=[{"mib": 20, "shared": "base"}, {"mib": 20}],
        latency_ms={batch: seconds * 1000 for batch, seconds in times.items()},
        settings={"slo_ms": 400, "max_batch": 4, "max_workers": 1},
    )
    scenario = scene(half, scheduler={"workers_max": 1}, duration_s=20)
    _, entries = read_journal(io.BytesIO(journal_of(scenario)))
    began, seen = {}, set()
    for entry in entries:
        for run in entry.actions:
            if isinstance(run, Run):
                began[run.run] = entry.now, sorted(Counter(run.functions or ("one",) * len(run.requests)).values())
        if isinstance(entry.event, RunEnded) and entry.event.run in began:
            at, counts = began.pop(entry.event.run)
            together, apart = times[sum(counts)], sum(times[count] for count in counts)
            assert entry.now - at == pytest.approx((together + apart) / 2 if len(counts) > 1 else together)
            seen.add(tuple(counts))
    assert {(1, 1), (1, 1, 1)} <= seen
    assert World(scenario).run().total.attainment > 0.9


def test_the_same_seed_gives_the_same_journal():
    scenario = msgspec.structs.replace(read_scenario(FAULTS), duration_s=60)
    first = journal_of(scenario)
    assert first == journal_of(scenario)
    assert len(first.splitlines()) > 1000
    assert first != journal_of(msgspec.structs.replace(scenario, seed=scenario.seed + 1))


def test_the_journal_replays_through_a_fresh_scheduler():
    scenario = msgspec.structs.replace(read_scenario(FAULTS), duration_s=60)
    config, entries = read_journal(io.BytesIO(journal_of(scenario)))
    scheduler = Scheduler(config)
    assert all(tuple(scheduler.handle(entry.event, entry.now)) == entry.actions for entry in entries)


def test_crashes_a_lost_zygote_and_a_full_store_leave_no_request_without_an_answer():
    file = io.BytesIO()
    scenario = msgspec.structs.replace(read_scenario(FAULTS), duration_s=120)
    report = World(scenario, journal=file, checked=True).run()
    file.seek(0)
    steps = list(read_journal(file)[1])
    events = [step.event for step in steps]
    assert any(isinstance(event, ZygoteLost) for event in events)
    assert any(isinstance(event, LoadFailed) and event.error == "NoSpaceError" for event in events)
    deaths = {event.reason for event in events if isinstance(event, WorkerExited)}
    assert deaths >= {"crashed by a fault", "killed by a fault", "its zygote died", "stopped"}
    asked = [event.request for event in events if isinstance(event, Arrived)]
    result = [action.request for step in steps for action in step.actions if isinstance(action, Reply | Refuse)]
    assert sorted(result) == sorted(asked)
    assert len(asked) > 1000
    assert report.total.lost == 0
    assert report.total.answered > 0.6 * report.total.requests
    assert {"NoSpaceError", "WorkerError"} <= set(report.total.refused)


@settings(max_examples=20)
@given(
    st.integers(0, 10_000),
    st.sampled_from([0.0, 0.1, 0.9]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([None, 2.0]),
    st.sampled_from([None, 4.0]),
    st.sampled_from([None, 32.0, 1000.0]),
    st.integers(1, 3),
)
# A worker starts for a function that no longer shares workers.
@example(503, 0.9, 0.0, 2.0, None, None, 2)
def test_no_request_is_lost_whatever_fails(seed, runs, starts, life_s, zygote_s, host_mib, workers_max):
    scenario = scene(
        function("a", variants=3, settings={"max_workers": 2, "max_batch": 4, "timeout_s": 3, "queue_limit": 4}),
        function("b", settings={"timeout_s": 1, "keep_alive_s": 0}),
        seed=seed,
        duration_s=8,
        node={"cores": 2, "host_mib": host_mib} if host_mib else {"cores": 2},
        scheduler={"workers_max": workers_max},
        faults={"run_crash_share": runs, "start_crash_share": starts, "slow_load_share": 0.2}
        | ({"worker_life_s": life_s} if life_s else {})
        | ({"zygote_life_s": zygote_s} if zygote_s else {}),
    )
    total = World(scenario, checked=True).run().total
    assert total.lost == 0
    assert total.answered + sum(total.refused.values()) == total.requests


def test_one_function_more_does_not_change_the_number_of_requests_of_another():
    alone = World(scene(function("a"))).run()
    both = World(scene(function("a"), function("b"))).run()
    assert both.functions["a"].requests == alone.functions["a"].requests
    assert both.functions["a"].requests != both.functions["b"].requests


def test_progress_is_reported():
    result: list[float] = []
    World(scene(function(rate=40.0))).run(result.append)
    assert result == sorted(result)
    assert len(result) > 2
    assert result[-1] == 60


def test_requests_that_arrive_before_settle_s_are_not_counted():
    whole, settled = (World(scene(settle_s=each)).run() for each in (0.0, 45.0))
    assert 0 < settled.total.requests < whole.total.requests / 2
    assert settled.total.answered == settled.total.requests


@pytest.mark.parametrize("rate", [2, 20])
def test_a_run_uses_the_threads_that_a_node_gives_it(rate):
    law = {
        "alone_ms": 100,
        "serial": 0.27,
        "runtime_mib": 50,
        "request_mib": 1,
        "cores": [1, 2, 3, 4],
        "concurrencies": [1, 2, 3, 4],
    }
    wide = function(rate=rate, latency_ms={}, law=law, settings={"threads": 4, "concurrency": 4, "slo_ms": 150})
    report = World(scene(wide, node={"cores": 16}, scheduler={"policy": "photons"}, duration_s=200)).run()
    # A worker of four cores has one for each of its four concurrent runs.
    assert report.total.p50_ms >= 99.0
    assert report.total.busy_core_s >= 0.099 * report.total.requests


def test_wakes_before_settle_s_are_counted_under_the_place_where_the_blocks_were():
    several = [
        function(
            name=f"f{number}", rate=0.3, blocks=[{"mib": 100}], latency_ms={"1": 400}, start_s=0.5,
            settings={"slo_ms": 5000, "keep_alive_s": 0.0},
        )
        for number in range(6)
    ]  # fmt: skip
    made = [
        scene(
            *several, seed=5, node={"cores": 1}, scheduler={"host_keep_alive_s": 0.0}, duration_s=200, settle_s=settle_s
        )
        for settle_s in (0.0, 100.0)
    ]
    whole, settled = (World(each).run().total.wakes for each in made)
    assert whole == settled
    assert set(whole) == {"disk"}


def test_an_infless_function_is_not_moved_to_and_fro_while_its_device_starts():
    either = function(rate=2.0, blocks=[{"mib": 10}], latency_ms={"1": 100}, settings={"device": "any", "timeout_s": 5})
    other = function(name="hog", rate=5.0, latency_ms={"1": 400}, settings={"timeout_s": 20})
    devices = [{"name": "large", "memory_bytes": 40 * MIB}, {"name": "small", "memory_bytes": 20 * MIB}]
    policy = {"device_binding": "infless", "keep_alive_s": 0.05}
    for seed in range(8):
        world = World(
            scene(
                either, other, seed=seed, duration_s=60, devices=devices, node={"cores": 2, "executor_start_s": 0.1},
                scheduler={"policy": policy, "workers_max": 1}, faults={"start_crash_share": 0.5},
            ),
            checked=True,
        )  # fmt: skip
        alarms = Counter[float]()
        handle = world._handle

        def counted(event, world=world, alarms=alarms, handle=handle):
            alarms[world._timeline.now] += isinstance(event, Alarm)
            assert alarms[world._timeline.now] < 1000
            handle(event)

        world._handle = counted
        assert world.run().total.lost == 0


def test_a_run_ends_a_simulated_preparation():
    many = [
        function(
            name=f"t{tenant}f{number}", tenant=f"t{tenant}", rate=0.5, prepare_s=3.0, blocks=[{"mib": 10}],
            latency_ms={"1": 20}, settings={"device": "pool", "slo_ms": 200},
        )
        for number in range(4)
        for tenant in range(8)
    ]  # fmt: skip
    devices = [{"name": name, "memory_bytes": 1 << 30} for name in "de"]
    made = scene(*many, devices=devices, duration_s=100, scheduler={"device_isolation": "none"})
    report = World(made, checked=True).run()
    assert [(each.executors, each.crashes) for each in report.devices.values()] == [(1, 0), (1, 0)]

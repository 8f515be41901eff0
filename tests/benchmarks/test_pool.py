"""Every part of the benchmark of the pool runs, and its readings are right."""

import argparse
from pathlib import Path

import pytest

from benchmarks.fault_injection import Span
from benchmarks.pool import __main__ as pool
from benchmarks.pool.calls import poisson
from benchmarks.pool.readings import DeviceRun, Readings, read, variance
from benchmarks.pool.serving import devices
from benchmarks.pool.soak import soak
from overwinter.core.actions import Reply, RunOnDevice, StartExecutor
from overwinter.core.config import SchedulerConfig
from overwinter.core.events import Alarm, Arrived, RunEnded, WorkerExited, WorkerReady
from overwinter.core.journal import Journal

TINY = argparse.Namespace(quick=True, seed=1, seconds=1.0, traces=None, rounds=0)


def test_a_journal_tells_what_each_device_did(tmp_path: Path) -> None:
    place = tmp_path / "journal"
    with place.open("wb") as file:
        journal = Journal(SchedulerConfig(), 1, file)
        journal.record(1.0, Arrived(1, "f", None, None), [StartExecutor(1, "virtual:0"), StartExecutor(2, "virtual:1")])
        journal.record(2.0, WorkerReady(1), [RunOnDevice(1, "virtual:0", 1, "f@1", (1,), 30)])
        journal.record(2.5, WorkerReady(2), [RunOnDevice(2, "virtual:1", 2, "g@1", (2,), 10, ("h@1",))])
        journal.record(4.0, RunEnded(1, 1, moved_bytes=30, peer_bytes=20), [Reply(1, "f@1", "host")])
        journal.record(5.0, RunEnded(2, 2, unplaced=True), [])
        journal.record(5.5, RunEnded(2, 9), [RunOnDevice(1, "virtual:0", 3, "f@1", (3,))])
        journal.record(6.0, WorkerExited(1, "WorkerError", "killed"), [])
        journal.record(7.0, Alarm(), [])
    found = read(place)
    assert found.runs == [
        DeviceRun("virtual:0", 2.0, 4.0, 30, 0, False, 20),
        DeviceRun("virtual:1", 2.5, 5.0, 0, 1, True),
    ]
    assert (found.executors, found.exits, found.swaps, found.moved_bytes) == (2, 1, 1, 30)
    assert found.busy_s(["virtual:0", "virtual:1", "virtual:2"]) == [2.0, 2.5, 0.0]
    assert found.counts["functions evicted from devices"] == found.counts["runs whose blocks were not placed"] == 1
    assert found.counts["runs that copied blocks from another device"] == 1
    assert found.within(Span(2.2, 9.0)) == Readings(found.runs[1:], 2, 1)


def test_devices_may_be_linked_to_each_other() -> None:
    assert [each.peers for each in devices(2, 1 << 20)] == [{}, {}]
    assert [each.peers for each in devices(2, 1 << 20, 5e9)] == [{"virtual:1": 5e9}, {"virtual:0": 5e9}]


def test_the_variance_is_that_of_the_loads_over_the_largest() -> None:
    assert variance([2.0, 2.0]) == variance([0.0, 0.0]) == 0.0
    assert variance([4.0, 0.0]) == 0.25


def test_arrivals_are_at_the_wanted_rates_and_the_same_with_a_seed() -> None:
    found = poisson([10.0, 30.0], 100.0, 1)
    assert found == poisson([10.0, 30.0], 100.0, 1) == sorted(found)
    assert 850 < sum(not number for _, number in found) < 1150
    assert 2700 < sum(number for _, number in found) < 3300


QUICK = ("allocation",)
"""The parts of the benchmark that `make test` runs; the others run with the slow tests."""


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=[pytest.mark.slow] * (part not in QUICK)) for part in pool.PARTS]
)
def test_each_part_of_the_benchmark_returns_figures(part: str) -> None:
    figures = pool.run_part(part, TINY)
    if part == "throughput":
        rates = list(figures["throughput_over_native"].values())
        assert len(rates) == 2
        # The second row has functions that do not fit on the device.
        assert rates[1] > 1.0
    elif part == "balance":
        assert set(figures["load_variances"]) == {"missing-bytes", "native", "random"}
    elif part == "trace":
        assert figures["trace"]["moved_share"] > 0.0
    else:
        assert figures


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_a_short_soak_finds_no_wrong_lost_or_late_answers_and_nothing_left_behind() -> None:
    figures = soak(
        4.0, functions=6, rate=30.0, seed=1, small=True, isolation="tenant", models=("mlp", "lstm"), rounds=1
    )
    assert figures["requests"] > 40
    counted = ("wrong", "lost", "after_timeout", "descriptors", "processes", "shm_files")
    assert {key: figures[key] for key in counted} == dict.fromkeys(counted, 0)
    assert figures["expired"] <= figures["refused"]
    assert "tracebacks" not in figures

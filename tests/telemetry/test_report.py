"""The reader of the steps counts what happened, for steps of any source."""

import io

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overwinter.core.actions import Bind, Drop, LoadBlocks, Refuse, Reply, Run, StartWorker, Unbind
from overwinter.core.events import (
    Arrived,
    BlocksLoaded,
    Bound,
    Cancelled,
    Deployed,
    MemoryMeasured,
    Removed,
    RunEnded,
    WorkerExited,
)
from overwinter.core.journal import read_journal
from overwinter.core.profile import Point, Profile
from overwinter.simulation.world import World
from overwinter.telemetry.latencies import Latencies
from overwinter.telemetry.report import Report, StepReader
from tests.scheduler.world import spec
from tests.simulation.scenes import function, scene


def known(name: str, nbytes: int, **changes) -> Deployed:
    profile = Profile(weight_bytes=30, macs=1, points=(Point(1, nbytes, 1, 1, 0.1),))
    return Deployed(spec(name, profile=profile, **changes))


def read(*steps, until=10.0) -> Report:
    reader = StepReader(until)
    for now, event, *actions in steps:
        reader.observe(now, event, actions)
    return reader.report(until)


def test_requests_are_counted_by_how_they_end():
    figures = read(
        (0.0, Deployed(spec("f", slo_ms=500))),
        *((float(request), Arrived(request, "f", None, None)) for request in range(5)),
        (5.0, RunEnded(1, 1), Reply(4, "f@1", "warm"), Refuse(0, "DeadlineError", "late")),
        (5.2, Cancelled(1)),
        (5.4, RunEnded(1, 1), Reply(3, "f@1", "host")),
        until=10.0,
    ).functions["f"]
    assert (figures.requests, figures.answered, figures.cancelled, figures.lost) == (5, 2, 1, 1)
    assert figures.refused == {"DeadlineError": 1}
    assert figures.answered_by_start == {"host": 1, "warm": 1}
    assert figures.attainment == 0.0
    assert figures.p50_ms == pytest.approx(1000, rel=0.006)
    assert figures.p99_ms == pytest.approx(2400, rel=0.006)


def test_memory_is_summed_over_time_and_shared_blocks_count_once():
    report = read(
        (0.0, known("f", 100), LoadBlocks("f@1", 1)),
        (0.0, known("g", 10, blobs=(("a", 10), ("c", 5))), LoadBlocks("g@1", 2)),
        (2.0, BlocksLoaded("f@1", 1, 30), StartWorker(1, "f@1")),
        (4.0, BlocksLoaded("g@1", 2, 5), StartWorker(2, "g@1")),
        (5.0, Arrived(1, "f", None, None), Run(1, 1, (1,))),
        (5.5, RunEnded(1, 1), Reply(1, "f@1", "disk")),
        (8.0, WorkerExited(1, "WorkerError", "stopped"), Drop(("b",))),
    )
    memory = report.memory
    assert memory.blocks_peak == 35
    assert memory.workers_peak == 110
    assert memory.peak == 145
    assert memory.blocks_mean == pytest.approx((2 * 30 + 4 * 35 + 2 * 15) / 10)
    assert memory.workers_mean == pytest.approx((2 * 100 + 4 * 110 + 2 * 10) / 10)
    assert report.functions["f"].worker_seconds == 6
    assert report.functions["g"].worker_seconds == 6
    assert report.functions["f"].busy_seconds == 0.5
    assert report.total.wakes == {"disk": 2}
    assert report.total.attainment is None
    assert [(sample.at_s, sample.workers) for sample in report.samples][-1] == (pytest.approx(10), 1)


def test_a_worker_takes_the_memory_of_its_largest_batch_so_far():
    points = tuple(Point(2, nbytes, batch, 1, 0.1) for batch, nbytes in ((4, 160), (1, 100), (2, 120)))
    deployed = Deployed(spec("f", profile=Profile(weight_bytes=30, macs=1, points=points)))
    report = read(
        (0.0, deployed, StartWorker(1, "f@1", False, 2)),
        *((1.0, Arrived(request, "f", None, None)) for request in (1, 2, 3)),
        (2.0, Arrived(4, "f", None, None), Run(1, 1, (1, 2, 3))),
        (4.0, RunEnded(1, 1), Run(1, 2, (4,))),
        until=10.0,
    )
    assert report.memory.workers_peak == 160
    assert report.memory.workers_mean == pytest.approx((100 * 2 + 160 * 8) / 10)
    assert report.samples[-1].worker_cores == 2


def test_a_batch_larger_than_all_that_were_measured_takes_no_less_memory_than_they():
    points = tuple(Point(1, nbytes, batch, 1, 0.1) for batch, nbytes in ((1, 100), (2, 120)))
    report = read(
        (0.0, Deployed(spec("f", profile=Profile(weight_bytes=30, macs=1, points=points))), StartWorker(1, "f@1")),
        *((1.0, Arrived(request, "f", None, None)) for request in (1, 2)),
        (2.0, Arrived(3, "f", None, None), Run(1, 1, (1, 2, 3))),
    )
    assert report.memory.workers_peak == 120


def test_functions_bound_in_one_worker_share_its_time_and_pay_for_what_they_ran():
    report = read(
        (0.0, Deployed(spec("f", family="one"), resident=True), StartWorker(1, "f@1", False, 2)),
        (0.0, Deployed(spec("g", family="one"), resident=True)),
        (2.0, Arrived(1, "g", None, None), Bind(1, "g@1", 1)),
        (3.0, Bound(1, "g@1", 1), Run(1, 1, (1,), "g@1")),
        # What a run took before its worker died was not idle either.
        (7.0, WorkerExited(1, "WorkerError", "signal 9"), Refuse(1, "WorkerError", "signal 9")),
    )
    times = {
        name: (each.worker_seconds, each.busy_seconds, each.worker_core_s, each.busy_core_s)
        for name, each in report.functions.items()
    }
    assert times == {"f": (4.5, 0.0, 9.0, 0.0), "g": (2.5, 4.0, 5.0, 9.0)}
    assert (report.total.worker_seconds, report.total.worker_core_s) == (7.0, 14.0)


def test_a_function_pays_for_a_worker_while_it_is_bound_in_it():
    report = read(
        (0.0, Deployed(spec("f", family="one"), resident=True), StartWorker(1, "f@1")),
        *((0.0, Deployed(spec(name, family="one"), resident=True)) for name in ("g", "h")),
        (2.0, Arrived(1, "g", None, None), Bind(1, "g@1", 1), Bind(1, "h@1", 2)),
        (2.0, Bound(1, "g@1", 1)),
        (2.0, Bound(1, "h@1", 2)),
        (5.0, Arrived(2, "g", None, None), Unbind(1, "g@1")),
        (7.0, Arrived(3, "g", None, None), Bind(1, "g@1", 3)),
        (7.0, Bound(1, "g@1", 3)),
        until=10.0,
    )
    assert {name: each.worker_seconds for name, each in report.functions.items()} == {"f": 5.0, "g": 2.0, "h": 3.0}


def test_a_journal_file_gives_the_same_report_as_the_world():
    file = io.BytesIO()
    scenario = scene(function(variants=2))
    report = World(scenario, journal=file).run()
    file.seek(0)
    reader = StepReader(60.0)
    for entry in read_journal(file)[1]:
        reader.observe(entry.now, entry.event, list(entry.actions))
    assert reader.open_requests == 0
    assert msgspec.json.encode(reader.report(report.duration_s)) == msgspec.json.encode(report)


def test_blocks_that_survived_a_restart_count_from_the_start():
    report = read((0.0, Deployed(spec("f"), resident=True)), (5.0, BlocksLoaded("f@1", 1, 0)))
    assert report.memory.blocks_mean == report.memory.blocks_peak == 30


@given(st.lists(st.floats(1e-5, 100), min_size=1), st.floats(0, 1))
def test_quantiles_are_right_to_half_a_percent(seconds, share):
    latencies = Latencies()
    for value in seconds:
        latencies.add(value)
    ordered = sorted(seconds)
    rank = max(0, min(len(ordered) - 1, -int(-(share * len(ordered)) // 1) - 1))
    assert latencies.quantile(share) == pytest.approx(ordered[rank], rel=0.006)
    assert latencies.shares()[-1][1] == 1.0


def test_without_latencies_there_is_no_quantile():
    assert Latencies().quantile(0.5) is None
    assert Latencies().shares() == []


def test_a_worker_may_outlive_its_function_and_its_memory_stays_as_it_was():
    memory = read(
        (0.0, Deployed(spec("f"))),
        (0.0, BlocksLoaded("f@1", 1, 30), StartWorker(1, "f@1")),
        (0.0, MemoryMeasured(((1, 100),))),
        (5.0, Removed("f@1")),
        (6.0, MemoryMeasured(((1, 300),))),
        (8.0, WorkerExited(1, "WorkerError", "stopped")),
    ).memory
    assert memory.workers_peak == 100
    assert memory.workers_mean == pytest.approx(80)

"""Runs, idle workers and stored bytes are billed, each exactly once."""

import pytest

from overwinter.core.actions import Bind, LoadFinished, Reply, Run, StartWorker, StopWorker
from overwinter.core.events import Arrived, Bound, Deployed, Removed, RunEnded, WorkerExited, WorkerReady
from overwinter.core.profile import Point, Profile
from overwinter.store.usage import UsageFile
from overwinter.telemetry.metering import Meter
from overwinter.telemetry.statistics import Statistics
from tests.scheduler.world import World, spec

DAY = 86400.0
PROFILE = Profile(weight_bytes=1, macs=1, points=(Point(2, 500, 1, 1, 0.1),))
LIFE = (
    (0.0, Deployed(spec("f", profile=PROFILE), resident=True)),
    (0.0, Deployed(spec("g", blobs=(("a", 10),), tenant="u"))),
    (0.0, Arrived(1, "f", None, None), StartWorker(1, "f@1", False, 2, 1)),
    (1.0, WorkerReady(1), Run(1, 1, (1,))),
    (4.0, RunEnded(1, 1), Reply(1, "f@1", "host")),
    (9.0, Removed("f@1"), StopWorker(1)),
    (10.0, WorkerExited(1, "WorkerError", "stopped")),
)


SHARED = (
    (0.0, Deployed(spec("f", family="one"), resident=True)),
    (0.0, Deployed(spec("g", family="one"), resident=True)),
    (0.0, Arrived(1, "f", None, None), StartWorker(1, "f@1")),
    (0.0, Arrived(2, "g", None, None)),
    (0.0, Arrived(3, "g", None, None)),
    (1.0, WorkerReady(1), Bind(1, "g@1", 1)),
    (1.0, Bound(1, "g@1", 1), Run(1, 1, (1, 2, 3), None, ("f@1", "g@1", "g@1"))),
)
"""A run of two functions that has not ended."""


@pytest.fixture
def usage_file(tmp_path):
    usage_file = UsageFile(tmp_path / "usage.sqlite")
    yield usage_file
    usage_file.close()


@pytest.mark.parametrize("flushes", [(), (0.5,), (2.0, 2.5, 6.0), (9.5,), (10.0, 10.0)])
def test_usage_is_billed_once_however_often_it_is_flushed(usage_file, flushes):
    statistics, said = Statistics(), []
    meter = Meter(statistics, usage_file, said.append)
    for now, event, *actions in sorted([*LIFE, *((at, None) for at in flushes)], key=lambda step: step[0]):
        if event is None:
            meter.flush(now, DAY + now)
        else:
            statistics.observe(now, event, actions)
    for written in (False, True):
        if written:
            meter.flush(20.0, DAY)
            assert statistics.removed_tallies == []
        f, g = meter.usage(None, 20.0, DAY)
        assert (f.tenant, f.function, f.requests, f.since) == ("t", "f", 1, "1970-01-02")
        assert f.core_ms == pytest.approx(6000)
        assert f.idle_core_ms == pytest.approx(2 * 7000)
        assert f.billed_core_ms == pytest.approx(6000 + 1400)
        assert f.private_byte_s == pytest.approx(10 * 500)
        assert f.host_byte_s == pytest.approx(9 * 30)
        assert f.disk_byte_s == pytest.approx(9 * (5 + 20))
        assert (g.tenant, g.core_ms, g.host_byte_s) == ("u", 0, 0)
        assert g.disk_byte_s == pytest.approx(9 * 5 + 11 * 10)
    assert [usage.function for usage in meter.usage("u", 20.0, DAY)] == ["g"]
    assert said == []


@pytest.mark.parametrize("flushed", ["before", "after"])
def test_a_flush_during_a_removal_bills_nothing_twice(usage_file, flushed):
    class Interrupted(Statistics):
        """Another thread flushes while a function is removed, before or after its tally is moved."""

        def _function_removed(self, tally) -> None:
            if flushed == "before":
                meter.flush(9.0, DAY)
            super()._function_removed(tally)
            if flushed == "after":
                meter.flush(9.0, DAY)

    statistics = Interrupted()
    meter = Meter(statistics, usage_file, print)
    for now, event, *actions in LIFE:
        if isinstance(event, Removed):
            meter.flush(8.0, DAY)
        statistics.observe(now, event, actions)
    for now in (20.0, 80.0):
        meter.flush(now, DAY)
    [f] = meter.usage("t", 80.0, DAY)
    assert (f.requests, f.core_ms, f.private_byte_s) == (1, pytest.approx(6000), pytest.approx(10 * 500))


def test_what_is_in_progress_is_billed_so_far(usage_file):
    statistics = Statistics()
    for now, event, *actions in LIFE[:4]:
        statistics.observe(now, event, actions)
    f, _ = Meter(statistics, usage_file, print).usage(None, 3.0, DAY)
    assert (f.core_ms, f.idle_core_ms, f.private_byte_s, f.host_byte_s) == (4000, 2000, 1500, 90)


def test_a_usage_file_that_cannot_be_written_loses_nothing(usage_file, tmp_path):
    statistics, said = Statistics(), []
    for now, event, *actions in LIFE:
        statistics.observe(now, event, actions)
    broken = UsageFile(tmp_path / "broken.sqlite")
    broken.close()
    meter = Meter(statistics, broken, said.append)
    meter.flush(11.0, DAY)
    meter.flush(12.0, DAY)
    assert len(said) == 1
    assert "broken.sqlite" in said[0]
    assert len(statistics.removed_tallies) == 1
    meter = Meter(statistics, usage_file, said.append)
    meter.flush(13.0, DAY)
    assert meter.usage("t", 13.0, DAY)[0].core_ms == 6000


def test_a_run_in_progress_that_functions_share_is_billed_by_their_requests(usage_file):
    statistics = Statistics()
    for now, event, *actions in SHARED:
        statistics.observe(now, event, actions)
    results = Meter(statistics, usage_file, print).usage(None, 4.0, DAY)
    assert {each.function: each.core_ms for each in results} == {"f": pytest.approx(1000), "g": pytest.approx(2000)}


TRIED = (
    (0.0, Deployed(spec("f", family="one"), on_trial=True), StartWorker(1, "f@1", True, 2, 1)),
    (1.0, WorkerReady(1), LoadFinished("f@1", None)),
)
CALLED = (
    (5.0, Arrived(1, "f", None, None), Run(1, 1, (1,))),
    (6.0, RunEnded(1, 1), Reply(1, "f@1", "warm")),
)
SIBLING = (
    (1.0, Deployed(spec("g", family="one"), resident=True)),
    (2.0, Arrived(1, "g", None, None), Bind(1, "g@1", 1)),
    (2.0, Bound(1, "g@1", 1), Run(1, 1, (1,), "g@1")),
    (3.0, RunEnded(1, 1), Reply(1, "g@1", "bound")),
)


def idle_ms(steps, usage_file):
    """Return the time of idle cores that each function has in ten seconds; the end of its worker must not change it."""
    statistics = Statistics()
    meter = Meter(statistics, usage_file, print)
    for now, event, *actions in steps:
        statistics.observe(now, event, actions)
    before = {each.function: each for each in meter.usage(None, 10.0, DAY)}
    statistics.observe(10.0, WorkerExited(1, "WorkerError", "stopped"), [])
    after = {each.function: each for each in meter.usage(None, 10.0, DAY)}
    for name, each in before.items():
        assert after[name].idle_core_ms == pytest.approx(each.idle_core_ms)
        assert after[name].private_byte_s == pytest.approx(each.private_byte_s)
        assert bool(each.private_byte_s) == bool(each.idle_core_ms)
    return {name: pytest.approx(each.idle_core_ms) for name, each in before.items()}


def test_a_worker_that_tried_a_version_is_not_billed_as_idle_before_the_version_is_called(usage_file):
    assert idle_ms(TRIED, usage_file) == {"f": 0}
    assert idle_ms((*TRIED, *CALLED), usage_file) == {"f": 2 * 4000}


def test_a_function_that_was_only_tried_pays_no_idle_time_of_a_worker_that_a_sibling_uses(usage_file):
    assert idle_ms((*TRIED, *SIBLING), usage_file) == {"f": 0, "g": 7000}


def test_usage_of_removed_functions_is_merged_and_nothing_is_lost(usage_file, monkeypatch):
    monkeypatch.setattr("overwinter.store.usage.REMOVED_MAX", 3)
    statistics = Statistics()
    meter = Meter(statistics, usage_file, print)
    statistics.observe(0.0, Deployed(spec("kept", blobs=(("a", 10),), tenant="t")), [])
    for number in range(10):
        at = 2.0 * number
        statistics.observe(at, Deployed(spec(f"f{number}", blobs=((f"b{number}", 10),))), [])
        statistics.observe(at + 1, Removed(f"f{number}@1"), [])
        meter.flush(at + 1, number * DAY)
    used = meter.usage("t", 19.0, 9 * DAY)
    # The last flush adds a function after it merged the others.
    assert [each.function for each in used] == ["", "f6", "f7", "f8", "f9", "kept"]
    assert [each.since for each in used] == [f"1970-01-{day:02}" for day in (1, 7, 8, 9, 10, 1)]
    assert [each.disk_byte_s for each in used] == [60, 10, 10, 10, 10, 190]
    again = Meter(Statistics(), usage_file, print)
    again.flush(0.0, 10 * DAY)
    used = again.usage("t", 0.0, 10 * DAY)
    assert [(each.function, each.disk_byte_s) for each in used] == [("", 80), ("f8", 10), ("f9", 10), ("kept", 190)]


def test_the_usage_of_a_tenant_is_computed_without_the_functions_of_others(usage_file):
    statistics = Statistics()
    for number in range(50):
        statistics.observe(0.0, Deployed(spec(f"other{number}", tenant="others")), [])
    statistics.observe(0.0, Deployed(spec("f", blobs=(("own", 10),))), [])
    meter, asked = Meter(statistics, usage_file, print), []
    uncharged = statistics.disk.uncharged
    statistics.disk.uncharged = lambda id_, now: asked.append(id_) or uncharged(id_, now)
    assert [each.disk_byte_s for each in meter.usage("t", 3.0, DAY)] == [30]
    assert asked == ["f@1"]
    assert len(meter.usage(None, 3.0, DAY)) == 51


def test_what_a_removed_function_still_runs_in_a_siblings_worker_is_billed(usage_file):
    world, statistics = World(cores=4), Statistics()
    send = world.send

    def watched(event):
        actions = send(event)
        statistics.observe(world.now, event, actions)
        return actions

    world.send = watched
    meter = Meter(statistics, usage_file, print)
    for name in "fg":
        world.deploy(spec(name, blobs=(("shared", 10), (name, 5)), family="one"))
    world.arrive("f")
    world.settle()
    world.now = 1.0
    world.arrive("g")
    world.load_blocks(added=5)
    world.bind()
    for world.now in (50.0, 55.0):
        world.send(Removed("g@1"))
        meter.flush(world.now, 1e9)
    world.now = 75.0
    world.finish()
    [used] = [each for each in meter.usage(None, world.now, 1e9) if each.function == "g"]
    assert (used.requests, used.core_ms) == (1, 74_000)

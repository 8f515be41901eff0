"""The parameters of a simulated machine are found again from its journal; a node's journal is read the same way."""

import io

import msgspec
import pytest

from benchmarks import calibration
from overwinter.core.journal import read_journal
from overwinter.simulation.models import MIB
from overwinter.simulation.world import World
from tests.simulation.scenes import function, scene

KNOWN = {"rate": 0.08, "blocks": [{"mib": 40}], "latency_ms": {"1": 30, "4": 70}, "start_s": 0.05, "prepare_s": 0.2}


def journal(**changes):
    file = io.BytesIO()
    scenario = scene(function(**KNOWN), node={"cores": 2, "disk_mib_per_s": 400}, duration_s=600, **changes)
    report = World(scenario, journal=file).run()
    file.seek(0)
    return scenario, report, list(read_journal(file)[1])


def test_the_parameters_of_the_machine_and_of_the_function_are_found_in_the_journal():
    scenario, _, steps = journal()
    figures = calibration.observed(steps)
    assert figures.disk_bytes_per_s == pytest.approx(400 * MIB)
    [known], seen = scenario.functions, figures.functions["f@1"]
    assert len(seen.first) > 10
    made = calibration.modelled("f", known.settings, known.workload, known.scheduler_profile(), seen, scenario.node)
    assert made.start_s == pytest.approx(0.05)
    assert made.prepare_s == pytest.approx(0.2)
    assert made.jitter == pytest.approx(0.0)
    assert made.scheduler_profile().points == known.scheduler_profile().points
    assert made.scheduler_profile().weight_bytes == 40 * MIB


def test_runs_in_service_that_take_longer_raise_the_latencies_of_the_profile():
    scenario, _, steps = journal()
    [known], seen = scenario.functions, calibration.observed(steps).functions["f@1"]
    slower = seen._replace(later=[0.01 + each for each in seen.later])
    made = calibration.modelled("f", known.settings, known.workload, known.scheduler_profile(), slower, scenario.node)
    assert [point.latency_s for point in made.scheduler_profile().points] == pytest.approx([0.04, 0.08])


def test_a_journal_that_begins_at_another_time_gives_the_figures_of_the_simulation():
    scenario, report, steps = journal()
    requests = calibration.arrivals(steps)
    assert len(requests) == report.total.requests
    moved = [msgspec.structs.replace(entry, now=entry.now + 1000) for entry in steps]
    read = calibration.read(moved, requests[0][0], scenario.duration_s)
    assert (read.total.answered, read.total.wakes) == (report.total.answered, report.total.wakes)
    assert read.total.busy_seconds == pytest.approx(report.total.busy_seconds)
    assert read.total.worker_seconds == pytest.approx(report.total.worker_seconds)
    assert read.memory.blocks_mean == pytest.approx(report.memory.blocks_mean)

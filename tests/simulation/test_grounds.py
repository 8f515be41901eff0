"""Overwinter's rules are no worse than those of the papers on the papers' workloads, and better than a kernel's.

They need no more memory than Tetris's DTS where only memory counts, and their attainment is no lower than that of
AsyFunc's MLS at the same or a better use of cores. It is higher than where a kernel shares the cores among all runs.
"""

from pathlib import Path

import msgspec
import pytest

from overwinter.core.policies import Policy
from overwinter.simulation.scenario import Scenario, read_scenario, scenario_of
from overwinter.simulation.world import World
from overwinter.telemetry.report import Report

SCENARIOS = Path(__file__).parent.parent.parent / "scenarios"
LITTLE = 1e-3


def run(scenario: Scenario, policy: str | Policy) -> Report:
    return World(
        msgspec.structs.replace(scenario, scheduler=msgspec.structs.replace(scenario.scheduler, policy=policy))
    ).run()


def settled_bytes(report: Report, scenario: Scenario) -> float:
    """Return the mean memory once the load has risen."""
    samples = [each for each in report.samples if scenario.settle_s <= each.at_s <= scenario.duration_s]
    return sum(each.blocks_bytes + each.workers_bytes for each in samples) / len(samples)


@pytest.mark.parametrize("application", ["svt", "qa-audio", "ss"])
def test_no_more_memory_than_dts(application):
    scenario = read_scenario(SCENARIOS / "tetris" / f"{application}.toml")
    scenario = msgspec.structs.replace(scenario, duration_s=160.0)
    theirs, ours = run(scenario, "tetris"), run(scenario, Policy(core_mib=0.0, binds=False))
    assert settled_bytes(ours, scenario) <= settled_bytes(theirs, scenario) * (1 + LITTLE)
    assert ours.total.lost == theirs.total.lost == 0
    assert ours.applications[application].attainment >= theirs.applications[application].attainment - LITTLE


@pytest.mark.parametrize("model", ["resnet50", "inception-v3"])
def test_no_lower_attainment_than_mls_and_no_worse_use_of_cores(model):
    scenario = read_scenario(SCENARIOS / "asyfunc.toml")
    functions = tuple(each for each in scenario.functions if each.name == model)
    scenario = msgspec.structs.replace(scenario, functions=functions, duration_s=120.0)
    theirs, ours = run(scenario, "mls").total, run(scenario, "overwinter").total
    assert ours.attainment >= theirs.attainment
    assert ours.busy_core_s / ours.worker_core_s >= theirs.busy_core_s / theirs.worker_core_s
    assert ours.lost == theirs.lost == 0


@pytest.mark.parametrize("rate", [4.0, 6.0, 7.0])
def test_attainment_is_higher_than_where_a_kernel_shares_the_cores(rate):
    table = {
        "duration_s": 120,
        "node": {"cores": 2},
        "functions": [
            function("short", rate, 0.01, slo_ms=100),
            function("middle", rate, 0.06, slo_ms=250),
            function("long", rate, 0.15, slo_ms=400),
        ],
    }
    scenario = scenario_of(table)
    ours, shared = run(scenario, "overwinter").total, run(scenario, Policy(order="any")).total
    assert ours.attainment > shared.attainment
    assert ours.answered == shared.answered == ours.requests


def function(name: str, rate: float, run_s: float, slo_ms: float) -> dict:
    """Return four siblings, which wake for most of their requests."""
    return {
        "name": name,
        "variants": 4,
        "blocks": [{"mib": 1}],
        "latency_ms": {"1": run_s * 1000},
        "start_s": 0.02,
        "settings": {"slo_ms": slo_ms, "keep_alive_s": 0.1},
        "workload": {"kind": "poisson", "rate": rate / 4 * 1.2},
    }

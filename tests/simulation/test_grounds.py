"""On the papers' own ground, with their bodies: Overwinter's rules need no more memory than Tetris's DTS where memory
is all that counts, and break no more promises than AsyFunc's MLS while they use what they keep at least as well.
"""

from pathlib import Path

import msgspec
import pytest

from overwinter.core.policies import Policy
from overwinter.simulation.report import Report
from overwinter.simulation.scenario import Scenario, read_scenario
from overwinter.simulation.world import World

SCENARIOS = Path(__file__).parent.parent.parent / "scenarios"
LITTLE = 1e-3


def run(scenario: Scenario, policy: str | Policy) -> Report:
    return World(msgspec.structs.replace(scenario, mind=msgspec.structs.replace(scenario.mind, policy=policy))).run()


def settled_bytes(report: Report, scenario: Scenario) -> float:
    """Mean memory once the load has risen."""
    samples = [each for each in report.samples if scenario.settle_s <= each.at_s <= scenario.duration_s]
    return sum(each.blocks_bytes + each.bodies_bytes for each in samples) / len(samples)


@pytest.mark.parametrize("application", ["svt", "qa-audio", "ss"])
def test_no_more_memory_than_dts(application):
    scenario = read_scenario(SCENARIOS / "tetris" / f"{application}.toml")
    scenario = msgspec.structs.replace(scenario, duration_s=160.0)
    theirs, ours = run(scenario, "tetris"), run(scenario, Policy(core_mib=0.0))
    assert settled_bytes(ours, scenario) <= settled_bytes(theirs, scenario) * (1 + LITTLE)
    assert ours.total.lost == theirs.total.lost == 0
    assert ours.applications[application].attainment >= theirs.applications[application].attainment - LITTLE


@pytest.mark.parametrize("model", ["resnet50", "inception-v3"])
def test_no_more_broken_promises_than_mls_and_no_worse_use_of_cores(model):
    scenario = read_scenario(SCENARIOS / "asyfunc.toml")
    functions = tuple(each for each in scenario.functions if each.name == model)
    scenario = msgspec.structs.replace(scenario, functions=functions, duration_s=120.0)
    theirs, ours = run(scenario, "mls").total, run(scenario, "overwinter").total
    assert ours.attainment >= theirs.attainment
    assert ours.busy_core_s / ours.body_core_s >= theirs.busy_core_s / theirs.body_core_s
    assert ours.lost == theirs.lost == 0

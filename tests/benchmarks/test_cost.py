"""The memory of Tetris's combined applications is bounded only by their own requests."""

from benchmarks.tetris.cost import RATES, combination
from benchmarks.tetris.simulated import APPLICATIONS, SCENARIOS
from overwinter.simulation.scenario import read_scenario
from overwinter.simulation.world import World


def test_the_combination_has_all_applications_and_no_bound():
    scenarios = [read_scenario(SCENARIOS / f"{name}.toml") for name in APPLICATIONS]
    for rate in RATES:
        made = combination(scenarios, rate)
        assert len(made.applications) == sum(len(each.applications) for each in scenarios)
        assert sum(each.workload.rate for each in made.applications) == rate
        assert (made.scheduler.workers_max, made.scheduler.memory_bytes) == (None, None)
        assert World(made, SCENARIOS)

"""Simulates a node of Torpor's evaluation, and counts the functions that comply with their SLO."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.parallel import on_all_cores
from overwinter.core.ids import FunctionName
from overwinter.simulation.scenario import Scenario
from overwinter.simulation.world import World

COMPLIANT = 0.98
"""A function complies if this share of its requests is answered within its SLO: the 98th percentile, as in section 7 of
Torpor's paper.
"""


class Tail(msgspec.Struct, frozen=True):
    """The tail latency of one model's requests."""

    p90_ms: float
    p98_ms: float


class Outcome(msgspec.Struct, frozen=True):
    """The figures of one node."""

    functions: int
    compliant: int
    served: int
    """The functions of which a request was answered."""
    attainment: float
    tails: dict[str, Tail]
    """By model."""
    load: float
    """The mean share of the time in which a device had a run."""
    load_variance: float
    """The variance of that over the devices, relative to the busiest."""
    moved_gb: float

    @property
    def ratio(self) -> float:
        """The share of the functions that comply."""
        return self.compliant / self.functions


def simulate(scenario: Scenario, traces: Path) -> Outcome:
    """Simulate one node."""
    world = World(scenario, traces)
    report = world.run()
    figures = list(report.functions.values())
    complies = [each.attainment is None or each.attainment >= COMPLIANT for each in figures]
    busy = world.executors.busy_s.values()
    most = max(busy, default=0.0) or 1.0
    mean = sum(busy) / len(busy)
    return Outcome(
        functions=len(figures),
        compliant=sum(complies),
        served=sum(each.answered > 0 for each in figures),
        attainment=report.total.attainment or 0.0,
        tails={model.name: _tail(world, model.names()) for model in scenario.functions},
        load=mean / report.duration_s,
        load_variance=sum(((each - mean) / most) ** 2 for each in busy) / len(busy),
        moved_gb=world.executors.moved_bytes / 1e9,
    )


def _tail(world: World, names: Sequence[FunctionName]) -> Tail:
    latencies = world.reader.latencies(names)
    return Tail(*(1000 * (latencies.quantile(share) or 0.0) for share in (0.90, 0.98)))


def simulate_all(scenarios: Sequence[Scenario], traces: Path) -> list[Outcome]:
    """Simulate each, on all cores."""
    return on_all_cores(simulate, [(scenario, traces) for scenario in scenarios])

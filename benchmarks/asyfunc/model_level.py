"""What do AsyFunc's model-level scaling and its baselines cost under bursts, in memory, cores and broken promises?

The six models of scenarios/asyfunc.toml, one after the other, each alone on the machine, each under every policy with
the same arrivals. Memory is the mean over time of weights and private memory; CPU utility is the paper's, cores of
runs by their time over cores of bodies by their time alive; a violation is a request not answered within the promise,
refused ones included. Everything is simulated: nothing here depends on the machine that it runs on.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

import msgspec

from benchmarks.measure import MIB, print_result
from overwinter.core.policies import POLICIES, Policy
from overwinter.simulation.scenario import Scenario, read_scenario
from overwinter.simulation.world import World

SCENARIO = Path(__file__).parent.parent.parent / "scenarios" / "asyfunc.toml"
SAME_RULES = {"last-value": "mls"}
"""MLS expects what was last; it is simulated once and told under both names."""
RULES = ("batch", "batch+", "mls", "on-demand", "k-last-value", "oracle", "overwinter")
TOLD = ("batch", "batch+", "mls", "on-demand", "last-value", "k-last-value", "oracle", "overwinter")
PLAIN = ("on-demand", "last-value", "k-last-value", "oracle")
PLAIN_MODEL = "vgg16"
ALPHA_PLAIN, BETA_PLAIN = 1.0, 0.95
"""Figure 1 compares predictors before there is an alpha: as many bodies as the expected rate fills."""


class Cell(msgspec.Struct, frozen=True):
    """One model under one policy."""

    requests: int
    memory: float
    """MiB, the mean over time."""
    bodies: float
    cores: float
    """Means over time of what is alive."""
    cpu_utility: float
    violations: float
    refused: float
    """Of the violations, those that were refused, as a share of the requests."""
    p50_ms: float
    p99_ms: float


def simulated(scenario: Scenario, model: str, policy: str | Policy) -> Cell:
    """The model alone on the scenario's machine."""
    alone = msgspec.structs.replace(
        scenario,
        functions=tuple(each for each in scenario.functions if each.name == model),
        mind=msgspec.structs.replace(scenario.mind, policy=policy),
    )
    report = World(alone).run()
    total = report.total
    return Cell(
        requests=total.requests,
        memory=report.memory.mean / MIB,
        bodies=total.body_seconds / report.duration_s,
        cores=total.body_core_s / report.duration_s,
        cpu_utility=total.busy_core_s / total.body_core_s,
        violations=1 - (total.attainment or 0.0),
        refused=sum(total.refused.values()) / total.requests,
        p50_ms=total.p50_ms or 0.0,
        p99_ms=total.p99_ms or 0.0,
    )


def without_headroom(policy: str) -> Policy:
    """The same predictor for bodies that are to be full."""
    return msgspec.structs.replace(POLICIES[policy], alpha=ALPHA_PLAIN, beta=BETA_PLAIN)


def mean(cells: Mapping[str, Cell], field: str) -> float:
    """Over the models."""
    return fmean(getattr(cell, field) for cell in cells.values())


def tell(name: str, cell: Cell) -> None:
    """A line of a table."""
    print(
        f"  {name:14}{cell.memory:10.0f}{cell.bodies:10.2f}{cell.cores:10.1f}{cell.cpu_utility:10.1%}"
        f"{cell.violations:10.2%}{cell.refused:10.2%}{cell.p50_ms:10.0f}{cell.p99_ms:10.0f}",
        flush=True,
    )


TITLES = ("MiB", "bodies", "cores", "utility", "violated", "refused", "p50 ms", "p99 ms")
HEAD = f"  {'policy':14}" + "".join(f"{title:>10}" for title in TITLES)


def table(scenario: Scenario) -> dict[str, dict[str, Cell]]:
    """Every policy on every model, told as it is known."""
    cells: dict[str, dict[str, Cell]] = {policy: {} for policy in TOLD}
    for function in scenario.functions:
        model, settings = function.name, function.settings
        print(f"\n{model}: promise {settings.slo_ms:g} ms\n{HEAD}")
        for policy in RULES:
            cell = cells[policy][model] = simulated(scenario, model, policy)
            tell(policy, cell)
        for name, same in SAME_RULES.items():
            cells[name][model] = cells[same][model]
        print(f"  {cells['mls'][model].requests} requests; last-value has the rules of mls, and so its figures")
    return cells


def run(seconds: float | None, seed: int | None) -> None:
    """Print the tables, what agrees with the paper and what does not, and RESULT."""
    began = time.process_time()
    scenario = read_scenario(SCENARIO)
    changes = {"duration_s": seconds, "seed": seed}
    scenario = msgspec.structs.replace(scenario, **{key: value for key, value in changes.items() if value is not None})
    print(f"{scenario.duration_s:.0f} s around the greatest burst of a made day, {scenario.node.cores} cores")
    cells = table(scenario)
    print(f"\nmeans over the models\n{HEAD}")
    for policy in TOLD:
        told = {field: mean(cells[policy], field) for field in Cell.__struct_fields__}
        tell(policy, msgspec.convert(told | {"requests": 0}, Cell))
    print(f"\nfigure 1, {PLAIN_MODEL} without headroom (alpha {ALPHA_PLAIN:g}, beta {BETA_PLAIN:g})\n{HEAD}")
    plain = {policy: simulated(scenario, PLAIN_MODEL, without_headroom(policy)) for policy in PLAIN}
    for policy, cell in plain.items():
        tell(policy, cell)
    print(f"\n{time.process_time() - began:.0f} s of one core")
    wanted = ("memory", "cpu_utility", "violations")
    print_result(
        {
            policy: {model: {field: getattr(cell, field) for field in wanted} for model, cell in by_model.items()}
            for policy, by_model in cells.items()
        }
    )

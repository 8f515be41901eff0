"""Compares memory and violations with baselines that get Overwinter's conditions one by one.

Each baseline runs under the stable load (memory) and under bursts (violations) with the conditions of
benchmarks.equal_conditions, one more in each row: with the paper's workers and rules; with workers that have only
Overwinter's private memory, and one zygote; with shared weights; starting workers as soon as requests wait; with
Overwinter's alpha and beta. Tetris shares from the start. Overwinter weighs a core as 64 MiB and Tetris as nothing, so
Overwinter is shown with both weights, and cores are shown next to memory. Arrivals are drawn from several seeds; the
spread is printed with the mean.
"""

from collections.abc import Mapping
from itertools import product
from statistics import fmean
from typing import NamedTuple

import msgspec

from benchmarks.equal_conditions import IMMEDIATE, PAPER, SHARING, THRESHOLDS, WORKERS, with_conditions
from benchmarks.measure import shares_text
from benchmarks.tetris.contenders import Contender, simulate_all
from overwinter.core.policies import POLICIES, Policy
from overwinter.simulation.scenario import Scenario

CONDITIONS = (PAPER, WORKERS, SHARING, IMMEDIATE, THRESHOLDS)
BASELINES = ("infless", "photons", "tetris")
OURS = Contender("overwinter", own_workers=True)
MEMORY_ONLY = Contender(Policy(core_mib=0.0), own_workers=True)
LOADS = ("stable", "bursty")


class Cell(NamedTuple):
    """One contender on one application; a value for each seed."""

    memory: tuple[float, ...]
    """The mean MiB under the stable load."""
    cores: tuple[float, ...]
    """The mean cores of all workers under the stable load."""
    violations: tuple[float, ...]
    """The share of the requests under bursts that missed their SLO."""


Cells = Mapping[str, Mapping[Contender, Cell]]
"""By application."""


def with_each_condition(baseline: str) -> list[tuple[str, Contender]]:
    """Return a baseline after each further condition, with the title of the condition."""
    return [
        (step.title, Contender(step.policy, step.own_workers))
        for step in with_conditions(POLICIES[baseline], CONDITIONS)
    ]


def measure(loaded: Mapping[str, Mapping[str, Scenario]], seeds: int) -> Cells:
    """Simulate all; `loaded` are the scenarios by application and load."""
    contenders = list(
        dict.fromkeys([OURS, MEMORY_ONLY, *(each for name in BASELINES for _, each in with_each_condition(name))])
    )
    keys = list(product(loaded, contenders, LOADS, range(seeds)))
    tasks = [(with_seed(loaded[name][load], seed), each) for name, each, load, seed in keys]
    outcomes = dict(zip(keys, simulate_all(tasks), strict=True))
    return {
        name: {
            each: Cell(
                tuple(outcomes[name, each, "stable", seed].mean for seed in range(seeds)),
                tuple(outcomes[name, each, "stable", seed].cores for seed in range(seeds)),
                tuple(outcomes[name, each, "bursty", seed].violations for seed in range(seeds)),
            )
            for each in contenders
        }
        for name in loaded
    }


def with_seed(scenario: Scenario, number: int) -> Scenario:
    """Return the scenario with the arrivals of another seed; 0 is its own."""
    return msgspec.structs.replace(scenario, seed=scenario.seed + number)


def saved(ours: Cell, theirs: Cell) -> tuple[float, ...]:
    """Return the share of their memory that is saved, for each seed."""
    return tuple(1 - own / other for own, other in zip(ours.memory, theirs.memory, strict=True))


def report(cells: Cells, seeds: int) -> None:
    """Print a table for each application."""
    print(f"\nConditions made equal one by one, over {seeds} seeds: MiB and cores under the stable load, the share of")
    print("the MiB that Overwinter saves [least, most over the seeds], and violations under bursts")
    for name, row in cells.items():
        print(f"\n{name:34}{'MiB':>8}{'cores':>8}{'saved by overwinter':>24}{'violations':>12}")
        for baseline in BASELINES:
            for title, each in with_each_condition(baseline):
                print_row(f"{baseline}, {title}", row[each], shares_text(saved(row[OURS], row[each])))
        print_row("overwinter, memory alone", row[MEMORY_ONLY], shares_text(saved(row[OURS], row[MEMORY_ONLY])))
        print_row("overwinter", row[OURS], "")


def print_row(title: str, cell: Cell, share: str) -> None:
    """Print a line of a table."""
    print(f"  {title:32}{fmean(cell.memory):8.0f}{fmean(cell.cores):8.1f}{share:>24}{fmean(cell.violations):12.2%}")


def figures(cells: Cells) -> dict[str, object]:
    """Return each headline figure with its control, for RESULT."""
    result: dict[str, object] = {
        f"sim_saved_vs_{baseline}": {name: headline(row, baseline) for name, row in cells.items()}
        for baseline in BASELINES
    }
    result["sim_violations_in_bursts"] = {name: violations(row) for name, row in cells.items()}
    return result


def headline(row: Mapping[Contender, Cell], baseline: str) -> dict[str, object]:
    """Return the saved share of a baseline's memory as in its paper, and under equal conditions."""
    (_, first), *_, (_, last) = with_each_condition(baseline)
    paper, equal = saved(row[OURS], row[first]), saved(row[OURS], row[last])
    return {
        "as_in_paper": fmean(paper),
        "equal": fmean(equal),
        "equal_spread": [min(equal), max(equal)],
        "cores": {"overwinter": fmean(row[OURS].cores), "equal": fmean(row[last].cores)},
    }


def violations(row: Mapping[Contender, Cell]) -> dict[str, object]:
    """Return Overwinter's violations and the baselines', as in their papers and under equal conditions."""
    result: dict[str, object] = {"overwinter": fmean(row[OURS].violations)}
    for baseline in BASELINES:
        (_, paper), *_, (_, equal) = with_each_condition(baseline)
        result[baseline] = {"as_in_paper": fmean(row[paper].violations), "equal": fmean(row[equal].violations)}
    return result

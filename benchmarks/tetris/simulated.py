"""The simulated part: Tetris's applications under its loads (5.3, figures 12 to 14), the scheduler's policies in turn.

The scenarios are scenarios/tetris/*.toml, which say where each number comes from. All policies see the same requests,
machine, profiles and wakes of 30 ms, and differ as follows; none is tuned.

  infless     one run at a time, batches where they fill in time, best rate a core; keep-alive by history
  photons     as many runs at once as the SLO allows, with a fixed number of cores for each; no batches
  tetris-ro   Tetris's choice of batch, concurrency and cores for the least memory (DTS), weights not shared
  tetris      the same with weights shared
  overwinter, same workers   this project's policy with the paper's workers: it weighs a core as 64 MiB, and starts a
              worker as soon as requests would wait too long, where the others read the rate every 10 s
  overwinter, memory alone   the same where a core weighs nothing, as in tetris
  overwinter  the same with this project's workers, which are forked from one zygote

Memory is the private memory of each worker plus the weights: each block once where they are shared, otherwise a copy
for each worker. The first minute, in which the load rises, is not counted.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from benchmarks.tetris import cost, equal_conditions
from benchmarks.tetris.contenders import Contender, Outcome, simulate_all
from overwinter.core.policies import Policy
from overwinter.simulation.scenario import Scenario, read_scenario
from overwinter.simulation.workloads import Bursty, Periodic, Stable, Workload

SCENARIOS = Path(__file__).parent.parent.parent / "scenarios" / "tetris"
APPLICATIONS = ("svt", "qa-audio", "ss", "qa-text")
OURS = "overwinter"
SAME = "overwinter, same workers"
ALONE = "overwinter, memory alone"
POLICIES: Mapping[str, Contender] = {
    "infless": Contender("infless"),
    "photons": Contender("photons"),
    "tetris-ro": Contender("tetris-ro"),
    "tetris": Contender("tetris"),
    SAME: Contender("overwinter"),
    ALONE: Contender(Policy(core_mib=0.0)),
    OURS: equal_conditions.OURS,
}
EQUAL = "infless, equal"
COSTED = {
    "infless": POLICIES["infless"],
    EQUAL: equal_conditions.with_each_condition("infless")[-1][1],
    "photons": POLICIES["photons"],
    "tetris": POLICIES["tetris"],
    OURS: equal_conditions.OURS,
}
PAPER = {
    "svt": (0.86, 0.68),
    "qa-audio": (0.64, 0.33),
    "ss": (0.69, 0.37),
    "qa-text": (0.65, 0.21),
}
"""The reduction of mean memory compared with INFless, and with Photons, under a stable load (5.3)."""
QUICK_S = 90.0


Outcomes = Mapping[str, Mapping[str, Mapping[str, Outcome]]]
"""By load, application, policy."""


def loads(rate: float, rise_s: float) -> dict[str, Workload]:
    """Return the three kinds of production traces of the paper's figure 8, with about the same mean."""
    return {
        "stable": Stable(rate=rate, rise_s=rise_s),
        "periodic": Periodic(low=0.4 * rate, high=1.6 * rate, period_s=120.0),
        "bursty": Bursty(rate=0.75 * rate, factor=3.0, every_s=80.0, length_s=12.0),
    }


def under_loads(scenario: Scenario) -> dict[str, Scenario]:
    """Return the scenario of one application, by load."""
    [application] = scenario.applications
    assert isinstance(application.workload, Stable)
    return {
        load: msgspec.structs.replace(scenario, applications=(msgspec.structs.replace(application, workload=workload),))
        for load, workload in loads(application.workload.rate, application.workload.rise_s or 0.0).items()
    }


def measure(loaded: Mapping[str, Mapping[str, Scenario]]) -> Outcomes:
    """Simulate every application under every load with every policy."""
    keys = [(load, name, policy) for name, by_load in loaded.items() for load in by_load for policy in POLICIES]
    found = simulate_all([(loaded[name][load], POLICIES[policy]) for load, name, policy in keys])
    outcomes: dict[str, dict[str, dict[str, Outcome]]] = {}
    for (load, name, policy), outcome in zip(keys, found, strict=True):
        outcomes.setdefault(load, {}).setdefault(name, {})[policy] = outcome
    return outcomes


def saved(by_policy: Mapping[str, Outcome], policy: str, baseline: str) -> float:
    """Return the share of the baseline's mean memory that a policy saves."""
    return 1 - by_policy[policy].mean / by_policy[baseline].mean


def report(outcomes: Outcomes) -> None:
    """Print the tables."""
    print("\nSimulated: memory (MiB), cores and violations of each application's SLO (Tetris, figures 12-14a)\n")
    print(__doc__.partition("\n\n")[2])
    head = f"{'mean':>9}{'median':>9}{'peak':>9}{'cores':>8}{'violations':>12}{'vs INFless':>12}{'vs Photons':>12}"
    for load, by_application in outcomes.items():
        for name, by_policy in by_application.items():
            print(f"{f'{name}, {load}':26}{head}")
            for policy, row in by_policy.items():
                print(f"  {policy:24}{row_text(row, by_policy)}")
            print()
    print(
        "Where a load rises at once, policies that read the rate every 10 s are late; bursts last 12 s here on average."
    )
    print_claims(outcomes["stable"])


def row_text(row: Outcome, by_policy: Mapping[str, Outcome]) -> str:
    """Format a row of a table."""
    less = [f"{row.mean / by_policy[other].mean - 1:12.1%}" for other in ("infless", "photons")]
    shown = "".join("-".rjust(12) if each.strip() in ("0.0%", "-0.0%") else each for each in less)
    lost = f"  LOST {row.lost}" if row.lost else ""
    return f"{row.mean:9.0f}{row.median:9.0f}{row.peak:9.0f}{row.cores:8.1f}{row.violations:12.2%}{shown}{lost}"


def print_claims(stable: Mapping[str, Mapping[str, Outcome]]) -> None:
    """Print the paper's claims beside these results."""
    print("Saved share of mean memory under the stable load: the paper's claim (at least), and each policy's here")
    print(f"{'':12}{'than':10}{'paper':>8}{'tetris':>9}{'same workers':>13}{'memory alone':>14}{'overwinter':>12}")
    short = []
    for name, by_policy in stable.items():
        for baseline, claimed in zip(("infless", "photons"), PAPER[name], strict=True):
            less = {policy: saved(by_policy, policy, baseline) for policy in ("tetris", SAME, ALONE, OURS)}
            print(f"{name:12}{baseline:10}{claimed:8.0%}{less['tetris']:9.1%}{less[SAME]:13.1%}", end="")
            print(f"{less[ALONE]:14.1%}{less[OURS]:12.1%}")
            short += [(name, baseline, claimed, policy, share) for policy, share in less.items() if share < claimed]
    for name, baseline, claimed, policy, share in short:
        here, theirs = stable[name][policy], stable[name]["tetris"]
        missed = f"{share:.1%} of {baseline}'s, claimed {claimed:.0%}"
        print(f"less than claimed: {policy}, {name}: {missed}. {own_share(name):.0%} of a worker's memory is private,")
        print(f"  which only fewer workers save: {here.workers:.1f} with {here.cores:.1f} cores here, Tetris", end=" ")
        print(f"{theirs.workers:.1f} with {theirs.cores:.1f}. Overwinter reacts at once, and also counts cores.")
    print()


def own_share(name: str) -> float:
    """Return the part of a worker's memory with one request that is not weights, over the functions of an
    application.
    """
    functions = read_scenario(SCENARIOS / f"{name}.toml").functions
    weights = sum(part.mib * part.count for function in functions for part in function.blocks)
    own = sum(law.runtime_mib + law.request_mib for function in functions if (law := function.law) is not None)
    return own / (own + weights)


def simulated(seeds: int, quick: bool = False) -> dict[str, object]:
    """Simulate, print the tables, and return the saved shares with their controls, the violations, and the cost."""
    scenarios = {name: read_scenario(SCENARIOS / f"{name}.toml") for name in APPLICATIONS}
    if quick:
        scenarios = {name: msgspec.structs.replace(each, duration_s=QUICK_S) for name, each in scenarios.items()}
    loaded = {name: under_loads(scenario) for name, scenario in scenarios.items()}
    outcomes = measure(loaded)
    report(outcomes)
    cells = equal_conditions.measure(loaded, seeds)
    equal_conditions.report(cells, seeds)
    by_rate = cost.measure(list(scenarios.values()), COSTED, quick)
    cost.report(by_rate)
    stable = outcomes["stable"]
    return {
        **equal_conditions.figures(cells),
        "sim_tetris_saved_vs_infless": {name: saved(rows, "tetris", "infless") for name, rows in stable.items()},
        "sim_tetris_saved_vs_photons": {name: saved(rows, "tetris", "photons") for name, rows in stable.items()},
        "sim_gb_per_100_requests": {str(rate): by_policy for rate, by_policy in by_rate.items()},
    }

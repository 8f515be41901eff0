"""The cost of a hundred requests, at rates from 100 to 5000 a second: Tetris's figure 14b.

The load combines the four applications, a quarter of the requests for each, on nodes with as many cores as they need. A
node takes up to 1000 requests a second; beyond that there are several nodes, each with its own blocks. The memory for
100 requests is the memory in use while 100 arrive in a second. The paper uses $0.0504 an hour, the price of AWS's
r6g.medium, and multiplies by GB: 61.5 GB less are $0.000861 less only if each GB costs as much as the machine, which
has 8.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec

from benchmarks.tetris.contenders import Contender, simulate_all
from overwinter.core.config import SCHEDULER_BOUNDS
from overwinter.core.function import SETTINGS_BOUNDS
from overwinter.simulation.models import FunctionModel
from overwinter.simulation.scenario import Application, Scenario
from overwinter.simulation.workloads import Stable

RATES = (100, 1000, 5000)
RATES_QUICK = (100,)
NODE_RATE = 1000
RISE_S, SETTLE_S, END_S = 20.0, 42.0, 46.0
CORES = int(SCHEDULER_BOUNDS["cores"].most)
FORK_S = 0.0005
"""Such a large node has several zygotes."""
USD_PER_HOUR = 0.0504
MACHINE_GB = 8
PAPER_GB = {"infless": 61.5, "photons": 20.2}
"""The memory that Tetris saves for 100 requests compared with these, at some rate of the figure."""


def combination(scenarios: Sequence[Scenario], rate: float) -> Scenario:
    """Return all applications on one machine, with equal shares of a rate."""
    functions: list[FunctionModel] = []
    applications: list[Application] = []
    for scenario in scenarios:
        for function in scenario.functions:
            most = {name: int(SETTINGS_BOUNDS[name].most) for name in ("max_workers", "queue_limit")}
            settings = msgspec.structs.replace(function.settings, **most)
            functions.append(msgspec.structs.replace(function, settings=settings))
        for application in scenario.applications:
            workload = Stable(rate=rate / len(scenarios), rise_s=RISE_S)
            applications.append(msgspec.structs.replace(application, workload=workload))
    first = scenarios[0]
    return msgspec.structs.replace(
        first,
        duration_s=END_S,
        settle_s=SETTLE_S,
        node=msgspec.structs.replace(first.node, cores=CORES, fork_s=FORK_S),
        scheduler=msgspec.structs.replace(first.scheduler, workers_max=None),
        functions=tuple(functions),
        applications=tuple(applications),
    )


def measure(
    scenarios: Sequence[Scenario], policies: Mapping[str, Contender], quick: bool
) -> dict[int, Mapping[str, float]]:
    """Return GB for 100 requests per second, by rate and policy."""
    on_each = {rate: rate / math.ceil(rate / NODE_RATE) for rate in (RATES_QUICK if quick else RATES)}
    keys = [(rate, policy) for rate in sorted(set(on_each.values())) for policy in policies]
    outcomes = simulate_all([(combination(scenarios, rate), policies[policy]) for rate, policy in keys])
    gb = {key: outcome.mean / 1024 * 100 / key[0] for key, outcome in zip(keys, outcomes, strict=True)}
    return {rate: {policy: gb[on_node, policy] for policy in policies} for rate, on_node in on_each.items()}


def dollars(gb: float) -> float:
    """Return the price of this many GB for a second, as the paper computes it."""
    return gb * USD_PER_HOUR / 3600


def report(found: Mapping[int, Mapping[str, float]]) -> None:
    """Print the table."""
    print("\nMemory (GB) and cost of 100 requests, a combination of the applications (Tetris, figure 14b)\n")
    print(f"{'requests/s':12}" + "".join(f"{policy:>26}" for policy in next(iter(found.values()))))
    for rate, by_policy in found.items():
        cells = "".join(f"{f'{gb:.2f} GB ${dollars(gb):.7f}':>26}" for gb in by_policy.values())
        print(f"{rate:<12}{cells}")
    print(f"$ as in the paper, at ${USD_PER_HOUR} an hour for each GB; if {MACHINE_GB} GB cost that, it is an eighth")
    for baseline, claimed in PAPER_GB.items():
        less = ", ".join(f"{rows[baseline] - rows['tetris']:.1f} at {rate}/s" for rate, rows in found.items())
        print(f"GB less by Tetris than by {baseline}: {less}; the paper says {claimed}, and not at which rate")

"""Simulates the cold-start ratio against the memory for idle workers, for each keep-alive rule (FaasCache's figure).

There are functions of six kinds, and each function is its own family. Their popularity follows Zipf's law, and they
differ in the time of a wake and in the private memory of a worker. With `--traces`, requests follow recorded rates per
minute, each row scaled by its function's popularity; without, they are Poisson. The memory of all workers is varied, as
a share of the memory of one worker of each function. Host store and cores are unlimited, so that only the memory of
workers is scarce.

The rows are rules for keeping idle workers: `cost-aware` and `lru` keep them while there is memory; `fixed` for at most
ten minutes; `histogram`, INFless's rule, for 1.1 times the 99th percentile of the idle times so far, at most an hour.
When memory is needed, the last two evict as `lru` does. The first request of each function is cold under every rule.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.measure import print_result
from overwinter.core.config import SchedulerConfig
from overwinter.core.function import Settings
from overwinter.core.policies import POLICIES, Policy
from overwinter.simulation.models import MIB, Blocks, FunctionModel
from overwinter.simulation.scenario import Machine, Scenario
from overwinter.simulation.workloads import MinuteCounts, Poisson
from overwinter.simulation.world import World
from overwinter.telemetry.report import Report

OURS = POLICIES["overwinter"]
LRU = msgspec.structs.replace(OURS, worker_eviction="lru")
RULES: Mapping[str, Policy] = {
    "cost-aware": OURS,
    "lru": LRU,
    "fixed": msgspec.structs.replace(LRU, keep_alive="fixed", keep_alive_s=600.0),
    "histogram": msgspec.structs.replace(LRU, keep_alive="history", keep_alive_s=3600.0),
}
SIZES = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
TRACE, ROWS, MINUTES = "torpor-alibaba-fc/samples.npy", 203, 30
PER_MINUTE = 10.0
"""The mean requests per minute in a row of the trace."""
FIRST_PER_MINUTE = 40.0
"""The requests per minute of the most popular function."""
CORES = 64


class Kind(NamedTuple):
    """The time of a wake and of a run, and the memory of a worker."""

    wake_s: float
    run_ms: float
    mib: float


KINDS = (
    Kind(0.008, 2, 6),
    Kind(0.015, 12, 10),
    Kind(0.025, 45, 16),
    Kind(0.034, 120, 20),
    Kind(0.015, 60, 12),
    Kind(0.060, 15, 40),
)
"""An MLP, MiniLM, ResNet-50, ResNet-152 and BERT, rounded from `wake` and `density`, and one with a handler that reads
a large tokenizer.
"""


class Point(NamedTuple):
    """The result of one rule at one size."""

    cold: float
    """The share of requests for which a worker was forked."""
    added_ms: float
    """The time of their wakes, divided among all requests."""
    mean_mib: float
    """The mean private memory of all workers."""


def functions(count: int, traced: bool) -> Iterator[FunctionModel]:
    """Yield the functions, the most popular first."""
    for index in range(count):
        kind, per_minute = KINDS[index % len(KINDS)], FIRST_PER_MINUTE / (index + 1)
        if traced:
            workload = MinuteCounts(TRACE, scale=per_minute / PER_MINUTE, row=index % ROWS, minutes=MINUTES)
        else:
            workload = Poisson(per_minute / 60)
        yield FunctionModel(
            name=f"f{index:04}",
            blocks=(Blocks(mib=1.0),),
            latency_ms={1: kind.run_ms},
            start_s=kind.wake_s,
            prepare_s=0.0,
            worker_mib=kind.mib,
            settings=Settings(max_workers=1),
            workload=workload,
        )


def simulate(models: Sequence[FunctionModel], policy: Policy, size: float, options: argparse.Namespace) -> Point:
    """Simulate one rule, with memory for this share of all workers."""
    nbytes = int(size * sum(model.worker_mib for model in models) * MIB)
    scenario = Scenario(
        seed=options.seed,
        duration_s=options.seconds,
        node=Machine(cores=CORES),
        scheduler=SchedulerConfig(policy=policy, memory_bytes=nbytes),
        functions=tuple(models),
    )
    report = World(scenario, options.traces or Path()).run()
    return figures(models, report)


def figures(models: Sequence[FunctionModel], report: Report) -> Point:
    """Return the figures of a report."""
    wakes = [sum(report.functions[model.name].wakes.values()) for model in models]
    spent_s = sum(number * model.start_s for number, model in zip(wakes, models, strict=True))
    total = report.total
    assert not total.lost
    return Point(sum(wakes) / total.requests, spent_s * 1000 / total.requests, report.memory.workers_mean / MIB)


def print_table(title: str, rows: Mapping[str, Mapping[float, Point]], field: str, form: str) -> None:
    """Print a table with a line for each rule and a column for each size."""
    print(f"\n{title:28}" + "".join(f"{size:>9g}" for size in next(iter(rows.values()))))
    for name, points in rows.items():
        print(f"{name:28}" + "".join(f"{getattr(point, field):>9{form}}" for point in points.values()))


def by_size(rows: Mapping[str, Mapping[float, Point]], field: str) -> dict[str, dict[str, float]]:
    """Return one figure of every point, by rule and size."""
    return {name: {f"{size:g}": getattr(each, field) for size, each in row.items()} for name, row in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--traces", type=Path, help="the directory that contains torpor-alibaba-fc; by default arrivals are Poisson"
    )
    parser.add_argument("--functions", type=int, default=200, help="number of functions; default 200")
    parser.add_argument("--seconds", type=float, default=3600.0, help="seconds to simulate; default 3600")
    parser.add_argument(
        "--sizes",
        type=float,
        nargs="+",
        default=SIZES,
        help="memory, as shares of the memory of one worker of each function",
    )
    parser.add_argument(
        "--rules", nargs="+", choices=RULES, default=tuple(RULES), help="keep-alive rules to compare; default all"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the arrivals; default 1")
    options = parser.parse_args()
    models = list(functions(options.functions, options.traces is not None))
    rows: dict[str, dict[float, Point]] = {}
    for name in options.rules:
        rows[name] = {size: simulate(models, RULES[name], size, options) for size in options.sizes}
    whole = sum(model.worker_mib for model in models)
    print(f"{len(models)} functions, {options.seconds:.0f} s; columns: shares of {whole:.0f} MiB, one worker of each")
    print_table("cold starts, of all requests", rows, "cold", ".4f")
    print_table("wakes, ms a request", rows, "added_ms", ".3f")
    print_table("memory in use, MiB", rows, "mean_mib", ".0f")
    print_result({field: by_size(rows, field) for field in ("cold", "added_ms")})


if __name__ == "__main__":
    main()

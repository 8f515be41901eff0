"""Compares the memory of the greedy scaling algorithms, DTS and the default, with the integer program's.

There are two sets of cases, from one seed. `random`: profiles of random models like those of the property tests, with
36 configurations each. `measured`: four models whose latencies were measured on two cores (ResNet-50 and BERT at
sequence length 64, which gain little from batches; an MLP of 100 MB and an LSTM, which gain much), with private memory
modelled as a runtime plus the activations of each concurrent request. A case is an SLO, 2, 4 or 8 times the fastest
run, and a rate, about 0.2 to 12 times the highest throughput of a worker that meets the SLO. A gap is the additional
memory relative to the integer program's. `first` has the cases with a rate below that throughput, in which one worker
is enough, as for most functions.
"""

import argparse
import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from benchmarks.measure import MIB, print_result, quantile
from overwinter.core.profile import Point
from overwinter.scheduler.policies.scaling import default, dts, exact
from overwinter.scheduler.policies.scaling.selection import Selection

SELECTS: Mapping[str, Callable[..., Selection]] = {
    "dts": dts.select,
    "overwinter": default.select,
    "exact": exact.select,
}
SIZES = (0.2, 0.7, 1.5, 3, 6, 12)
SLACKS = (2, 4, 8)

Measured = Mapping[tuple[int, int], Mapping[int, float]]
"""Milliseconds by batch, by cores and concurrency."""

RESNET50: Measured = {
    (1, 1): {1: 98, 2: 206, 4: 368, 8: 809},
    (1, 2): {1: 209},
    (1, 4): {1: 422},
    (2, 1): {1: 70, 2: 148, 4: 242, 8: 560},
    (2, 2): {1: 103, 4: 453},
    (2, 4): {1: 232},
}
BERT: Measured = {
    (1, 1): {1: 169, 2: 300, 4: 584},
    (2, 1): {1: 107, 2: 179, 4: 293, 8: 554},
    (2, 2): {1: 148, 2: 283, 4: 480},
    (2, 4): {1: 341, 2: 598},
}
MLP: Measured = {(1, 1): {1: 5.1, 8: 13.3, 16: 17.3, 32: 25.0}}
LSTM: Measured = {(1, 1): {1: 27.5, 8: 66.4, 16: 126}}

MODELS: Mapping[str, tuple[Measured, int, int]] = {
    "resnet50": (RESNET50, 190, 25),
    "bert": (BERT, 190, 12),
    "mlp": (MLP, 150, 1),
    "lstm": (LSTM, 150, 2),
}
"""The measured latencies, with the MiB of the runtime and of the activations of one request."""


def measured(name: str) -> list[Point]:
    """Return the profile of a measured model."""
    milliseconds, runtime, activations = MODELS[name]
    return [
        Point(cores, (runtime + activations * batch * concurrency) * MIB, batch, concurrency, value / 1000)
        for (cores, concurrency), by_batch in milliseconds.items()
        for batch, value in by_batch.items()
    ]


def drawn(chance: random.Random) -> list[Point]:
    """Return a random model: cores help up to its serial part, batches hardly or much, and runs that share
    cores wait.
    """
    alone_s = chance.lognormvariate(math.log(0.05), 0.8)
    serial, batching = chance.uniform(0.05, 0.6), chance.choice((0.0, 0.1, 0.2, 0.8))
    runtime, activations = chance.uniform(20, 400), chance.uniform(1, 80)
    points = []
    for cores in (1, 2, 4):
        for concurrency in (1, 2, 4):
            for batch in (1, 2, 4, 8):
                seconds = alone_s * (1 + (batch - 1) * (1 - batching)) * chance.uniform(0.95, 1.1)
                seconds *= max(1, concurrency / cores) * (serial + (1 - serial) / max(1, cores / concurrency))
                mib = runtime + activations * batch * concurrency * chance.uniform(0.9, 1.1)
                points.append(Point(cores, int(mib * MIB), batch, concurrency, seconds))
    return points


def cases(chance: random.Random, count: int) -> Iterator[tuple[str, list[Point]]]:
    """Yield the profiles of this many cases of each set, with the name of the set."""
    for number in range(count):
        yield "random", drawn(chance)
        yield "measured", measured(list(MODELS)[number % len(MODELS)])


def compare(chance: random.Random, count: int) -> tuple[dict[str, dict[str, list[float]]], dict[str, float]]:
    """Return the gaps by set of cases and scaler, and the seconds of a choice by scaler."""
    gaps: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    spent: dict[str, list[float]] = defaultdict(list)
    for kind, points in cases(chance, count):
        slo_s = chance.choice(SLACKS) * min(point.latency_s for point in points)
        size = chance.choice(SIZES) * chance.uniform(0.7, 1.3)
        rate = size * max(point.throughput for point in points if dts.queues_in_time(point, slo_s))
        costs = {}
        for name, select in SELECTS.items():
            begun = time.process_time()
            selection = select(points, rate, slo_s, lambda point: point.memory_bytes)
            spent[name].append(time.process_time() - begun)
            assert not selection.unserved, f"{name} serves all: memory and cores are unlimited"
            costs[name] = sum(point.memory_bytes for point in selection.chosen)
        for name in ("dts", "overwinter"):
            for group in ("all", kind, *(["first"] if size < 1 else [])):
                gaps[group][name].append(costs[name] / costs["exact"] - 1)
    return gaps, {name: statistics.median(seconds) for name, seconds in spent.items()}


def quantiles(gaps: Sequence[float]) -> dict[str, float]:
    """Summarise many gaps."""
    return {"mean": statistics.fmean(gaps), "p95": quantile(gaps, 0.95), "max": max(gaps)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="cases of each set; default 1000")
    parser.add_argument("--seed", type=int, default=0, help="seed of the cases; default 0")
    options = parser.parse_args()
    gaps, seconds = compare(random.Random(options.seed), options.count)
    print(f"{'cases':10}{'scaling':12}{'number':>8}{'mean':>9}{'p95':>9}{'max':>9}{'optimal':>9}")
    for group, by_name in gaps.items():
        for name, values in by_name.items():
            row = "".join(f"{value:9.1%}" for value in quantiles(values).values())
            print(f"{group:10}{name:12}{len(values):8}{row}{sum(gap < 1e-6 for gap in values) / len(values):9.1%}")
    print("a choice takes " + ", ".join(f"{value * 1e3:.3f} ms ({name})" for name, value in seconds.items()))
    print_result({"gap": {name: quantiles(values) for name, values in gaps["all"].items()}})


if __name__ == "__main__":
    main()

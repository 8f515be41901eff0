"""Compresses an hour of requests of many functions into minutes on a small machine.

Time is compressed, and each request of the trace is kept with a probability that gives the wanted load of the cores. A
request costs a run, and also a wake if its function has no worker: with Poisson arrivals, the probability of that is
the probability of no arrival within the keep-alive.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from random import Random
from typing import NamedTuple

from overwinter.simulation.workloads import Bursty, MinuteCounts, Periodic, Poisson, Workload, arrivals

HOUR_S = 3600.0
RECORDED = MinuteCounts("torpor-alibaba-fc/samples.npy", minutes=30)
"""The 30 full minutes of a recording, twice; functions beyond its rows begin at random minutes."""
PER_S = 10.1 / 60
"""The mean rate of a function in that recording, and in generated traffic except for bursty functions, which have three
quarters of it.
"""
GENERATED: tuple[Workload, ...] = (
    Poisson(PER_S),
    Periodic(0.2 * PER_S, 1.8 * PER_S, 1200.0),
    Bursty(0.5 * PER_S, 6.0, 540.0, 60.0),
)
"""Functions with a constant rate, with a periodic rate and with bursts, in turn."""
HALVINGS = 40


class Cost(NamedTuple):
    """The core-seconds of one request to a function."""

    run: float
    wake: float
    """The additional core-seconds of a request to a function without a worker."""


def hour(functions: int, traces: Path | None, seed: int) -> list[list[float]]:
    """Return for each function the times of its requests within an hour; `traces`: the directory of recordings."""

    def streams() -> Iterator[Iterator[float]]:
        for index in range(functions):
            rng = Random(f"{seed} arrivals {index}")
            if traces is None:
                yield arrivals(GENERATED[index % len(GENERATED)], rng, index, Path())
            else:
                yield arrivals(RECORDED, rng, index, traces)

    return [list(takewhile(lambda at: at < HOUR_S, stream)) for stream in streams()]


def busy_cores(rates: Sequence[float], costs: Sequence[Cost], keep_alive_s: float) -> float:
    """Return the cores that functions with these rates keep busy; `keep_alive_s` inf: only runs count."""
    if math.isinf(keep_alive_s):
        return sum(rate * cost.run for rate, cost in zip(rates, costs, strict=True))
    return sum(
        rate * (cost.run + math.exp(-rate * keep_alive_s) * cost.wake) for rate, cost in zip(rates, costs, strict=True)
    )


def kept_share(rates: Sequence[float], costs: Sequence[Cost], keep_alive_s: float, cores: float) -> float:
    """Return the share of requests to keep, at most 1, so that the load is `cores`."""
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if busy_cores([rate * middle for rate in rates], costs, keep_alive_s) <= cores:
            low = middle
        else:
            high = middle
    return high


def compressed(
    arrival_times: Sequence[Sequence[float]], speed: float, share: float, seed: int
) -> list[tuple[float, int]]:
    """Return requests in order of time, each with its function's number: `speed` times faster, and only a share of
    them. `arrival_times`: those of each function.
    """
    rng = Random(f"{seed} kept")
    kept = [(at / speed, index) for index, times in enumerate(arrival_times) for at in times if rng.random() < share]
    kept.sort()
    return kept

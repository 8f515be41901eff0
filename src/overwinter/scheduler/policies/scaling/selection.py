"""A choice of configurations, its bounds, and the greedy selection from an ordered list.

This is common to all scaling algorithms. A rate here is a capacity that is still needed, in requests per second. The
loops end for any input: an infinite rate takes what the bounds allow, and no choice has more than `Limits.workers`.
"""

import math
from collections.abc import Callable, Iterable

import msgspec

from overwinter.core.function import SETTINGS_BOUNDS
from overwinter.core.profile import Point
from overwinter.scheduler.policies.scaling.scaler import ScalingInput

MOST_THROUGHPUT = 1e300
"""The largest throughput of one worker, so that sums stay finite."""
EPSILON = 1e-9
"""Rates that differ by a smaller share are equal: rounding errors must not start a worker."""
MOST_WORKERS = int(SETTINGS_BOUNDS["max_workers"].most)

Cost = Callable[[Point], float]
"""The cost of one worker of a configuration; bytes unless stated otherwise."""


class Selection(msgspec.Struct, frozen=True):
    """The configurations to start, one entry per worker."""

    chosen: tuple[Point, ...] = ()
    unserved: float = 0.0
    """The part of the rate that they cannot serve."""


class Limits(msgspec.Struct, frozen=True):
    """The bounds on further workers."""

    cores: float = math.inf
    workers: int = MOST_WORKERS
    nbytes: float = math.inf
    copy_bytes: int = 0
    """The bytes of the weights if each worker has its own copy of them; otherwise 0."""
    runs: float = math.inf
    """The concurrent runs of all of them."""

    def workers_that_fit(self, point: Point) -> int:
        """Return how many workers of this configuration the limits allow."""
        by_cores = _whole(self.cores, point.cores)
        by_bytes = _whole(self.nbytes, point.memory_bytes + self.copy_bytes)
        by_runs = _whole(self.runs, point.concurrency)
        return max(0, min(self.workers, by_cores, by_bytes, by_runs))

    def less(self, point: Point, count: int) -> "Limits":
        """Return the remaining limits after this many workers."""
        nbytes = self.nbytes - count * (point.memory_bytes + self.copy_bytes)
        runs = self.runs - count * point.concurrency
        return Limits(self.cores - count * point.cores, self.workers - count, nbytes, self.copy_bytes, runs)


BOUNDLESS = Limits()


def limits_of(given: ScalingInput) -> Limits:
    """The limits of the free resources."""
    copy = 0 if given.shared else given.weight_bytes
    workers = min(given.free_workers, MOST_WORKERS)
    return Limits(given.free_cores, workers, given.free_bytes, copy, given.free_runs)


def usable(point: Point) -> bool:
    """Whether the point is a valid measurement: its latency is positive and finite, and its throughput is below
    MOST_THROUGHPUT.
    """
    return 0 < point.latency_s < math.inf and point.throughput < MOST_THROUGHPUT


def queues_in_time(point: Point, slo_s: float) -> bool:
    """Tetris's equations (2) and (3): a request of a batch may wait for a whole run before its own begins."""
    return point.latency_s <= (slo_s if point.batch == 1 else slo_s / 2)


def runs_in_time(point: Point, slo_s: float) -> bool:
    """AsyFunc's equation (1): the run alone meets the SLO."""
    return point.latency_s <= slo_s


def size(point: Point) -> tuple[int, int, int]:
    """The sort key of configurations that are otherwise equal."""
    return point.cores, point.batch, point.concurrency


def ratio(point: Point, cost: float) -> float:
    """Requests per second per unit of cost; 0 if the point is not usable."""
    if not usable(point):
        return 0.0
    return point.throughput / cost if cost > 0 else math.inf


def by_ratio(points: Iterable[Point], cost: Cost) -> list[Point]:
    """Sort configurations by ratio, the best first; equal ones by latency, then by size."""
    return sorted(points, key=lambda point: (-ratio(point, cost(point)), point.latency_s, *size(point)))


def workers_for(rate: float, point: Point) -> int:
    """Return the fewest workers of this configuration that serve a rate above 0."""
    return max(1, math.ceil(min(rate / point.throughput * (1 - EPSILON), MOST_WORKERS)))


def take(ordered: Iterable[Point], rate: float, limits: Limits) -> Selection:
    """Take as many workers of the first configuration as the rate needs; for what the limits do not allow, workers of
    the next.
    """
    chosen: list[Point] = []
    left = rate
    for point in ordered:
        if is_negligible(left, rate):
            break
        count = min(workers_for(left, point), limits.workers_that_fit(point))
        chosen += [point] * count
        left -= count * point.throughput
        limits = limits.less(point, count)
    return Selection(tuple(chosen), 0.0 if is_negligible(left, rate) else left)


def is_negligible(left: float, rate: float) -> bool:
    """Whether the rest of a rate is negligible."""
    return left <= (rate * EPSILON if rate < math.inf else 0)


def without_excess(chosen: Iterable[Point], rate: float) -> tuple[Point, ...]:
    """Remove, in order, each worker without which the others still serve the rate."""
    kept = list(chosen)
    served = math.fsum(point.throughput for point in kept)
    for point in tuple(kept):
        if served - point.throughput >= rate * (1 - EPSILON):
            kept.remove(point)
            served -= point.throughput
    return tuple(kept)


def _whole(have: float, each: float) -> int:
    """How many times `each` fits into `have`."""
    if each <= 0 or have == math.inf:
        return MOST_WORKERS
    return math.floor(min(max(have, 0) / each + EPSILON, MOST_WORKERS))

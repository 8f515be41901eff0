"""Tetris's DTS (3.2, algorithm 1): serves a rate with little memory, by a greedy choice of configurations.

It takes the configuration with the best rate per byte again and again until the rate is served. Without bounds this
gives workers of one configuration, whose cost is at most the minimum plus that of one of them. The variant counts cores
too: m + alpha·c, where alpha is `Demand.gamma` here. Tetris-RO (runtime sharing only) makes the same choice for workers
that do not share their weights.
"""

from collections.abc import Callable, Sequence

from overwinter.core.profile import Point
from overwinter.scheduler.policies.scaling.demand import Demand, Scaled
from overwinter.scheduler.policies.scaling.hysteresis import Algorithm, Points, any_of, least_loaded_first, scale
from overwinter.scheduler.policies.scaling.selection import (
    BOUNDLESS,
    Cost,
    Limits,
    Selection,
    by_ratio,
    limits_of,
    queues_in_time,
    take,
    usable,
)


def select(points: Sequence[Point], rate: float, slo_s: float, cost: Cost, limits: Limits = BOUNDLESS) -> Selection:
    """Return workers that serve a rate, each within the SLO, and the unserved rest, which is all of it if none fits."""
    kept = [point for point in points if usable(point) and queues_in_time(point, slo_s)]
    return take(by_ratio(kept, cost), rate, limits)


def by_memory(demand: Demand) -> Scaled:
    """Scale by algorithm 1 over the remaining rate, with the least memory."""
    return scale(_BY_MEMORY, demand)


def by_memory_and_cores(demand: Demand) -> Scaled:
    """Scale by algorithm 1 with m + alpha·c for m."""
    return scale(_BY_MEMORY_AND_CORES, demand)


def memory_and_cores(demand: Demand) -> Cost:
    """The cost m + alpha·c of Tetris."""
    return lambda point: demand.memory(point) + demand.gamma * point.cores


def _algorithm(cost: Callable[[Demand], Cost]) -> Algorithm:
    def choose(demand: Demand, rate: float) -> Points:
        return take(by_ratio(demand.points, cost(demand)), rate, limits_of(demand)).chosen

    return Algorithm(queues_in_time, any_of, choose, least_loaded_first)


_BY_MEMORY = _algorithm(lambda demand: demand.memory)
_BY_MEMORY_AND_CORES = _algorithm(memory_and_cores)

"""Tetris's DTS (3.2, algorithm 1): serves a rate with little memory, by a greedy choice of configurations.

It takes the configuration with the best rate per byte again and again until the rate is served. Without bounds this
gives workers of one configuration, whose cost is at most the minimum plus that of one of them. The variant counts cores
too: m + alpha·c, where alpha is `ScalingInput.gamma` here. Tetris-RO (runtime sharing only) makes the same choice for
workers that do not share their weights.
"""

from collections.abc import Callable, Sequence

from overwinter.core.profile import Point
from overwinter.scheduler.policies.scaling.hysteresis import Algorithm, Points, all_points, least_loaded_first, scale
from overwinter.scheduler.policies.scaling.scaler import Scaled, ScalingInput
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


def by_memory(given: ScalingInput) -> Scaled:
    """Scale by algorithm 1 over the remaining rate, with the memory as the cost."""
    return scale(_BY_MEMORY, given)


def by_memory_and_cores(given: ScalingInput) -> Scaled:
    """Scale by algorithm 1 over the remaining rate, with m + alpha·c as the cost (m: memory, c: cores)."""
    return scale(_BY_MEMORY_AND_CORES, given)


def memory_and_cores(given: ScalingInput) -> Cost:
    """The cost m + alpha·c of Tetris."""
    return lambda point: given.memory(point) + given.gamma * point.cores


def _algorithm(cost: Callable[[ScalingInput], Cost]) -> Algorithm:
    def choose(given: ScalingInput, rate: float) -> Points:
        return take(by_ratio(given.points, cost(given)), rate, limits_of(given)).chosen

    return Algorithm(queues_in_time, all_points, choose, least_loaded_first)


_BY_MEMORY = _algorithm(lambda given: given.memory)
_BY_MEMORY_AND_CORES = _algorithm(memory_and_cores)

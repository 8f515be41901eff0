"""INFless (ASPLOS'22): batches, with the best rate per core, wherever cores are free.

As in Tetris's comparison (5.1), each worker has one run at a time, and a batch only where it fills in time: by equation
(3) of Tetris, and where the remaining rate is at least b/(slo - l). A function whose profile has no batches gets batch
1. INFless also prefers to leave few resources of a server over. On one machine this becomes: among configurations with
an equal rate per core, the one with fewer cores.
"""

import math

from overwinter.core.profile import Point
from overwinter.scheduler.policies.scaling.hysteresis import Algorithm, Points, least_loaded_first, one_at_a_time, scale
from overwinter.scheduler.policies.scaling.scaler import Scaled, ScalingInput
from overwinter.scheduler.policies.scaling.selection import (
    limits_of,
    queues_in_time,
    ratio,
    take,
    without_excess,
    workers_for,
)


def infless(given: ScalingInput) -> Scaled:
    """Scale by batching only, with the best rate per core."""
    return scale(_INFLESS, given)


def _choose(given: ScalingInput, rate: float) -> Points:
    limits, left = limits_of(given), rate
    chosen: list[Point] = []
    ordered = sorted(given.points, key=lambda point: (-ratio(point, point.cores), point.cores, point.memory_bytes))
    for point in ordered:
        beyond = left - _filling(given, point)
        if left > 0 and beyond >= 0:
            count = min(
                workers_for(left, point), workers_for(beyond + point.throughput, point), limits.workers_that_fit(point)
            )
            chosen += [point] * count
            left -= count * point.throughput
            limits = limits.less(point, count)
    # Serve the rest of the rate too, although it fills no batch in time.
    rest = take(ordered, max(left, 0.0), limits)
    return without_excess((*chosen, *rest.chosen), rate)


def _filling(given: ScalingInput, point: Point) -> float:
    """The least rate that fills its batch in time."""
    if point.batch == 1 or given.slo_s is None:
        return 0.0
    spare_s = given.slo_s - point.latency_s
    return point.batch / spare_s if spare_s > 0 else math.inf


_INFLESS = Algorithm(queues_in_time, one_at_a_time, _choose, least_loaded_first)

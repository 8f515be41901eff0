"""Which one configuration would BATCH (SC'20) run a function in?

One is chosen from the profile and the rate known when the function has no worker, and kept while it has one: that is
its "offline". A front buffer gives a batch when it is full or after T = slo - l, so at rate R a batch holds
min(b, 1 + R·T) requests, and the choice costs the fewest core-seconds a request; of equals the least memory. BATCH
asks seldom and with the peak of the recent rates (the predictor `peak`), so that its workers are there before the load.
"""

import math

from overwinter.core.profile import Point
from overwinter.scheduler.policies.scaling.demand import Demand, Scaled
from overwinter.scheduler.policies.scaling.hysteresis import (
    Points,
    Way,
    expected,
    least_loaded_first,
    one_at_a_time,
    scale,
)
from overwinter.scheduler.policies.scaling.selection import room_of, runs_in_time, size, take


def batch(demand: Demand) -> Scaled:
    """More and fewer workers of one configuration."""
    return scale(_BATCH, demand)


def cost_of_a_request(point: Point, rate: float, slo_s: float) -> float:
    """Core-seconds, at this rate into one buffer."""
    return point.cores * point.latency_s / min(point.batch, 1 + rate * max(slo_s - point.latency_s, 0.0))


def _choose(demand: Demand, rate: float) -> Points:
    slo_s = math.inf if demand.slo_s is None else demand.slo_s
    living = {worker.point.shape for worker in demand.workers}

    def key(point: Point) -> tuple[float, ...]:
        cost = cost_of_a_request(point, expected(demand), slo_s)
        return (point.shape not in living, cost, point.memory_bytes, *size(point))

    return take(sorted(demand.points, key=key), rate, room_of(demand)).chosen


_BATCH = Way(runs_in_time, one_at_a_time, _choose, least_loaded_first)

"""The configuration that BATCH (SC'20) would choose for a function.

It is chosen from the profile and the expected rate when the function has no worker, and kept while it has one: this
corresponds to the "offline" phase of BATCH. A front buffer sends a batch when it is full or after T = slo - l, where l
is the latency of a run of b requests, so at rate R a batch holds min(b, 1 + R·T) requests. The choice minimizes the
core-seconds per request, then the memory. BATCH decides rarely and with the peak of the recent rates (the predictor
`peak`), so that its workers exist before the load.
"""

import math

from overwinter.core.profile import Point
from overwinter.scheduler.policies.scaling.hysteresis import (
    Algorithm,
    Points,
    expected,
    least_loaded_first,
    one_at_a_time,
    scale,
)
from overwinter.scheduler.policies.scaling.scaler import Scaled, ScalingInput
from overwinter.scheduler.policies.scaling.selection import limits_of, runs_in_time, size, take


def batch(given: ScalingInput) -> Scaled:
    """Add and release workers, of the cheapest configuration as far as the limits allow."""
    return scale(_BATCH, given)


def cost_of_a_request(point: Point, rate: float, slo_s: float) -> float:
    """Return the core-seconds per request at this rate into one buffer."""
    return point.cores * point.latency_s / min(point.batch, 1 + rate * max(slo_s - point.latency_s, 0.0))


def _choose(given: ScalingInput, rate: float) -> Points:
    slo_s = math.inf if given.slo_s is None else given.slo_s
    live = {worker.point.configuration for worker in given.workers}

    def key(point: Point) -> tuple[float, ...]:
        cost = cost_of_a_request(point, expected(given), slo_s)
        return (point.configuration not in live, cost, point.memory_bytes, *size(point))

    return take(sorted(given.points, key=key), rate, limits_of(given)).chosen


_BATCH = Algorithm(runs_in_time, one_at_a_time, _choose, least_loaded_first)

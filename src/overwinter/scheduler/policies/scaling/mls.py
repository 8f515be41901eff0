"""AsyFunc's model-level scaling, MLS (4.2, algorithm 1): chooses the number of cores of the next worker.

For each number of cores the largest batch that fills and runs in time, (b - 1)/R + l <= slo, gives the efficiency

    eta = b/(c·l) + b/(rho·m·l)        rho = MACs / weight bytes, m = the bytes of one worker with its weights

and workers with the highest efficiency are started. The formula adds a number of cores and rho·m, a number of MACs,
without saying in which unit. In single MACs rho·m is 10^9 for a real model, and memory would never matter. In 10^9 MACs
it is similar to a number of cores (4 for ResNet-50), and fewer and larger workers are preferred where the rate allows,
as the paper reports; so this unit is used. A started worker has these cores and the batch with the highest rate within
the SLO, which R_max counts; the batch of each run is chosen when the requests are present (alg. 3).
"""

from collections.abc import Iterable

from overwinter.core.profile import Point
from overwinter.scheduler.policies.scaling.hysteresis import Algorithm, Points, expected, one_at_a_time, scale
from overwinter.scheduler.policies.scaling.scaler import CurrentWorker, Scaled, ScalingInput
from overwinter.scheduler.policies.scaling.selection import limits_of, ratio, runs_in_time, take

MACS_UNIT = 1e9


def mls(given: ScalingInput) -> Scaled:
    """Scale by algorithm 1: alpha and beta bound the load, and the least efficient workers are released first."""
    return scale(_MLS, given)


def efficiency(given: ScalingInput, point: Point) -> float:
    """Return eta of a configuration: its rate per core plus its rate per 10^9 MACs of rho·m."""
    nbytes = point.memory_bytes + given.weight_bytes
    rho_m = given.macs * nbytes / (max(given.weight_bytes, 1) * MACS_UNIT)
    return ratio(point, point.cores) + (ratio(point, rho_m) if rho_m > 0 else 0.0)


def _choose(given: ScalingInput, rate: float) -> Points:
    """Return the workers to start, from one configuration for each number of cores, the most efficient first."""
    made = []
    for cores in sorted({point.cores for point in given.points}):
        same = [point for point in given.points if point.cores == cores]
        eta = efficiency(given, _filled(given, same))
        made.append((-eta, cores, max(same, key=lambda point: (point.throughput, -point.batch))))
    return take([point for _, _, point in sorted(made)], rate, limits_of(given)).chosen


def _filled(given: ScalingInput, points: Iterable[Point]) -> Point:
    """Return the largest batch that fills and runs in time, otherwise the smallest."""
    rising = sorted(points, key=lambda point: point.batch)
    in_time = [point for point in rising if given.slo_s is None or _longest_s(given, point) <= given.slo_s]
    return in_time[-1] if in_time else rising[0]


def _longest_s(given: ScalingInput, point: Point) -> float:
    """Return the longest latency in a batch: that of its first request, which waits for all others."""
    waits_s = (point.batch - 1) / expected(given) if point.batch > 1 else 0.0
    return waits_s + point.latency_s


def _order(given: ScalingInput) -> list[CurrentWorker]:
    return sorted(
        given.workers, key=lambda worker: (efficiency(given, worker.point), worker.load, -worker.since, worker.worker)
    )


_MLS = Algorithm(runs_in_time, one_at_a_time, _choose, _order)

"""Decides when a function gets or loses workers, for all scaling algorithms.

This is AsyFunc 4.1, the same for all algorithms, so that they differ only in which configurations they choose and which
workers they release or replace. R is the expected request rate, and R_max the sum over the workers of the rate that
each can serve within the SLO:

    R > alpha·R_max      workers for R/alpha - R_max are chosen and started, within the bounds
    R < beta·R_max       each worker in turn is released if R < beta·R_max also holds without it
    between the two      no change, except that workers that serve nothing within the SLO are released

Where no worker is started, an algorithm may replace the existing workers by others. It then stops workers in place of
the release above, or starts workers if none is released.

A decision that starts a worker stops none: superfluous workers are released at the next decision, when the new ones are
ready. So a constant demand settles soon, and newly started workers are not stopped. With R = 0 one worker stays, and
keep-alive decides about it. beta < alpha is required.
"""

import math
from collections.abc import Callable, Sequence

import msgspec

from overwinter.core.ids import WorkerId
from overwinter.core.profile import Configuration, Point
from overwinter.scheduler.policies.scaling.scaler import CurrentWorker, Scaled, ScalingInput
from overwinter.scheduler.policies.scaling.selection import EPSILON, limits_of, ratio, size, take, usable

Points = tuple[Point, ...]


def nothing(given: ScalingInput) -> Scaled:
    """Change nothing."""
    return Scaled()


class Algorithm(msgspec.Struct, frozen=True):
    """One algorithm. `choose`, `order` and `replace` get an input with only the configurations that the algorithm may
    choose.
    """

    in_time: Callable[[Point, float], bool]
    """Whether a configuration meets an SLO, which is given in seconds."""
    among: Callable[[Points], Points]
    """The configurations that the algorithm can use, of those that meet the SLO."""
    choose: Callable[[ScalingInput, float], Points]
    """The workers to start for a further rate, within the free resources."""
    order: Callable[[ScalingInput], Sequence[CurrentWorker]]
    """The workers, those to release first in front."""
    replace: Callable[[ScalingInput], Scaled] = nothing
    """What replaces the existing workers although they serve the rate."""


def all_points(points: Points) -> Points:
    """Every configuration can be used."""
    return points


def one_at_a_time(points: Points) -> Points:
    """Only configurations with one run at once: batching, and no concurrency."""
    return tuple(point for point in points if point.concurrency == 1)


def least_loaded_first(given: ScalingInput) -> list[CurrentWorker]:
    """Return the order of release: the least loaded first; of those the lowest rate per byte; then the newest."""
    return sorted(
        given.workers,
        key=lambda worker: (
            worker.load,
            ratio(worker.point, given.memory(worker.point)),
            -worker.since,
            worker.worker,
        ),
    )


def expected(given: ScalingInput) -> float:
    """Return the rate, never below 0."""
    return given.rate if given.rate > 0 else 0.0


def configurations(points: Points) -> tuple[Configuration, ...]:
    """Return the configurations of the workers to start."""
    return tuple(point.configuration for point in points)


def scale(algorithm: Algorithm, given: ScalingInput) -> Scaled:
    """Return the changes by one algorithm.

    If no configuration that it can use meets the SLO, the fastest of all is used as if there were no SLO, and the
    result is marked `slo_infeasible`. Tetris's algorithm does not end in this case.
    """
    if not given.workers and expected(given) == 0:
        return Scaled()
    points = tuple(point for point in given.points if usable(point))
    slo_s = math.inf if given.slo_s is None else given.slo_s
    kept = algorithm.among(tuple(point for point in points if algorithm.in_time(point, slo_s)))
    if kept or not points:
        return _settled(algorithm, _narrowed(given, kept), _capacities(algorithm, given, points, slo_s))
    fastest = min(points, key=lambda point: (point.latency_s, point.memory_bytes, *size(point)))
    plain = msgspec.structs.replace(algorithm, choose=_first)
    scaled = _settled(plain, _narrowed(given, (fastest,)), _capacities(algorithm, given, points, math.inf))
    return msgspec.structs.replace(scaled, slo_infeasible=True)


def _settled(algorithm: Algorithm, given: ScalingInput, capacities: dict[WorkerId, float]) -> Scaled:
    rate, capacity = expected(given), math.fsum(capacities.values())
    if rate > given.alpha * capacity * (1 + EPSILON):
        chosen = algorithm.choose(given, rate / given.alpha - capacity)
        left = rate - capacity - math.fsum(point.throughput for point in chosen)
        return Scaled(configurations(chosen), unserved=left if left > rate * EPSILON or rate == math.inf else 0.0)
    instead = algorithm.replace(given)
    if instead.stop or (rate >= given.beta * capacity and all(capacities.values())):
        return instead
    stop = _superfluous(algorithm.order(given), capacities, rate, given.beta) if len(capacities) > 1 else ()
    if stop or rate == 0 or rate >= given.beta * capacity:
        return Scaled(stop=stop)
    return instead


def _superfluous(
    order: Sequence[CurrentWorker], capacities: dict[WorkerId, float], rate: float, beta: float
) -> tuple[WorkerId, ...]:
    """Return the workers that can be released, in this order. AsyFunc's algorithm 1 stops after the first that it
    releases; its text does not.
    """
    stop = []
    left = dict(capacities)
    for worker in order:
        after = math.fsum(left.values()) - capacities[worker.worker]
        # If none serves anything, no request is expected, and one stays as well.
        useless = capacities[worker.worker] == 0 and len(left) > 1
        if useless or rate < beta * after:
            stop.append(worker.worker)
            del left[worker.worker]
    return tuple(stop)


def _capacities(algorithm: Algorithm, given: ScalingInput, points: Points, slo_s: float) -> dict[WorkerId, float]:
    """Return for each worker the highest rate that it can serve within the SLO, also with smaller batches."""

    def capacity(own: Point) -> float:
        smaller = (
            point
            for point in points
            if (point.cores, point.concurrency) == (own.cores, own.concurrency) and point.batch <= own.batch
        )
        return max((p.throughput for p in (own, *smaller) if usable(p) and algorithm.in_time(p, slo_s)), default=0.0)

    known = {worker.point: 0.0 for worker in given.workers}
    known = {point: capacity(point) for point in known}
    return {worker.worker: known[worker.point] for worker in given.workers}


def _narrowed(given: ScalingInput, points: Points) -> ScalingInput:
    return msgspec.structs.replace(given, points=points)


def _first(given: ScalingInput, rate: float) -> Points:
    return take(given.points, rate, limits_of(given)).chosen

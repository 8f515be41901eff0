"""Decides when a function gets or loses workers, for all scaling algorithms.

This is AsyFunc 4.1, the same for all algorithms, so that they differ only in their choice of configurations. R_max is
the sum over the workers of the most that each can serve within the SLO:

    R > alpha·R_max      workers for R/alpha - R_max are chosen and started, within the bounds
    R < beta·R_max       workers are released, one after the other, while R < beta·(R_max after) holds
    between the two      no change, but workers that serve nothing within the SLO are released, and an algorithm may
                         replace the existing workers; also below, where none can be released

A decision that starts a worker stops none: superfluous workers are released at the next decision, when the new ones are
ready. So a constant demand settles soon, and newly started workers are not stopped. With R = 0 one worker stays, and
keep-alive decides about it. beta < alpha is required.
"""

import math
from collections.abc import Callable, Sequence

import msgspec

from overwinter.core.ids import WorkerId
from overwinter.core.profile import Point, Shape
from overwinter.scheduler.policies.scaling.demand import Demand, Scaled, Standing
from overwinter.scheduler.policies.scaling.selection import EPSILON, ratio, room_of, size, take, usable

Points = tuple[Point, ...]


def nothing(demand: Demand) -> Scaled:
    """What serves the rate stays as it is."""
    return Scaled()


class Way(msgspec.Struct, frozen=True):
    """One algorithm. `choose` and `order` get a demand with only the configurations that the algorithm may choose."""

    in_time: Callable[[Point, float], bool]
    """Whether a configuration meets an SLO of so many seconds."""
    among: Callable[[Points], Points]
    """Which of the configurations that meet the SLO the algorithm can use."""
    choose: Callable[[Demand, float], Points]
    """Workers to start for so much more rate, within the room of the demand."""
    order: Callable[[Demand], Sequence[Standing]]
    """The workers, those to release first in front."""
    replace: Callable[[Demand], Scaled] = nothing
    """What takes the place of the workers that are there, though they serve the rate."""


def any_of(points: Points) -> Points:
    """Every configuration can be used."""
    return points


def one_at_a_time(points: Points) -> Points:
    """Only configurations with one run at once: batching, and no concurrency."""
    return tuple(point for point in points if point.concurrency == 1)


def least_loaded_first(demand: Demand) -> list[Standing]:
    """The order of release: the least loaded; of those the lowest rate per byte; then the newest."""
    return sorted(
        demand.workers,
        key=lambda worker: (
            worker.load,
            ratio(worker.point, demand.memory(worker.point)),
            -worker.since,
            worker.worker,
        ),
    )


def expected(demand: Demand) -> float:
    """The rate, never below 0."""
    return demand.rate if demand.rate > 0 else 0.0


def shapes(points: Points) -> tuple[Shape, ...]:
    """The shapes of workers to start."""
    return tuple(point.shape for point in points)


def scale(way: Way, demand: Demand) -> Scaled:
    """What should change, by one algorithm. When no configuration that it can use meets the SLO, the fastest of
    all is used as if there were no SLO, and the answer says so: Tetris's algorithm would never end there.
    """
    if not demand.workers and expected(demand) == 0:
        return Scaled()
    points = tuple(point for point in demand.points if usable(point))
    slo_s = math.inf if demand.slo_s is None else demand.slo_s
    kept = way.among(tuple(point for point in points if way.in_time(point, slo_s)))
    if kept or not points:
        return _settled(way, _narrowed(demand, kept), _capacities(way, demand, points, slo_s))
    fastest = min(points, key=lambda point: (point.latency_s, point.memory_bytes, *size(point)))
    plain = msgspec.structs.replace(way, choose=_first)
    scaled = _settled(plain, _narrowed(demand, (fastest,)), _capacities(way, demand, points, math.inf))
    return msgspec.structs.replace(scaled, best_effort=True)


def _settled(way: Way, demand: Demand, capacities: dict[WorkerId, float]) -> Scaled:
    rate, capacity = expected(demand), math.fsum(capacities.values())
    if rate > demand.alpha * capacity * (1 + EPSILON):
        chosen = way.choose(demand, rate / demand.alpha - capacity)
        left = rate - capacity - math.fsum(point.throughput for point in chosen)
        return Scaled(shapes(chosen), unserved=left if left > rate * EPSILON or rate == math.inf else 0.0)
    instead = way.replace(demand)
    if instead.stop or (rate >= demand.beta * capacity and all(capacities.values())):
        return instead
    stop = _superfluous(way.order(demand), capacities, rate, demand.beta) if len(capacities) > 1 else ()
    if stop or rate == 0 or rate >= demand.beta * capacity:
        return Scaled(stop=stop)
    return instead


def _superfluous(
    order: Sequence[Standing], capacities: dict[WorkerId, float], rate: float, beta: float
) -> tuple[WorkerId, ...]:
    """The workers that can go, in this order; the paper's printed loop would stop at the first, its text does not."""
    stop = []
    left = dict(capacities)
    for worker in order:
        after = math.fsum(left.values()) - capacities[worker.worker]
        useless = capacities[worker.worker] == 0 and after > 0
        if useless or rate < beta * after:
            stop.append(worker.worker)
            del left[worker.worker]
    return tuple(stop)


def _capacities(way: Way, demand: Demand, points: Points, slo_s: float) -> dict[WorkerId, float]:
    """By worker: the most that it can serve within the SLO, also by smaller batches than it is made for."""

    def capacity(own: Point) -> float:
        smaller = (
            point
            for point in points
            if (point.cores, point.concurrency) == (own.cores, own.concurrency) and point.batch <= own.batch
        )
        return max((p.throughput for p in (own, *smaller) if usable(p) and way.in_time(p, slo_s)), default=0.0)

    known = {worker.point: 0.0 for worker in demand.workers}
    known = {point: capacity(point) for point in known}
    return {worker.worker: known[worker.point] for worker in demand.workers}


def _narrowed(demand: Demand, points: Points) -> Demand:
    return msgspec.structs.replace(demand, points=points)


def _first(demand: Demand, rate: float) -> Points:
    return take(demand.points, rate, room_of(demand)).chosen

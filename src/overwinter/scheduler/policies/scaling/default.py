"""The default scaler of Overwinter: serves a family's rate with few added bytes.

It combines MLS (AsyFunc) and DTS (Tetris). MLS determines when to act (alpha, beta). DTS determines what to start, with
the bytes that a worker adds as its cost: its private memory, its own weights where they are not shared, and gamma for
each core. DTS is changed in three places:

* The last worker. DTS adds a whole worker of the best ratio for the remainder of the rate. Here the cheapest single
  worker that serves the rest is tried in place of this one and of 0 to REPLACED_MAX others of its configuration, then
  the same with the next best ratio. If DTS serves the whole rate, the result costs at most as much. If no limit is
  reached, it costs at most the optimum plus one of its workers, which is at most twice the optimum: let k be the best
  configuration, by ratio, that the optimum uses. Before the algorithm tries k as the last worker, all chosen workers
  have no worse ratio and serve less than the rate, so they cost less than the optimum; and k is one of its workers.
* Limits. If they leave a part of the rate unserved, workers are also chosen by the rate per core, and the choice that
  leaves less unserved is used.
* Existing workers. Workers that were added one by one as the rate rose cost more than a set for the whole rate. If such
  a set costs at most REPLACE_AT of the existing and added workers, its missing workers are started, and the others are
  stopped at the next decision. The set is chosen for a load in the middle between alpha and beta.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from overwinter.core.profile import Point
from overwinter.scheduler.policies.scaling.dts import memory_and_cores
from overwinter.scheduler.policies.scaling.hysteresis import (
    Algorithm,
    Points,
    all_points,
    configurations,
    expected,
    scale,
)
from overwinter.scheduler.policies.scaling.scaler import CurrentWorker, Scaled, ScalingInput
from overwinter.scheduler.policies.scaling.selection import (
    BOUNDLESS,
    EPSILON,
    Cost,
    Limits,
    Selection,
    by_ratio,
    limits_of,
    queues_in_time,
    ratio,
    take,
    usable,
    without_excess,
    workers_for,
)

REPLACE_AT = 0.85
"""The relative cost below which new workers replace existing ones; below 1, so that a varying rate does not cause
endless replacements.
"""
REPLACED_MAX = 8
"""The most workers of one configuration that the cheapest last worker may replace, besides the last of them."""


def select(points: Sequence[Point], rate: float, slo_s: float, cost: Cost, limits: Limits = BOUNDLESS) -> Selection:
    """Return workers that serve a rate, each within the SLO, at a low cost, and the part of the rate that does
    not fit.
    """
    return low_cost_workers(
        [point for point in points if usable(point) and queues_in_time(point, slo_s)], rate, cost, limits
    )


def overwinter(given: ScalingInput) -> Scaled:
    """Scale when MLS would act, by the changed DTS, with the bytes that a worker adds as the cost, and
    replace workers that cost much more than a new set.
    """
    return scale(_DEFAULT, given)


def low_cost_workers(points: Sequence[Point], rate: float, cost: Cost, limits: Limits) -> Selection:
    """As `select`, for configurations that meet the SLO."""
    if not rate > 0:
        return Selection()
    selection = _improved(points, rate, cost, cost, limits)
    if not selection.unserved:
        return selection
    by_cores = _improved(points, rate, lambda point: point.cores, cost, limits)
    return min(selection, by_cores, key=lambda each: (each.unserved, _total(each.chosen, cost)))


def _improved(points: Sequence[Point], rate: float, sort_cost: Cost, cost: Cost, limits: Limits) -> Selection:
    ordered = by_ratio(points, sort_cost)
    plain = take(ordered, rate, limits)
    choices = (
        (_total(chosen, cost), place, chosen)
        for place, chosen in enumerate(_with_last_worker(ordered, rate, cost, limits))
    )
    total, _, chosen = min(choices, default=(0.0, 0, ()))
    if not chosen or (not plain.unserved and _total(plain.chosen, cost) <= total):
        return plain
    return Selection(without_excess(chosen, rate))


def _with_last_worker(ordered: Sequence[Point], rate: float, cost: Cost, limits: Limits) -> Iterator[Points]:
    """Yield choices that serve the whole rate: workers in this order, and the cheapest single worker for the rest."""
    last_workers = sorted(ordered, key=cost)
    largest = max((point.throughput for point in ordered), default=0.0)
    taken: Points = ()
    left = rate
    for point in ordered:
        count = min(workers_for(left, point) - 1, limits.workers_that_fit(point))
        for copies in range(count, max(-1, count - REPLACED_MAX - 1), -1):
            rest, rest_limits = (left - copies * point.throughput) * (1 - EPSILON), limits.less(point, copies)
            if rest > largest:
                break
            last = next(
                (each for each in last_workers if each.throughput >= rest and rest_limits.workers_that_fit(each)), None
            )
            if last is not None:
                yield *taken, *[point] * copies, last
        taken = (*taken, *[point] * count)
        left -= count * point.throughput
        limits = limits.less(point, count)


def _choose(given: ScalingInput, rate: float) -> Points:
    cost = memory_and_cores(given)
    added = low_cost_workers(given.points, rate, cost, limits_of(given)).chosen
    most = REPLACE_AT * _total((*(worker.point for worker in given.workers), *added), cost)
    if not given.workers or min(map(cost, given.points), default=0.0) > most:
        return added
    fresh = _fresh(given)
    started = _lacking(fresh.chosen, given)
    if fresh.unserved or _total(fresh.chosen, cost) > most or not _fits(started, limits_of(given)):
        return added
    return started


def _replace(given: ScalingInput) -> Scaled:
    """Replace workers that cost much more than a new set: start the missing ones first, then stop the others."""
    fresh, cost = _fresh(given), memory_and_cores(given)
    most = REPLACE_AT * _total((worker.point for worker in given.workers), cost)
    started = _lacking(fresh.chosen, given)
    if not fresh.chosen or fresh.unserved or _total(fresh.chosen, cost) > most:
        return Scaled()
    if started:
        return Scaled(configurations(started) if _fits(started, limits_of(given)) else ())
    return Scaled(stop=tuple(worker.worker for worker in _order(given)[: len(given.workers) - len(fresh.chosen)]))


def _order(given: ScalingInput) -> list[CurrentWorker]:
    """Return the order of release: workers that a new set would not have, the least rate per cost first; then the least
    loaded.
    """
    cost = memory_and_cores(given)
    wanted = Counter(_fresh(given).chosen)
    ranks = {}
    for worker in sorted(given.workers, key=lambda worker: (-worker.load, worker.worker)):
        stays = wanted[worker.point] > 0
        wanted[worker.point] -= 1
        value = 0.0 if stays else ratio(worker.point, cost(worker.point))
        ranks[worker.worker] = (stays, value, worker.load, -worker.since, worker.worker)
    return sorted(given.workers, key=lambda worker: ranks[worker.worker])


def _fresh(given: ScalingInput) -> Selection:
    """Return workers for the whole rate at a load between alpha and beta, within the limits that would hold if there
    were no existing workers.
    """
    limits = limits_of(given)
    for worker in given.workers:
        limits = limits.less(worker.point, -1)
    load = (given.alpha + given.beta) / 2
    return low_cost_workers(given.points, expected(given) / load, memory_and_cores(given), limits)


def _lacking(points: Points, given: ScalingInput) -> Points:
    """Those of the workers that do not exist yet."""
    return tuple((Counter(points) - Counter(worker.point for worker in given.workers)).elements())


def _fits(points: Points, limits: Limits) -> bool:
    for point in points:
        if not limits.workers_that_fit(point):
            return False
        limits = limits.less(point, 1)
    return True


def _total(points: Iterable[Point], cost: Cost) -> float:
    return sum(cost(point) for point in points)


_DEFAULT = Algorithm(queues_in_time, all_points, _choose, _order, _replace)

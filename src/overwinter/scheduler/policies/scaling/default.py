"""How does a function get its rate served for the fewest bytes that are not there yet? The default of this project.

It joins the two papers over missing bytes. When to act is MLS's: alpha, beta. What to start is DTS's, for the bytes
that a worker adds (its private memory, its own weights where none are shared, and gamma for each core), mended in three
places:

* the last worker. DTS pays a whole worker of the best ratio for the last request a second. Here each number of such
  workers is tried with the cheapest single worker that serves the rest, then the next best ratio likewise. Never dearer
  than DTS and, where there is room, than the best there is and one worker of it, which is never twice the best: let k
  be the best ratio that the best choice uses. Before this algorithm closes with a k, all that it has taken is of no
  worse ratio and serves less than the rate, so it costs less than the best choice; and one k is a worker of that.
* cores. Where they run out before the rate is served, rate for a core decides.
* what is there. Workers that came one by one as the rate rose cost more than a set for the whole rate. When such a set,
  costs at most REPLACE_AT of the workers that are there and those to be added, what it lacks is started, and the others
  go when that has come. It is made for a load in the middle between alpha and beta.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from overwinter.core.profile import Point
from overwinter.scheduler.policies.scaling.demand import Demand, Scaled, Standing
from overwinter.scheduler.policies.scaling.dts import weighed
from overwinter.scheduler.policies.scaling.hysteresis import Points, Way, any_of, expected, scale, shapes
from overwinter.scheduler.policies.scaling.selection import (
    BOUNDLESS,
    EPSILON,
    Cost,
    Room,
    Selection,
    by_ratio,
    queues_in_time,
    ratio,
    room_of,
    take,
    usable,
    without_excess,
    workers_for,
)

REPLACE_AT = 0.85
"""Below 1, so that a rate that wanders does not exchange workers for ever."""
FEWER = 8
"""How many of the best workers it gives up, at most, for one that serves more."""


def select(points: Sequence[Point], rate: float, slo_s: float, cost: Cost, room: Room = BOUNDLESS) -> Selection:
    """Workers that serve a rate, each within the SLO, at a low cost; returns the part that does not fit, too."""
    return cheapest([point for point in points if usable(point) and queues_in_time(point, slo_s)], rate, cost, room)


def frugal(demand: Demand) -> Scaled:
    """DTS's choice mended, at MLS's moments, over missing bytes."""
    return scale(_FRUGAL, demand)


def cheapest(points: Sequence[Point], rate: float, cost: Cost, room: Room) -> Selection:
    """As `select`, for configurations that meet the SLO."""
    if not rate > 0:
        return Selection()
    selection = _mended(points, rate, cost, cost, room)
    if not selection.unserved:
        return selection
    by_cores = _mended(points, rate, lambda point: point.cores, cost, room)
    return min(selection, by_cores, key=lambda each: (each.unserved, _total(each.chosen, cost)))


def _mended(points: Sequence[Point], rate: float, weight: Cost, cost: Cost, room: Room) -> Selection:
    ordered = by_ratio(points, weight)
    plain = take(ordered, rate, room)
    closed = ((_total(chosen, cost), place, chosen) for place, chosen in enumerate(_closed(ordered, rate, cost, room)))
    total, _, chosen = min(closed, default=(0.0, 0, ()))
    if not chosen or (not plain.unserved and _total(plain.chosen, cost) <= total):
        return plain
    return Selection(without_excess(chosen, rate))


def _closed(ordered: Sequence[Point], rate: float, cost: Cost, room: Room) -> Iterator[Points]:
    """Choices that serve the whole rate: workers in this order, and the cheapest single one for the rest."""
    closing = sorted(ordered, key=cost)
    largest = max((point.throughput for point in ordered), default=0.0)
    taken: Points = ()
    left = rate
    for point in ordered:
        count = min(workers_for(left, point) - 1, room.copies(point))
        for copies in range(count, max(-1, count - FEWER - 1), -1):
            rest, rest_room = (left - copies * point.throughput) * (1 - EPSILON), room.less(point, copies)
            if rest > largest:
                break
            last = next((each for each in closing if each.throughput >= rest and rest_room.copies(each)), None)
            if last is not None:
                yield *taken, *[point] * copies, last
        taken = (*taken, *[point] * count)
        left -= count * point.throughput
        room = room.less(point, count)


def _choose(demand: Demand, rate: float) -> Points:
    cost = weighed(demand)
    added = cheapest(demand.points, rate, cost, room_of(demand)).chosen
    most = REPLACE_AT * _total((*(worker.point for worker in demand.workers), *added), cost)
    if not demand.workers or min(map(cost, demand.points), default=0.0) > most:
        return added
    fresh = _fresh(demand)
    started = _lacking(fresh.chosen, demand)
    if fresh.unserved or _total(fresh.chosen, cost) > most or not _fits(started, room_of(demand)):
        return added
    return started


def _replace(demand: Demand) -> Scaled:
    """A fresh set in place of workers that cost much more: the missing ones are started first, then the others are
    stopped.
    """
    fresh, cost = _fresh(demand), weighed(demand)
    most = REPLACE_AT * _total((worker.point for worker in demand.workers), cost)
    started = _lacking(fresh.chosen, demand)
    missing = demand.missing_bytes if started and demand.shared else 0
    if not fresh.chosen or fresh.unserved or missing + _total(fresh.chosen, cost) > most:
        return Scaled()
    if started:
        return Scaled(shapes(started) if _fits(started, room_of(demand)) else ())
    return Scaled(stop=tuple(worker.worker for worker in _order(demand)[: len(demand.workers) - len(fresh.chosen)]))


def _order(demand: Demand) -> list[Standing]:
    """Workers that a fresh set would not have go first, least rate for their cost in front; then the least loaded."""
    cost = weighed(demand)
    wanted = Counter(_fresh(demand).chosen)
    ranks = {}
    for worker in sorted(demand.workers, key=lambda worker: (-worker.load, worker.worker)):
        stays = wanted[worker.point] > 0
        wanted[worker.point] -= 1
        worth = 0.0 if stays else ratio(worker.point, cost(worker.point))
        ranks[worker.worker] = (stays, worth, worker.load, -worker.since, worker.worker)
    return sorted(demand.workers, key=lambda worker: ranks[worker.worker])


def _fresh(demand: Demand) -> Selection:
    """Workers for the whole rate at a load between alpha and beta, within the bounds with the existing workers and
    without.
    """
    room = room_of(demand)
    for worker in demand.workers:
        room = room.less(worker.point, -1)
    load = (demand.alpha + demand.beta) / 2
    return cheapest(demand.points, expected(demand) / load, weighed(demand), room)


def _lacking(points: Points, demand: Demand) -> Points:
    """Those of the workers that do not exist yet."""
    return tuple((Counter(points) - Counter(worker.point for worker in demand.workers)).elements())


def _fits(points: Points, room: Room) -> bool:
    for point in points:
        if not room.copies(point):
            return False
        room = room.less(point, 1)
    return True


def _total(points: Iterable[Point], cost: Cost) -> float:
    return sum(cost(point) for point in points)


_FRUGAL = Way(queues_in_time, any_of, _choose, _order, _replace)

"""What would Photons (SoCC'20) start? The most runs at once in one worker, and no batches.

As Tetris compares itself with it (5.1, 5.3): the greatest concurrency that meets the SLO, with a fixed mapping
between runs and cores. Each further run brings as many cores as one alone needs to meet the SLO; where nothing
was measured with one, as many as those have that were measured with the fewest runs. Never less than one.
"""

from overwinter.scheduler.policies.scaling.demand import Demand, Scaled
from overwinter.scheduler.policies.scaling.hysteresis import Points, Way, least_loaded_first, scale
from overwinter.scheduler.policies.scaling.selection import room_of, runs_in_time, take


def photons(demand: Demand) -> Scaled:
    """Concurrency only, as much as the SLO and the room bear."""
    return scale(_PHOTONS, demand)


def _the_same_cores_each(points: Points) -> Points:
    """One configuration for each concurrency."""
    own = [point for point in points if point.batch == 1 and point.cores >= point.concurrency]
    if not own:
        return ()
    first = min(own, key=lambda point: (point.concurrency, point.cores))
    return tuple(point for point in own if point.cores * first.concurrency == first.cores * point.concurrency)


def _choose(demand: Demand, rate: float) -> Points:
    return take(sorted(demand.points, key=lambda point: -point.concurrency), rate, room_of(demand)).chosen


_PHOTONS = Way(runs_in_time, _the_same_cores_each, _choose, least_loaded_first)

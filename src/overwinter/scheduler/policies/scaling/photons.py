"""Photons (SoCC'20): as many concurrent runs as possible in one worker, and no batches.

As in Tetris's comparison (5.1, 5.3), a worker has the greatest concurrency that meets the SLO, and each run has the
same number of cores, at least one: as many as a single run needs to meet the SLO or, without a measurement of a single
run, as many as in the measurement with the fewest concurrent runs.
"""

from overwinter.scheduler.policies.scaling.hysteresis import Algorithm, Points, least_loaded_first, scale
from overwinter.scheduler.policies.scaling.scaler import Scaled, ScalingInput
from overwinter.scheduler.policies.scaling.selection import limits_of, runs_in_time, take


def photons(given: ScalingInput) -> Scaled:
    """Scale by concurrency only, as much as the SLO and the limits allow."""
    return scale(_PHOTONS, given)


def _equal_cores_per_run(points: Points) -> Points:
    """Return configurations without batches with equally many cores for each run, at most one for each concurrency."""
    own = [point for point in points if point.batch == 1 and point.cores >= point.concurrency]
    if not own:
        return ()
    first = min(own, key=lambda point: (point.concurrency, point.cores))
    return tuple(point for point in own if point.cores * first.concurrency == first.cores * point.concurrency)


def _choose(given: ScalingInput, rate: float) -> Points:
    return take(sorted(given.points, key=lambda point: -point.concurrency), rate, limits_of(given)).chosen


_PHOTONS = Algorithm(runs_in_time, _equal_cores_per_run, _choose, least_loaded_first)

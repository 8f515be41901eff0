"""Tetris's integer program (3.2, equations 1-5): serves a rate with the least memory, exactly.

Solved by HiGHS through scipy, an optional dependency that is imported at the first use. It shows how far the greedy
algorithms are from the optimum; as a scaler it is slow, milliseconds per decision.
"""

import math
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from overwinter.core.errors import MachineError
from overwinter.core.profile import Point
from overwinter.scheduler.policies.scaling.hysteresis import Algorithm, Points, all_points, least_loaded_first, scale
from overwinter.scheduler.policies.scaling.scaler import Scaled, ScalingInput
from overwinter.scheduler.policies.scaling.selection import (
    BOUNDLESS,
    Cost,
    Limits,
    Selection,
    is_negligible,
    limits_of,
    queues_in_time,
    usable,
)

TIGHTER = 1e-6
"""The relative increase of the rate in a second attempt, if the solver's answer, exact to 1e-7, fell short of it."""


def select(points: Sequence[Point], rate: float, slo_s: float, cost: Cost, limits: Limits = BOUNDLESS) -> Selection:
    """Return workers that serve a rate, each within the SLO, at the least cost; if the limits do not allow that, those
    that serve the most. Raises MachineError without scipy.
    """
    kept = [point for point in points if usable(point) and queues_in_time(point, slo_s)]
    return solve(kept, rate, cost, limits)


def exact(given: ScalingInput) -> Scaled:
    """Scale by the integer program over the remaining rate."""
    return scale(_EXACT, given)


def require_scipy() -> None:
    """Raise MachineError without scipy, at the start rather than under load."""
    _optimize()


def solve(points: Sequence[Point], rate: float, cost: Cost, limits: Limits) -> Selection:
    """As `select`, for configurations that meet the SLO."""
    points = [point for point in points if limits.workers_that_fit(point) > 0]
    if not points or not rate > 0:
        return Selection((), max(rate, 0.0))
    chosen = _cheapest(points, rate, rate, cost, limits)
    if chosen is not None and not is_negligible(rate - _served(chosen), rate):
        chosen = _cheapest(points, rate, rate * (1 + TIGHTER), cost, limits)
    if chosen is None:
        chosen = _solved([-point.throughput for point in points], points, limits, []) or ()
    left = rate - _served(chosen)
    return Selection(chosen, 0.0 if is_negligible(left, rate) else left)


def _cheapest(points: Sequence[Point], rate: float, goal: float, cost: Cost, limits: Limits) -> Points | None:
    """Return the cheapest workers that serve the goal (equations 1 and 4); None if there are none."""
    if goal == math.inf:
        return None
    # Cap each throughput at the whole rate: the solution is the same, and the solver's numbers have similar magnitudes.
    rates = [min(point.throughput / goal, 1.0) for point in points]
    return _solved([cost(point) for point in points], points, limits, [(rates, 1.0, math.inf)])


def _solved(
    objective: Sequence[float],
    points: Sequence[Point],
    limits: Limits,
    rows: Sequence[tuple[list[float], float, float]],
) -> Points | None:
    """Return the workers with the least objective within these rows and the limits; None if infeasible."""
    optimize = _optimize()
    largest = max(map(abs, objective)) or 1.0
    rows = [*rows, *_rows(points, limits)]
    solved = optimize.milp(
        [value / largest for value in objective],
        integrality=[1] * len(points),
        bounds=optimize.Bounds(0, [limits.workers_that_fit(point) for point in points]),
        constraints=[optimize.LinearConstraint([row], low, high) for row, low, high in rows],
        options={"mip_rel_gap": 0.0},
    )
    if solved.x is None:
        return None
    return tuple(point for point, count in zip(points, solved.x, strict=True) for _ in range(round(count)))


def _rows(points: Sequence[Point], limits: Limits) -> list[tuple[list[float], float, float]]:
    """The limits as rows of the integer program, each scaled to its capacity."""
    rows = [([1 / limits.workers] * len(points), 0.0, 1.0)]
    if limits.cores < math.inf:
        rows.append(([point.cores / limits.cores for point in points], 0.0, 1.0))
    if limits.nbytes < math.inf:
        rows.append(([(point.memory_bytes + limits.copy_bytes) / limits.nbytes for point in points], 0.0, 1.0))
    if limits.runs < math.inf:
        rows.append(([point.concurrency / limits.runs for point in points], 0.0, 1.0))
    return rows


def _served(points: Points) -> float:
    return math.fsum(point.throughput for point in points)


def _optimize() -> ModuleType:
    try:
        return import_module("scipy.optimize")
    except ModuleNotFoundError as error:
        raise MachineError("the exact scaler needs scipy: pip install scipy, or use dts") from error


def _choose(given: ScalingInput, rate: float) -> Points:
    return solve(given.points, rate, given.memory, limits_of(given)).chosen


_EXACT = Algorithm(queues_in_time, all_points, _choose, least_loaded_first)

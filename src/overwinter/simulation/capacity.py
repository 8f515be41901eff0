"""Finds how many copies of a scenario's functions its node can serve at a given SLO attainment."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from overwinter.core.errors import CallerError
from overwinter.simulation.scenario import Scenario
from overwinter.simulation.world import World
from overwinter.telemetry.report import Report

COPIES_MAX = 1 << 14


class Attempt(msgspec.Struct, frozen=True):
    """A number of copies, and its result."""

    copies: int
    functions: int
    attainment: float
    fits: bool


class Capacity(msgspec.Struct, frozen=True):
    """The capacity, and how it was found."""

    target: float
    copies: int
    """The most copies that fit; 0 if not even one fits."""
    functions: int
    report: Report | None
    """The report with the most copies that fit; None if not even one fits."""
    attempts: tuple[Attempt, ...]


def capacity(
    scenario: Scenario, target: float, base: Path = Path(), observe: Callable[[Attempt], None] | None = None
) -> Capacity:
    """Double the copies until they do not fit, then bisect, assuming that attainment falls with copies. Copies fit if
    the target is reached and no request is lost.

    Raises CallerError if the scenario has applications, if a trace is invalid, if no function has an SLO, if none with
    an SLO gets a request after `settle_s`, or if even the largest number of copies that the search tries fits. Raises
    OSError if a trace cannot be read.
    """
    if all(function.settings.slo_ms is None for function in scenario.functions):
        raise CallerError("no function of the scenario has settings.slo_ms, so there is no attainment to reach")
    attempts: list[Attempt] = []
    best: Report | None = None

    def fits(copies: int) -> bool:
        nonlocal best
        report = World(scenario.multiplied(copies), base).run()
        attained = report.total.attainment
        if attained is None:
            raise CallerError(
                "no request to a function with an SLO comes between settle_s and duration_s, so there is no attainment "
                "to reach"
            )
        good = attained >= target and report.total.lost == 0
        attempts.append(Attempt(copies, len(report.functions), attained, good))
        if observe is not None:
            observe(attempts[-1])
        best = report if good else best
        return good

    few, many = 0, 1
    while fits(many):
        few, many = many, 2 * many
        if many > COPIES_MAX:
            raise CallerError(f"{few} copies still fit: make the scenario larger")
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if fits(middle) else (few, middle)
    return Capacity(target, few, 0 if best is None else len(best.functions), best, tuple(attempts))

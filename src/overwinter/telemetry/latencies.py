"""Stores millions of latencies as counts in steps of one percent, so that a simulated day needs little memory."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from math import ceil, log

LEAST_S = 1e-6
STEP = log(1.01)


class Latencies:
    """A histogram of seconds whose quantiles are accurate to half a percent."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, seconds: float) -> None:
        """Count a value."""
        self._counts[ceil(log(seconds / LEAST_S) / STEP) if seconds > LEAST_S else 0] += 1

    def merge(self, others: Iterable["Latencies"]) -> "Latencies":
        """Add the counts of others, and return itself."""
        for other in others:
            self._counts.update(other._counts)
        return self

    def quantile(self, share: float) -> float | None:
        """Return the seconds that this share of the values does not exceed; None if there are none."""
        steps = sorted(self._counts)
        if not steps:
            return None
        totals = list(accumulate(self._counts[step] for step in steps))
        return _middle(steps[min(bisect_left(totals, share * totals[-1]), len(steps) - 1)])

    def shares(self) -> list[tuple[float, float]]:
        """Return pairs of seconds and the share of values up to them, ascending."""
        steps = sorted(self._counts)
        totals = list(accumulate(self._counts[step] for step in steps))
        return [(_middle(step), total / totals[-1]) for step, total in zip(steps, totals, strict=True)]


def _middle(step: int) -> float:
    """The value in the middle of a step."""
    return float(LEAST_S * 1.01 ** (step - 0.5))

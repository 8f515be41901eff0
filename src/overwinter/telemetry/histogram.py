"""Counts values by bounds, for Prometheus."""

from bisect import bisect_left
from collections.abc import Sequence

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
BATCHES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


class Histogram:
    """The number of values between consecutive bounds, and the sum of all values."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

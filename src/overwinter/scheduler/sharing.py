"""Decides whether functions of a family should share runs, by measured times.

It compares the time of a shared run with that of the separate runs that it replaces. Other load on the cores changes
both, so both measurements must be recent: now and then a run is of the slower kind. The first such run comes soon, and
the interval doubles each time as long as that kind stays slower.
"""

from collections.abc import Sequence
from statistics import median_low

import msgspec

from overwinter.core.profile import Point

RECENT = 5
"""Of so many of the last times the median counts: a first run in a worker takes longer than those that follow."""
LOOK_FIRST = 4
LOOK_LAST = 256
"""Runs of the kind that pays between two of the other kind."""


class Sharing(msgspec.Struct, eq=False):
    """Observed times of shared and separate runs of functions."""

    pays: bool = True
    """Also as long as nothing is known."""
    _costs: list[float] = msgspec.field(default_factory=list)
    """Of the last runs of several functions, the time over that of runs of each by itself."""
    _alone: dict[tuple[int, int], dict[int, list[float]]] = msgspec.field(default_factory=dict)
    """Of the last runs of one function, seconds a request: by cores and runs at once, and by the power of two of its
    requests.
    """
    _runs: int = 0
    """Of the kind that pays since the last of the other kind."""
    _look_after: int = LOOK_FIRST

    @property
    def joins(self) -> bool:
        """Whether the next run may be of several functions."""
        return self.pays != (self._runs >= self._look_after)

    @property
    def cost(self) -> float | None:
        """Time of a run of several functions over that of runs of each by itself; None: not known."""
        return median_low(self._costs) if self._costs else None

    def observe(self, point: Point, counts: Sequence[int], seconds: float) -> None:
        """A run in a worker of this configuration, with so many requests of each of one or more functions, took this
        time.
        """
        several = len(counts) > 1
        self.count(several)
        if several:
            self._compare(self._apart_s(point, counts), seconds)
        else:
            alone = self._alone.setdefault((point.cores, point.concurrency), {})
            _add(alone.setdefault(counts[0].bit_length(), []), seconds / counts[0])

    def count(self, several: bool) -> None:
        """A run ended, of several functions or of one, of which nothing else may be known."""
        if several == self.pays:
            self._runs += 1
        else:
            # One that had nobody to share it says nothing of how often to look.
            times = 2 if self._runs >= self._look_after else 1
            self._runs, self._look_after = 0, min(times * self._look_after, LOOK_LAST)

    def _compare(self, apart: float, seconds: float) -> None:
        if apart <= 0:
            # It tells nothing.
            return
        _add(self._costs, seconds / apart)
        pays = median_low(self._costs) < 1
        if pays != self.pays:
            self._runs = 0
        if pays != self.pays or pays != (seconds < apart):
            # It is another now, or may soon be.
            self._look_after = LOOK_FIRST
        self.pays = pays

    def _apart_s(self, point: Point, counts: Sequence[int]) -> float:
        """Seconds of separate runs of so many requests of each function, from runs of similar size; 0: unknown."""
        alone = self._alone.get((point.cores, point.concurrency), {})
        known = {power: median_low(times) for power, times in alone.items()}
        nearest = (min(known, key=lambda power: abs(power - count.bit_length())) for count in counts if known)
        return sum(count * known[power] for count, power in zip(counts, nearest, strict=False))


def _add(times: list[float], seconds: float) -> None:
    times.append(seconds)
    del times[:-RECENT]

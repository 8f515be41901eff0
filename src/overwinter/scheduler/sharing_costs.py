"""Decides whether functions of a family should share runs, by measured times.

It compares the time of a shared run with that of the separate runs that it replaces. Other load on the cores changes
both, so both measurements must be recent: now and then a run is of the slower kind. The first such run comes soon, and
the interval doubles each time as long as that kind stays slower.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median_low

import msgspec

from overwinter.core.profile import Point

RECENT = 5
"""The number of recent times whose median counts; the first run in a worker is slower than later ones."""
TRY_OTHER_FIRST, TRY_OTHER_LAST = 4, 256
"""The runs of the better kind before one of the other kind is tried: at first, and at most."""


Recent = deque[float]


def _recent() -> Recent:
    return deque(maxlen=RECENT)


class Sharing(msgspec.Struct, eq=False):
    """Observed times of shared and separate runs of functions."""

    is_faster: bool = True
    """Whether shared runs are faster, assumed while unknown."""
    _ratios: Recent = msgspec.field(default_factory=_recent)
    """For recent shared runs, their time divided by that of separate runs."""
    _alone: dict[tuple[int, int], dict[int, Recent]] = msgspec.field(default_factory=dict)
    """For recent separate runs, seconds per request: by cores and concurrency, and by the bit length of the number of
    requests.
    """
    _runs: int = 0
    """The runs of the better kind since the last of the other kind."""
    _try_other_after: int = TRY_OTHER_FIRST

    @property
    def joins(self) -> bool:
        """Whether the next run may be shared."""
        return self.is_faster != (self._runs >= self._try_other_after)

    @property
    def time_ratio(self) -> float | None:
        """The time of a shared run divided by that of separate runs; None: unknown."""
        return median_low(self._ratios) if self._ratios else None

    def observe(self, point: Point, counts: Sequence[int], seconds: float) -> None:
        """Record the time of a run with these numbers of requests of each function. `point`: the configuration of the
        worker; for a run on a device, the function's default one.
        """
        several = len(counts) > 1
        self.count(several)
        if several:
            self._compare(self._apart_s(point, counts), seconds)
        else:
            alone = self._alone.setdefault((point.cores, point.concurrency), {})
            power = counts[0].bit_length()
            times = alone.get(power)
            if times is None:
                times = alone[power] = _recent()
            times.append(seconds / counts[0])

    def count(self, several: bool) -> None:
        """Count a run that ended, shared or not."""
        if several == self.is_faster:
            self._runs += 1
        else:
            # A separate run that had no function to share with does not change how often to try the other kind.
            times = 2 if self._runs >= self._try_other_after else 1
            self._runs, self._try_other_after = 0, min(times * self._try_other_after, TRY_OTHER_LAST)

    def _compare(self, apart: float, seconds: float) -> None:
        if apart <= 0:
            # Such a run gives no information.
            return
        self._ratios.append(seconds / apart)
        is_faster = median_low(self._ratios) < 1
        if is_faster != self.is_faster:
            self._runs = 0
        if is_faster != self.is_faster or is_faster != (seconds < apart):
            # The better kind has changed, or may change soon.
            self._try_other_after = TRY_OTHER_FIRST
        self.is_faster = is_faster

    def _apart_s(self, point: Point, counts: Sequence[int]) -> float:
        """Return the seconds of separate runs of these numbers of requests, by runs of similar size; 0: unknown."""
        alone = self._alone.get((point.cores, point.concurrency), {})
        if not alone:
            return 0.0
        # Many functions have equal numbers of requests.
        each_s = {
            count: median_low(alone[min(alone, key=lambda power: abs(power - count.bit_length()))])
            for count in set(counts)
        }
        return sum(count * each_s[count] for count in counts)

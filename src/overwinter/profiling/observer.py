"""Compares the times of runs and wakes in service with the profile, and reports lasting differences."""

from collections.abc import Callable

import msgspec

from overwinter.core.ids import FunctionId, Seconds
from overwinter.core.profile import Configuration, Point, Profile
from overwinter.telemetry.statistics import ServiceObserver

RUNS_MIN = 20
"""The fewest runs of one configuration before a deviation is reported."""
WAKES_MIN = 5
DEVIATION = 0.2
"""The relative difference from the profile that is reported."""
EVERY_S = 60.0
"""The shortest time between two reports about a function."""
SMOOTHING = 0.1
"""The least weight of a new observation in the mean."""


class Correction(msgspec.Struct, frozen=True):
    """The values that differ from the profile."""

    points: tuple[Point, ...]
    wake_s: float | None


class _Seen(msgspec.Struct):
    known_s: float | None
    """The profile's value; None: not measured."""
    count: int = 0
    mean_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.mean_s += max(SMOOTHING, 1 / self.count) * (seconds - self.mean_s)


class Observer(ServiceObserver):
    """Observes runs, wakes and arrivals. It keeps a count and a mean for a function's wakes and each configuration."""

    def __init__(
        self, profile_of: Callable[[FunctionId], Profile | None], report: Callable[[FunctionId, Correction], None]
    ) -> None:
        """Create it. `profile_of` returns the profile of a function; `report` is called with its corrections."""
        self.arrivals = 0
        self.arrived_at: Seconds | None = None
        self._profile_of = profile_of
        self._report = report
        self._seen: dict[FunctionId, dict[Configuration | None, _Seen]] = {}
        """The observations by configuration; None: those of wakes."""
        self._reported_at: dict[FunctionId, Seconds] = {}

    def arrived(self, now: Seconds) -> None:
        """Record the arrival of a request."""
        self.arrivals += 1
        self.arrived_at = now

    def ran(self, function: FunctionId, configuration: Configuration, seconds: float, now: Seconds) -> None:
        """Record the time of a run in this configuration."""
        self._record(function, configuration, seconds, now)

    def woke(self, function: FunctionId, seconds: float, now: Seconds) -> None:
        """Record the time from the start of a worker until it was ready."""
        self._record(function, None, seconds, now)

    def profiled(self, function: FunctionId) -> None:
        """Forget the observations that contradict a value of the profile that has changed since they began: it was
        measured again, or corrected by what another function with the same program observed later.
        """
        profile, every = self._profile_of(function), self._seen.get(function, {})
        for what, seen in list(every.items()):
            known_s = _known_s(profile, what)
            if known_s != seen.known_s and (known_s is None or _differs(seen.mean_s, known_s)):
                del every[what]
            seen.known_s = known_s

    def removed(self, function: FunctionId) -> None:
        """Forget a removed version."""
        self._seen.pop(function, None)
        self._reported_at.pop(function, None)

    def _record(self, id_: FunctionId, what: Configuration | None, seconds: float, now: Seconds) -> None:
        profile = self._profile_of(id_)
        if profile is None:
            # The function was removed or not measured: there is nothing to correct.
            return
        every = self._seen.setdefault(id_, {})
        seen = every.get(what)
        if seen is None:
            seen = every[what] = _Seen(_known_s(profile, what))
        seen.add(seconds)
        least = WAKES_MIN if what is None else RUNS_MIN
        if seen.count % least == 0:
            self._compare(id_, now)

    def _compare(self, id_: FunctionId, now: Seconds) -> None:
        profile = self._profile_of(id_)
        reported_at = self._reported_at.get(id_)
        if profile is None or (reported_at is not None and now - reported_at < EVERY_S):
            return
        # The profile changes before `profiled` is called.
        self.profiled(id_)
        points = []
        wake_s = None
        for what, seen in self._seen[id_].items():
            if what is None:
                if seen.count >= WAKES_MIN and profile.wake_s is not None and _differs(seen.mean_s, profile.wake_s):
                    wake_s = seen.mean_s
                continue
            point = profile.point(what)
            if point is not None and seen.count >= RUNS_MIN and _differs(seen.mean_s, point.latency_s):
                points.append(msgspec.structs.replace(point, latency_s=seen.mean_s))
        if points or wake_s is not None:
            self._reported_at[id_] = now
            self._report(id_, Correction(tuple(points), wake_s))


def _known_s(profile: Profile | None, what: Configuration | None) -> float | None:
    """Return the profile's latency of a configuration, or of wakes if that is None."""
    if profile is None or what is None:
        return None if profile is None else profile.wake_s
    point = profile.point(what)
    return None if point is None else point.latency_s


def _differs(seen_s: float, known_s: float) -> bool:
    return abs(seen_s - known_s) > DEVIATION * known_s

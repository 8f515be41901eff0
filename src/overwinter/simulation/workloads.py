"""The arrival processes of functions and applications.

A workload is data; `arrivals` makes a lazy, infinite and ascending stream of seconds from it. Rates are in arrivals per
second. All randomness comes from the generator that is passed in.
"""

from collections.abc import Iterable, Iterator
from itertools import cycle, repeat
from math import inf, log, sqrt
from pathlib import Path
from random import Random
from typing import assert_never

import msgspec

from overwinter.core.errors import CallerError
from overwinter.simulation import traces
from overwinter.simulation.twitter import MEAN_PER_S, twitter_rates

MINUTE_S = 60.0


class _Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """Base of the tagged union."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            values = value if isinstance(value, tuple) else (value,)
            if any(isinstance(number, float) and not 0 < number < inf for number in values):
                raise ValueError(f"{name} must be above 0 and finite, got {value}")


class Poisson(_Workload, frozen=True, tag="poisson"):
    """Independent arrivals at a constant rate."""

    rate: float


class MarkovianArrivals(_Workload, frozen=True, tag="map"):
    """A Markovian arrival process with two states: Poisson arrivals at one rate or the other, for exponential
    durations.
    """

    rates: tuple[float, float]
    stays_s: tuple[float, float]


class Stable(_Workload, frozen=True, tag="stable"):
    """Evenly spaced arrivals, each moved by up to `jitter` of the distance between two."""

    rate: float
    jitter: float = 0.2
    rise_s: float | None = None
    """The seconds in which the rate rises linearly from 0; None: it is constant."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.jitter > 1:
            raise ValueError(f"jitter must be at most 1, got {self.jitter}")


class Periodic(_Workload, frozen=True, tag="periodic"):
    """Poisson arrivals whose rate rises and falls as a triangle between `low` and `high`."""

    low: float
    high: float
    period_s: float


class Bursty(_Workload, frozen=True, tag="bursty"):
    """Poisson arrivals at `rate`, and at `rate` times `factor` in bursts that begin at random times."""

    rate: float
    factor: float
    every_s: float
    """The mean time from the end of a burst to the start of the next."""
    length_s: float
    """The mean length of a burst."""


class MinuteCounts(_Workload, frozen=True, tag="minute-counts"):
    """Recorded counts per minute of many functions (`.npy`), repeated, one row for each copy in turn.

    Each minute is a Poisson stream at `scale` times its count. The copies after the last row continue with row 0, each
    from a random minute on.
    """

    path: str
    scale: float = 1.0
    row: int = 0
    """The row of the first copy."""
    minutes: int | None = None
    """The minutes of the trace to use; None: all."""


class Timestamps(_Workload, frozen=True, tag="timestamps"):
    """Recorded arrivals, repeated: a CSV with a column TIMESTAMP, or JSON lines with `timestamp` in ms."""

    path: str
    speed: float = 1.0
    """The factor by which the trace is played faster than it was recorded."""
    share: float = 1.0
    """The share of the arrivals that each copy gets, at random."""


class TwitterLike(_Workload, frozen=True, tag="twitter-like"):
    """A generated day with the statistics of a measured day of tweets."""

    mean: float = MEAN_PER_S
    begin_s: float = 0.0
    """The second of the day at which the simulation begins."""

    def __post_init__(self) -> None:
        if not (0 < self.mean < inf and 0 <= self.begin_s < inf):
            raise ValueError(f"mean must be finite and above 0, begin_s at least 0, got {self.mean} and {self.begin_s}")


Workload = Poisson | MarkovianArrivals | Stable | Periodic | Bursty | MinuteCounts | Timestamps | TwitterLike


def arrivals(workload: Workload, rng: Random, copy: int, base: Path) -> Iterator[float]:
    """Yield arrivals in ascending seconds without end.

    `base`: the directory of relative paths. Raises CallerError for an invalid file, and OSError for one that
    cannot be read, for `Timestamps` only when the first arrival is taken.
    """
    match workload:
        case Poisson(rate):
            return _scattered(repeat((1.0, rate)), rng)
        case MarkovianArrivals(rates, stays_s):
            return _scattered(_stays(rates, stays_s, rng), rng)
        case Stable():
            return _even(workload, rng)
        case Periodic():
            return _scattered(_triangle(workload), rng)
        case Bursty(rate, factor, every_s, length_s):
            return _scattered(_stays((rate, rate * factor), (every_s, length_s), rng), rng)
        case MinuteCounts():
            return _minutes(workload, rng, copy, base)
        case Timestamps():
            return _recorded(workload, rng, base)
        case TwitterLike():
            return _day(workload, rng)
        case _:
            assert_never(workload)


def _scattered(steps: Iterable[tuple[float, float]], rng: Random) -> Iterator[float]:
    """Yield a Poisson process with steps of (seconds, rate): exact at the edges, because the rest of a gap is kept."""
    draw = rng.random
    # The numbers of rng.expovariate(1.0), without a call in Python for each.
    begin, owed = 0.0, -log(1.0 - draw())
    for seconds, rate in steps:
        at, end = begin, begin + seconds
        while owed < (end - at) * rate:
            at += owed / rate
            yield at
            owed = -log(1.0 - draw())
        owed -= (end - at) * rate
        begin = end


def _stays(rates: tuple[float, float], stays_s: tuple[float, float], rng: Random) -> Iterator[tuple[float, float]]:
    for rate, stay in cycle(zip(rates, stays_s, strict=True)):
        yield rng.expovariate(1 / stay), rate


def _triangle(workload: Periodic, steps: int = 60) -> Iterator[tuple[float, float]]:
    for step in cycle(range(steps)):
        height = 1 - abs(2 * (step + 0.5) / steps - 1)
        yield workload.period_s / steps, workload.low + height * (workload.high - workload.low)


def _even(workload: Stable, rng: Random) -> Iterator[float]:
    gap, rise_s = 1 / workload.rate, workload.rise_s or 0.0
    begin = rng.random() * gap
    count = 0
    while True:
        at = begin + (count + rng.random() * workload.jitter) * gap
        # While the rate rises, rate·t²/(2·rise) requests have arrived by time t.
        yield sqrt(2 * rise_s * at) if at < rise_s / 2 else at + rise_s / 2
        count += 1


def _minutes(workload: MinuteCounts, rng: Random, copy: int, base: Path) -> Iterator[float]:
    rows = traces.minute_counts(base / workload.path)
    row = rows[(workload.row + copy) % len(rows)][: workload.minutes]
    if not any(row):
        raise CallerError(f"row {(workload.row + copy) % len(rows)} of {workload.path} has no requests")
    shift = rng.randrange(len(row)) if workload.row + copy >= len(rows) else 0
    rotated = [*row[shift:], *row[:shift]]
    return _scattered(((MINUTE_S, count * workload.scale / MINUTE_S) for count in cycle(rotated)), rng)


def _recorded(workload: Timestamps, rng: Random, base: Path) -> Iterator[float]:
    times = traces.timestamps(base / workload.path)
    length = times[-1] + (times[-1] / len(times) or 1.0)
    begin = 0.0
    while True:
        for time in times:
            if workload.share >= 1 or rng.random() < workload.share:
                yield (begin + time) / workload.speed
        begin += length


def _day(workload: TwitterLike, rng: Random) -> Iterator[float]:
    rates = twitter_rates(workload.mean, rng)
    for _ in range(int(workload.begin_s)):
        next(rates)
    return _scattered(((1.0, rate) for rate in rates), rng)

"""Generates a day of request rates with the statistics of a measured day of tweets, second by second.

The rate follows a daily profile and drifts from minute to minute. The counts of single seconds vary slightly more than
those of a Poisson process. A few tens of bursts a day begin suddenly and decay within minutes. No row of the measured
day is stored here, only the constants below, fitted so that each statistic of tests/simulation/test_twitter.py holds.
"""

import math
from collections.abc import Iterator
from random import Random

DAY_S = 86400
MEAN_PER_S = 65.0

LEVEL = 0.96
"""The level outside of bursts, relative to the mean rate."""
NIGHT, AFTERNOON, EVENING = 0.70, 0.55, 1.15
"""The shape of the daily profile: the floor, and two peaks that are added to it."""
AFTERNOON_PEAK_HOUR, AFTERNOON_WIDTH_HOURS = 14.0, 4.0
EVENING_PEAK_HOUR, EVENING_WIDTH_HOURS = 20.5, 1.1
"""The peaks of the fitted curve and their widths. A half-hour has the value of its beginning in its middle, so the
peaks of the rate are a quarter of an hour later.
"""

MINUTE_MEMORY = 0.9
MINUTE_NOISE = 0.03
"""The logarithm of the minutes' level is an AR(1) process: its coefficient, and the standard deviation of its noise."""
SCATTER = 0.15
"""The overdispersion: the variance of a second's count beyond its mean, as a share of the mean. It is drawn for each
minute; this is its mean.
"""

BURSTS = 46
"""The bursts per day, each in its own part of the day."""
BURST_LEAST, BURST_MOST = 1.73, 3.3
"""The range of factors by which a burst multiplies the rate at its start."""
BURST_SKEW = 1.3
"""Above 1, most bursts are nearer to the smallest."""
BURST_FADE = 0.33
"""The remaining share of a burst after one minute."""
GREATEST_HOURS = 19.6, 20.1
"""The day's largest burst begins in the part of the day that contains a random time between these hours."""
CEILING = 4.75
"""The largest rate of any second, before the overdispersion, relative to the mean."""


def twitter_rates(mean: float, rng: Random) -> Iterator[float]:
    """Yield the expected arrivals per second in each second, from midnight on, without end; about `mean` over a day."""
    profile = _profile()
    wander, scatter, burst = 0.0, 0.0, 0.0
    fade = BURST_FADE ** (1 / 60)
    level = mean * LEVEL
    while True:
        bursts = _bursts(rng)
        for second in range(DAY_S):
            if second % 60 == 0:
                wander = MINUTE_MEMORY * wander + rng.gauss(0.0, MINUTE_NOISE)
                scatter = rng.expovariate(1 / SCATTER)
            burst = max(burst * fade, bursts.get(second, 1.0) - 1.0)
            expected = min(level * _at(profile, second) * math.exp(wander) * (1.0 + burst), CEILING * mean)
            yield rng.gammavariate(expected / scatter, scatter)


def _profile() -> list[float]:
    """Return the level of each half-hour of a day, 1 on average."""
    hours = [half / 2 for half in range(48)]
    heights = [
        NIGHT
        + AFTERNOON * math.exp(-(((hour - AFTERNOON_PEAK_HOUR) / AFTERNOON_WIDTH_HOURS) ** 2))
        + EVENING * math.exp(-(((hour - EVENING_PEAK_HOUR) / EVENING_WIDTH_HOURS) ** 2))
        for hour in hours
    ]
    mean = sum(heights) / len(heights)
    return [height / mean for height in heights]


def _at(profile: list[float], second: int) -> float:
    """Interpolate the profile between the middles of its half-hours."""
    half = second / 1800 - 0.5
    before = math.floor(half)
    share = half - before
    return profile[before % 48] * (1 - share) + profile[(before + 1) % 48] * share


def _bursts(rng: Random) -> dict[int, float]:
    """Return the seconds of a day at which bursts begin, and their factors on the rate."""
    ratio = BURST_MOST / BURST_LEAST
    sizes = [BURST_LEAST * ratio ** ((rank / (BURSTS - 1)) ** BURST_SKEW) for rank in range(BURSTS)]
    greatest = sizes.pop()
    rng.shuffle(sizes)
    sizes.insert(int(rng.uniform(*GREATEST_HOURS) / 24 * BURSTS), greatest)
    return {int((part + rng.random()) * DAY_S / BURSTS): size for part, size in enumerate(sizes)}

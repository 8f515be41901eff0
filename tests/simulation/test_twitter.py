"""A generated day has the statistics of the measured one, each within a fifth."""

import statistics
from itertools import islice, pairwise
from pathlib import Path
from random import Random

import pytest

from overwinter.simulation.twitter import DAY_S, twitter_rates
from overwinter.simulation.workloads import TwitterLike, arrivals

MEASURED = {
    "mean per second": 65.0,
    "least half-hour mean": 0.67,
    "greatest half-hour mean": 2.0,
    "greatest 10-second mean": 4.4,
    "median index of dispersion": 1.1,
    "p90 index of dispersion": 1.5,
    "p1 change between minutes": -0.26,
    "p99 change between minutes": 0.63,
    "p99 second relative to the 30 before": 1.40,
    "p99.9 second relative to the 30 before": 2.10,
    "greatest second relative to the 30 before": 3.4,
}


def counts_of_a_day(seed: int) -> list[int]:
    counts = [0] * DAY_S
    for at in arrivals(TwitterLike(), Random(seed), 0, Path()):
        if at >= DAY_S:
            return counts
        counts[int(at)] += 1
    raise AssertionError("the stream ended")


def means(counts: list[int], seconds: int) -> list[float]:
    return [sum(counts[at : at + seconds]) / seconds for at in range(0, len(counts), seconds)]


def statistics_of(counts: list[int]) -> dict[str, float]:
    mean = sum(counts) / len(counts)
    minutes = means(counts, 60)
    changes = statistics.quantiles((after / before - 1 for before, after in pairwise(minutes)), n=100)
    dispersion = [
        statistics.pvariance(counts[60 * number : 60 * number + 60]) / minute for number, minute in enumerate(minutes)
    ]
    over, trailing = [], sum(counts[:30])
    for at in range(30, len(counts)):
        over.append(counts[at] * 30 / trailing)
        trailing += counts[at] - counts[at - 30]
    seconds = statistics.quantiles(over, n=1000)
    return {
        "mean per second": mean,
        "least half-hour mean": min(means(counts, 1800)) / mean,
        "greatest half-hour mean": max(means(counts, 1800)) / mean,
        "greatest 10-second mean": max(means(counts, 10)) / mean,
        "median index of dispersion": statistics.median(dispersion),
        "p90 index of dispersion": statistics.quantiles(dispersion, n=10)[-1],
        "p1 change between minutes": changes[0],
        "p99 change between minutes": changes[-1],
        "p99 second relative to the 30 before": seconds[989],
        "p99.9 second relative to the 30 before": seconds[998],
        "greatest second relative to the 30 before": max(over),
    }


@pytest.mark.parametrize("seed", [1, 2])
def test_a_generated_day_is_like_the_measured_one(seed):
    made = statistics_of(counts_of_a_day(seed))
    far = {name: (made[name], value) for name, value in MEASURED.items() if abs(made[name] / value - 1) > 0.2}
    assert far == {}


def test_the_same_seed_gives_the_same_day():
    first, again, other = (list(islice(twitter_rates(65.0, Random(seed)), 600)) for seed in (5, 5, 6))
    assert first == again
    assert first != other
    assert min(first) > 0

"""Predictors of the rate of the next period, from the rates of past periods, the newest last; 0 without any.

AsyFunc 2.1 names three: on demand, last value, k times the last value. The oracle knows the future, so its rates come
from the workload.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

Predictor = Callable[[Sequence[float]], float]

RECENT = 0.5
"""What the newest rate counts in the mean, the one before it half of the rest, and so on."""


def last_value(rates: Sequence[float]) -> float:
    """As it was."""
    return rates[-1] if rates else 0.0


def times_last_value(rates: Sequence[float], k: float) -> float:
    """Some times as much as it was: workers in reserve for a burst, and for nothing without one."""
    return k * last_value(rates)


def usual(rates: Sequence[float]) -> float:
    """The level of most periods: a burst is met when it has come."""
    return statistics.median(rates) if rates else 0.0


def peak(rates: Sequence[float]) -> float:
    """The most of the periods known."""
    return max(rates, default=0.0)


def window(rates: Sequence[float]) -> float:
    """The last rate, or the fading mean where it is more: up at once, down slowly."""
    if not rates:
        return 0.0
    mean = rates[0]
    for rate in rates[1:]:
        mean += RECENT * (rate - mean)
    return max(rates[-1], mean)


PREDICTORS: Mapping[str, Predictor] = MappingProxyType(
    {
        "last-value": last_value,
        "k-last-value": partial(times_last_value, k=1.5),
        "on-demand": usual,
        "peak": peak,
        "window": window,
    }
)

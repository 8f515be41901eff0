"""Predictors of the rate of the next period, from the rates of past periods, the newest last. Without past rates they
expect 0.

AsyFunc 2.1 names three: on demand, last value, k times the last value. The oracle knows the future, so its rates come
from the workload.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

Predictor = Callable[[Sequence[float]], float]

LATEST_WEIGHT = 0.5
"""The weight of the latest rate in the mean; each earlier rate has half of the remaining weight, the oldest all."""


def last_value(rates: Sequence[float]) -> float:
    """Expect the last rate."""
    return rates[-1] if rates else 0.0


def times_last_value(rates: Sequence[float], k: float) -> float:
    """Expect a multiple of the last rate, to have workers in reserve for a burst."""
    return k * last_value(rates)


def median(rates: Sequence[float]) -> float:
    """Expect the median of the rates, which reacts to a burst only after it has come."""
    return statistics.median(rates) if rates else 0.0


def peak(rates: Sequence[float]) -> float:
    """Expect the highest known rate."""
    return max(rates, default=0.0)


def window(rates: Sequence[float]) -> float:
    """Expect the last rate, or the decaying mean if it is higher: follow rises at once and falls slowly."""
    if not rates:
        return 0.0
    mean = rates[0]
    for rate in rates[1:]:
        mean += LATEST_WEIGHT * (rate - mean)
    return max(rates[-1], mean)


PREDICTORS: Mapping[str, Predictor] = MappingProxyType(
    {
        "last-value": last_value,
        "k-last-value": partial(times_last_value, k=1.5),
        "on-demand": median,
        "peak": peak,
        "window": window,
    }
)

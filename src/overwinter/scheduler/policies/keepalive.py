"""Policies for keep-alive: how long an idle worker stays when its memory is not needed."""

from collections.abc import Sequence
from math import ceil, inf

from overwinter.core.policies import Policy
from overwinter.scheduler.state import Function, Worker

GAPS = 64
"""The most gaps between uses that are recorded."""
GAPS_LEAST = 8
"""The fewest gaps from which a time is derived."""


def by_history(worker: Worker, function: Function, policy: Policy) -> float:
    """Return when the keep-alive of a function in an idle worker ends, by the history of the function.

    The keep-alive begins when the worker became idle, or with a later use of the function elsewhere, so that all its
    idle workers are stopped at about the same time. It is at least one period, unless the longest allowed time is
    shorter, because superfluous workers are stopped at the end of a period.
    """
    most_s = at_most_s(function, policy)
    return max(worker.since, function.used_at) + max(from_history(function.gaps, most_s), min(policy.period_s, most_s))


def at_most_s(function: Function, policy: Policy) -> float:
    """Return how long a function may stay idle in a worker; inf: as long as there is memory."""
    own = function.spec.settings.keep_alive_s
    if own is not None:
        return own
    return inf if policy.keep_alive == "unlimited" else policy.keep_alive_s


def longest_s(worker: Worker, policy: Policy) -> float:
    """The longest that any function of a worker may stay there."""
    # A worker may have a hundred functions, and few different settings.
    functions = {each.function.spec.settings.keep_alive_s: each.function for each in worker.bound.values()}
    return max((at_most_s(each, policy) for each in functions.values()), default=0.0)


def from_history(gaps: Sequence[float], at_most_s: float) -> float:
    """Return 1.1 times the 99th percentile of the gaps between uses (INFless), but at most `at_most_s`; with fewer gaps
    than GAPS_LEAST, `at_most_s`.
    """
    if len(gaps) < GAPS_LEAST:
        return at_most_s
    return min(at_most_s, 1.1 * sorted(gaps)[ceil(0.99 * len(gaps)) - 1])


def remember(gaps: list[float], gap: float) -> None:
    """Add the time between two uses of a function."""
    gaps.append(gap)
    if len(gaps) > GAPS:
        del gaps[0]

"""Policies for keep-alive: how long an idle worker stays when its memory is not needed."""

from collections.abc import Sequence
from math import inf

from overwinter.core.policies import Policy
from overwinter.scheduler.state import Function, Worker

GAPS = 64
"""Gaps that are remembered."""
GAPS_LEAST = 8
"""With fewer, the past says nothing yet."""


def by_history(worker: Worker, function: Function, policy: Policy) -> float:
    """When an idle worker is stopped, by the history of its function. The history is the function's: all its workers
    are stopped when it is no longer used, and not before the next period, in which a superfluous one is stopped.
    """
    most_s = at_most_s(function, policy)
    return max(worker.since, function.used) + max(from_history(function.gaps, most_s), min(policy.period_s, most_s))


def at_most_s(function: Function, policy: Policy) -> float:
    """How long a function may stay in a worker in which it is idle; inf: as long as there is memory."""
    own = function.spec.settings.keep_alive_s
    if own is not None:
        return own
    return inf if policy.keep_alive == "room" else policy.keep_alive_s


def longest_s(worker: Worker, policy: Policy) -> float:
    """The longest that any function of a worker may stay there."""
    return max((at_most_s(each.function, policy) for each in worker.bound.values()), default=0.0)


def from_history(gaps: Sequence[float], at_most_s: float) -> float:
    """Just longer than 99 of 100 of the gaps between uses so far (INFless), within the function's own bound."""
    if len(gaps) < GAPS_LEAST:
        return at_most_s
    return min(at_most_s, 1.1 * sorted(gaps)[int(0.99 * (len(gaps) - 1))])


def remember(gaps: list[float], gap: float) -> None:
    """Add the time between two uses of a function."""
    gaps.append(gap)
    if len(gaps) > GAPS:
        del gaps[0]

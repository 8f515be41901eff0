"""Policies for devices: whose waiting requests get the next free one (Torpor 5.2 and A.3).

The required request count (RRC) of a function is the number of further requests that it must answer in time until a
given part of its requests was in time. Functions with a small RRC can still meet their SLO: they have high priority.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from math import inf
from types import MappingProxyType

import msgspec

from overwinter.core.ids import FunctionId
from overwinter.core.policies import DeviceOrder

PERCENTILE = 0.98
"""The part of the requests that must be in time."""
WINDOW_S = 60.0
"""How long an answer counts, at most."""
BUCKET_S = 5.0
"""The length of a bucket: the answers in it are counted and forgotten together."""
PERIOD_S = 10.0
"""The time between two changes of alpha."""
ALPHA_LEAST = 1 / 128
"""Alpha is halved in overload, and only doubled afterwards, so it must not become 0."""
ALPHA_SCALE = 2.0
RATIO_CHANGE = 0.04
"""The change of the ratio of compliant functions above which alpha changes."""
LONG = 0.5
"""A request has waited for a long time after this part of the time from its arrival to its deadline."""
LONG_EVERY = 10
"""Of this many runs, one is for the first of the requests that have waited for a long time."""
EPSILON = 1e-9


class Outcomes(msgspec.Struct):
    """The answers to a function's requests within the window."""

    count: int = 0
    in_time: int = 0
    _buckets: deque[tuple[int, int, int]] = msgspec.field(default_factory=deque)
    """The number of each bucket in the window, its answers, and those in time."""

    def add(self, now: float, in_time: bool) -> None:
        """Count one more answer."""
        number, last = int(now // BUCKET_S), self._buckets[-1] if self._buckets else None
        if last is not None and last[0] == number:
            self._buckets[-1] = (number, last[1] + 1, last[2] + in_time)
        else:
            self._buckets.append((number, 1, int(in_time)))
        self.count += 1
        self.in_time += in_time
        self.forget(now)

    def forget(self, now: float) -> None:
        """Remove the buckets that began before the window."""
        oldest = int((now - WINDOW_S) // BUCKET_S)
        while self._buckets and self._buckets[0][0] <= oldest:
            _, count, in_time = self._buckets.popleft()
            self.count -= count
            self.in_time -= in_time

    @property
    def required(self) -> float:
        """The required request count."""
        return (PERCENTILE * self.count - self.in_time) / (1 - PERCENTILE)

    @property
    def complies(self) -> bool:
        """Whether enough requests were in time."""
        return self.in_time >= PERCENTILE * self.count - EPSILON


Boundary = tuple[float, FunctionId]
"""The RRC and the id of the last function with high priority."""


def boundary(required: Iterable[Boundary], alpha: float) -> Boundary:
    """Return the last function with high priority. Functions get high priority in ascending RRC, as long as the sum of
    their positive RRCs is at most `alpha` of the total.
    """
    positive = sorted(each for each in required if each[0] > 0)
    left = alpha * sum(count for count, _ in positive) + EPSILON
    last: Boundary = (0.0, FunctionId(""))
    for each in positive:
        left -= each[0]
        if left < 0:
            break
        last = each
    return last


def next_alpha(alpha: float, before: float, now: float) -> float:
    """Return alpha after a period in which the ratio of compliant functions changed (Torpor, alg. 2)."""
    if now - before > RATIO_CHANGE:
        return min(1.0, alpha * ALPHA_SCALE)
    if before - now > RATIO_CHANGE:
        return max(ALPHA_LEAST, alpha / ALPHA_SCALE)
    return alpha


class Waiting(msgspec.Struct, frozen=True):
    """The input of a policy about a function with waiting requests."""

    function: FunctionId
    level: int
    """The priority of its first request; lower levels go first."""
    arrived: float
    due: float
    required: float
    has_slo: bool = True
    swap_wait_s: float = 0.0
    """The time for which its run would wait for blocks on the best of the free devices."""
    is_late: bool = False
    """Whether its first request would be late even if it ran now."""


Rank = tuple[int, int, float, float, FunctionId]
Rule = Callable[[Waiting, Boundary], Rank]
"""The order of functions, in each rule first by the level: the lowest rank gets the next device."""


def required_requests(waiting: Waiting, last: Boundary) -> Rank:
    """Functions with high priority first, the largest RRC before others; then those with low priority, the smallest RRC
    before others.
    """
    is_low = waiting.required > 0 and (waiting.required, waiting.function) > last
    count = waiting.required if is_low else -waiting.required
    return waiting.level, is_low, count, waiting.arrived, waiting.function


def least_wait_in_time(waiting: Waiting, last: Boundary) -> Rank:
    """Requests that can be in time first, in the order of the time for which their runs would wait for blocks: under
    overload the links saturate first, so requests that need no transfer or a short one go first. Then those without an
    SLO, then late ones, both in the order of arrival.
    """
    kind = 1 if not waiting.has_slo else 2 if waiting.is_late else 0
    return waiting.level, kind, 0.0 if kind else waiting.swap_wait_s, waiting.arrived, waiting.function


def first_in_first_out(waiting: Waiting, last: Boundary) -> Rank:
    """The request that arrived first."""
    return waiting.level, False, waiting.arrived, waiting.arrived, waiting.function


def earliest_due(waiting: Waiting, last: Boundary) -> Rank:
    """The request that is due first."""
    return waiting.level, False, waiting.due, waiting.arrived, waiting.function


RULES: Mapping[DeviceOrder, Rule] = MappingProxyType(
    {
        "overwinter": least_wait_in_time,
        "rrc": required_requests,
        "fifo": first_in_first_out,
        "due-time": earliest_due,
    }
)
EVERYONE: Boundary = (inf, FunctionId(""))
"""All functions have high priority."""

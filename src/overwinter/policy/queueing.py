"""Which request may wait, and which waiting request is next."""

from collections import deque

from overwinter.core.ids import RequestId
from overwinter.policy.state import Function


def admits(function: Function) -> bool:
    """Whether the function's queue, first in first out and bounded, takes one more."""
    return len(function.queue) < function.spec.settings.queue_limit


def retry_after_s(function: Function, least_s: float) -> float:
    """Seconds until a full queue should have been served, from the runs seen so far."""
    bodies = max(1, len(function.bodies))
    runs = len(function.queue) / (function.spec.settings.max_batch * bodies)
    return max(least_s, runs * (function.run_s or 0.0))


def put_back(queue: deque[RequestId], requests: tuple[RequestId, ...]) -> None:
    """Requests whose body died go first again, in their old order."""
    queue.extendleft(reversed(requests))

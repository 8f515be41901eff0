"""Policies for queues: which requests are admitted, and which waiting request is next."""

from collections import deque
from collections.abc import Mapping
from itertools import takewhile

from overwinter.core.ids import RequestId, Seconds
from overwinter.scheduler.ledger import Resource
from overwinter.scheduler.request import Request
from overwinter.scheduler.state import Function

ORDINARY = 100
"""The level of a request without a priority: 1 to 99 go before it, larger numbers after it."""


def level(priority: int) -> int:
    """The place of a priority, as Triton has it: 1 is first, 0 the ordinary."""
    return priority or ORDINARY


def why_full(function: Function, requests: Resource) -> str | None:
    """The reason why no more requests of the function are accepted; None: one more is. A tenant may have as many open
    requests as there are free places: alone a half, next to a tenant with as many a third. So there is always a place
    for tenants with few requests (Choudhury and Hahne's dynamic thresholds).
    """
    if len(function.queue) >= function.spec.settings.queue_limit:
        return f"function {function.spec.id} already has {len(function.queue)} requests waiting"
    tenant, most = function.spec.tenant, requests.capacity
    own = requests.of(tenant)
    if own >= requests.free:
        return f"tenant {tenant!r} has {own} requests without an answer; all may have {most} (requests_max)"
    return None


def insert(queue: deque[RequestId], request: Request, requests: Mapping[RequestId, Request]) -> None:
    """Put a request behind all of its level with earlier due times and before later levels."""
    at = len(queue)
    while at and requests[queue[at - 1]].level > request.level:
        at -= 1
    queue.insert(at, request.id)


def late_last(queue: deque[RequestId], requests: Mapping[RequestId, Request], before: float, late_first: bool) -> None:
    """Of the first level, move requests due before a time, which are late, behind the others, or before them. AsyFunc
    refuses them then (alg. 3, lines 16-18); here they are answered when they delay no request that can be in time.
    """
    if not queue or len(queue) == 1:
        return
    first = requests[queue[0]].level
    own = list(takewhile(lambda id_: requests[id_].level == first, queue))
    late = [id_ for id_ in own if requests[id_].due < before]
    if not late or len(late) == len(own):
        return
    # Those that were found late one after the other: the one that came first goes first.
    late.sort(key=lambda id_: requests[id_].arrived)
    in_time = [id_ for id_ in own if requests[id_].due >= before]
    for _ in own:
        queue.popleft()
    queue.extendleft(reversed(late + in_time if late_first else in_time + late))


def take(
    queue: deque[RequestId], count: int, requests: Mapping[RequestId, Request], now: Seconds
) -> tuple[tuple[RequestId, ...], list[RequestId]]:
    """Take up to `count` requests from the front, and separately those past their deadline."""
    taken: list[RequestId] = []
    expired: list[RequestId] = []
    while queue and len(taken) < count:
        id_ = queue.popleft()
        (taken if requests[id_].deadline > now else expired).append(id_)
    return tuple(taken), expired


def retry_after_s(function: Function, least_s: float) -> float:
    """Seconds until a full queue should have been served, from the runs seen so far."""
    workers = max(1, len(function.workers))
    runs = len(function.queue) / (function.spec.settings.max_batch * workers)
    return max(least_s, runs * (function.latency.run_s or 0.0))


def put_back(queue: deque[RequestId], ids: tuple[RequestId, ...], requests: Mapping[RequestId, Request]) -> None:
    """Requests whose worker died go to the front of their level, in their old order."""
    for id_ in reversed(ids):
        at = 0
        while at < len(queue) and requests[queue[at]].level < requests[id_].level:
            at += 1
        queue.insert(at, id_)

"""Policies for queues: which requests are admitted, and which waiting request is next."""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Mapping
from itertools import takewhile

from overwinter.core.ids import RequestId, Seconds
from overwinter.scheduler.ledger import Resource
from overwinter.scheduler.request import Request
from overwinter.scheduler.state import Function

ORDINARY = 100
"""The level of a request without a priority: levels 1 to 99 go before it, larger ones after it."""


def level(priority: int) -> int:
    """Return the level of a priority, as in Triton: 1 is first, 0 the default."""
    return priority or ORDINARY


def why_full(function: Function, queued: int, requests: Resource) -> str | None:
    """Return why one more request of the function is refused; None: it is accepted. `queued`: its requests that wait.

    A tenant may have as many open requests as are free of `requests_max`. A single tenant can thus have half of them,
    and two tenants a third each, so some are always free for tenants with few requests (Choudhury and Hahne's dynamic
    thresholds).
    """
    if queued >= function.spec.settings.queue_limit:
        return f"function {function.spec.id} already has {queued} requests waiting"
    tenant, most = function.spec.tenant, requests.capacity
    own = requests.of(tenant)
    if most is not None and own >= most - requests.taken:
        return (
            f"tenant {tenant!r} has {own} open requests, and may have no more than are still free of the {most} of all "
            "tenants together (requests_max)"
        )
    return None


def insert(queue: deque[RequestId], request: Request, requests: Mapping[RequestId, Request]) -> None:
    """Insert a request behind those of its level that arrived before, and before later levels."""
    if not queue or requests[queue[-1]].level <= request.level:
        queue.append(request.id)
    else:
        queue.insert(bisect_right(queue, request.level, key=lambda id_: requests[id_].level), request.id)


def remove(queue: deque[RequestId], id_: RequestId) -> bool:
    """Remove a request; return whether it waited in the queue."""
    try:
        queue.remove(id_)
    except ValueError:
        return False
    return True


def remove_all(queue: deque[RequestId], ids: Collection[RequestId]) -> None:
    """Remove several requests in one pass; those that do not wait in the queue are ignored."""
    if ids:
        gone = set(ids)
        kept = [id_ for id_ in queue if id_ not in gone]
        queue.clear()
        queue.extend(kept)


def without_newest(
    late: Collection[RequestId], served: Collection[RequestId], count: int, requests: Mapping[RequestId, Request]
) -> list[RequestId]:
    """Return the late requests without up to `count` of `served`, which are answered nevertheless: those of the first
    levels, and within a level the newest.
    """
    kept = set(sorted(served, key=lambda id_: (-requests[id_].level, requests[id_].arrived))[-count:])
    return [id_ for id_ in late if id_ not in kept]


def order_late(queue: deque[RequestId], requests: Mapping[RequestId, Request], before: float, late_first: bool) -> None:
    """Of the requests with the level of the first, move late ones (due before `before`) behind the others, or with
    `late_first` to the front.

    AsyFunc refuses them (alg. 3, lines 16-18); here they are still answered, unless `late` is "refuse".
    """
    if not queue or len(queue) == 1:
        return
    first = requests[queue[0]].level
    own = list(takewhile(lambda id_: requests[id_].level == first, queue))
    late = [id_ for id_ in own if requests[id_].due < before]
    if not late or len(late) == len(own):
        return
    # Earlier calls moved late requests at different times, so restore the order of their arrival.
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


def put_back(queue: deque[RequestId], ids: tuple[RequestId, ...], requests: Mapping[RequestId, Request]) -> None:
    """Put the unanswered requests of a run back at the front of their level, in their old order."""
    for id_ in reversed(ids):
        queue.insert(bisect_left(queue, requests[id_].level, key=lambda each: requests[each].level), id_)

"""Decides which functions' requests share a run.

Functions of a family that allow batches run together as far as their weights are the same (worker/split.py): a
retrained head runs separately, everything before it as one batch. The function for whose requests a run is started
leads it. Requests of other functions join it, the first by `_rank`, up to the batch size of the worker. These functions
have the same trunk as the leading one: each has blocks in common with the function that started the trunk, at least
half of the bytes of the larger of the two. A function for which `is_suspect` holds shares no runs.

Where shared runs took no less time than separate ones, requests join only now and then (sharing_costs.py). The latency
of a shared run is computed from the profile of one function's runs and the part of them that is not shared
(latency.py). Requests that join do not make those of the leading function late.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from heapq import heapify, heappop, heapreplace
from itertools import islice
from math import inf

from overwinter.core.ids import RequestId
from overwinter.core.profile import Point
from overwinter.scheduler import order
from overwinter.scheduler.answers import expire
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.families import has_slo
from overwinter.scheduler.operation import Part
from overwinter.scheduler.policies import queueing
from overwinter.scheduler.policies.batching import Send
from overwinter.scheduler.policy_failures import shared_run_s
from overwinter.scheduler.state import Function, Worker

SUSPECT_RUNS = 100
"""After this many further runs of a function, the last failure of a worker or device that ran it no longer counts."""
CANDIDATES_MAX = 64
"""The most functions that are considered for sharing a run with one."""

RunSeconds = Callable[[Sequence[int]], float]
"""The expected seconds of a run with these numbers of requests of each function; 0 if unknown."""
Rank = tuple[int, bool, float]
"""The priority level of a request, whether it would be late, and its due time."""
FIRST: Rank = (-1, False, 0.0)


def is_suspect(function: Function) -> bool:
    """Whether a worker recently died or hung, or a device broke, in a run or a bind of it."""
    return function.runs_at_death is not None and function.runs - function.runs_at_death <= SUSPECT_RUNS


def is_stuck(cycle: Cycle, worker: Worker) -> bool:
    """Whether a worker will not be available soon: it has no free slot, and a run of a function for which `is_suspect`
    holds is overdue.
    """
    for run in worker.runs.values():
        if run.overdue_at <= cycle.now and is_suspect(run.function):
            return not worker.has_slot
    return False


def arm_for_overdue_suspects(cycle: Cycle, worker: Worker) -> None:
    """Set the timer of a worker to the time when a run of a function for which `is_suspect` holds is overdue: then
    other functions stop waiting for it.
    """
    for run in worker.runs.values():
        if is_suspect(run.function) and run.overdue_at > cycle.now:
            cycle.timers.arm(worker.id, run.overdue_at)


def count_joining(cycle: Cycle, function: Function, workers: Sequence[Worker], waited_s: float, slo_s: float) -> int:
    """Return how many requests of other functions count as waiting with the function's own: as many as could join a run
    of it in one of these workers without making its first request late. Each is assumed to be of a different function.
    """
    others = _candidates_in(cycle, function, workers)
    if not others:
        return 0
    own, most, count = len(function.queue), max(worker.point.batch for worker in workers), 0
    if own >= most:
        return 0
    for other in others:
        count += len(other.queue)
        if own + count >= most:
            count = most - own
            break
    left_s = slo_s - waited_s
    if count and left_s < inf and _shortest_run_s(cycle, function, workers, own, 0) <= left_s:
        # The time grows with each further request, so search for the largest number that fits.
        fit, more = 0, count + 1
        while more - fit > 1:
            middle = (fit + more) // 2
            if _shortest_run_s(cycle, function, workers, own, middle) <= left_s:
                fit = middle
            else:
                more = middle
        count = fit
    return count


def expected_shared_run_s(cycle: Cycle, function: Function, worker: Worker, count: int) -> float:
    """Expected seconds of a shared run, with the function's own requests first; 0 if unknown."""
    own = min(count, len(function.queue))
    return shared_run_s(cycle.state, function, worker.point, [own, *[1] * (count - own)]) or 0.0


def _shortest_run_s(cycle: Cycle, function: Function, workers: Sequence[Worker], own: int, count: int) -> float:
    return min(
        expected_shared_run_s(cycle, function, worker, min(own + count, worker.point.batch)) for worker in workers
    )


def queue_changed(cycle: Cycle, function: Function) -> None:
    """A request entered or left the function's queue: functions that wait for more requests check again."""
    for other in _waiting(function) if cycle.policy.joins else ():
        if other.batch_at is not None:
            cycle.mark(other)


def take(cycle: Cycle, function: Function, send: Send) -> tuple[Part, ...]:
    """Take the requests of a run: the function's first request, then its own and those of functions that join, by
    `_rank`. Requests past their deadline are refused.
    """
    if not _waiting(function):
        return _alone(cycle, function, send)
    others = list(_candidates_in(cycle, function, [send.worker]))
    if others:
        seconds = partial(_in_worker_s, cycle, function, send.worker.point)
        parts = take_shared_run(cycle, function, send.count, seconds, others)
    else:
        parts = _alone(cycle, function, send)
    queue_changed(cycle, function)
    return parts


def _in_worker_s(cycle: Cycle, function: Function, point: Point, counts: Sequence[int]) -> float:
    return shared_run_s(cycle.state, function, point, counts) or 0.0


def _alone(cycle: Cycle, function: Function, send: Send) -> tuple[Part, ...]:
    ids = _first(cycle, function, send.count)
    return (Part(function, ids),) if ids else ()


def _first(cycle: Cycle, function: Function, count: int) -> tuple[RequestId, ...]:
    """Take the function's first requests from its queue, and refuse those past their deadline."""
    ids, expired = queueing.take(function.queue, count, cycle.state.requests, cycle.now)
    for id_ in expired:
        expire(cycle, id_)
    return ids


def take_shared_run(
    cycle: Cycle, function: Function, count: int, seconds: RunSeconds, others: Sequence[Function]
) -> tuple[Part, ...]:
    """Take the requests of a shared run, at most `count`, from the queues of the function and of these others."""
    shared_run = _AssembledRun(cycle, function, count, seconds)
    shared_run.protect()
    _fill(cycle, shared_run, [function, *others])
    for other in shared_run.taken:
        if other is not function:
            if not other.queue:
                order.leave(cycle, other)
            cycle.mark(other)
    return shared_run.parts()


def _fill(cycle: Cycle, shared_run: "_AssembledRun", functions: Sequence[Function]) -> None:
    """Take the first requests by `_rank` from these functions, the first of which leads."""
    heap = [(FIRST, 0)]
    for number, other in enumerate(functions[1:], 1):
        if cycle.policy.order == "due-time":
            order.arrange(cycle, other)
        heap.append((_rank(cycle, other, shared_run.run_s), number))
    heapify(heap)
    while heap and shared_run.left:
        _, number = heap[0]
        each = functions[number]
        if each.queue and (not number or shared_run.may_join(each)):
            shared_run.take(each, 1)
            if each.queue:
                heapreplace(heap, (_rank(cycle, each, shared_run.run_s), number))
                continue
        heappop(heap)


class _AssembledRun:
    """A shared run being assembled. A request of another function joins unless it makes a request late (one that the
    leading function would answer in time in a separate run, or one that joined before), or would itself be late and its
    function refuses late requests.
    """

    def __init__(self, cycle: Cycle, function: Function, count: int, seconds: RunSeconds) -> None:
        self._cycle = cycle
        self._leader = function
        self._seconds = seconds
        self.left = count
        self.taken: dict[Function, list[RequestId]] = {function: []}
        self.run_s = seconds([count])
        """The expected time of a run of the leading function alone."""
        self._ends_by = inf
        """If the run ended later, it would make a request late."""

    def protect(self) -> None:
        """Protect the requests that the leading function could answer in time alone: the run must end in
        time for them.
        """
        cycle, leader = self._cycle, self._leader
        if leader.spec.settings.slo_ms is None:
            return
        alone = list(islice(leader.queue, self.left))
        ends = cycle.now + self._seconds([len(alone)])
        dues = (cycle.state.requests[id_].due for id_ in alone)
        self._ends_by = min((due for due in dues if due >= ends), default=inf)

    def may_join(self, other: Function) -> bool:
        """Whether the first request of another function may join."""
        first = self._cycle.state.requests[other.queue[0]]
        ends, due, with_slo = self._ends_with(other), first.due, has_slo(other, first)
        if ends > self._ends_by or (with_slo and ends > due and other.spec.settings.late == "refuse"):
            return False
        if with_slo and ends <= due:
            self._ends_by = min(self._ends_by, due)
        return True

    def _ends_with(self, other: Function) -> float:
        """Return when the run would end if the leading function then filled the rest of it."""
        counts = {each: len(ids) for each, ids in self.taken.items()}
        counts[other] = counts.get(other, 0) + 1
        counts[self._leader] += min(len(self._leader.queue), self.left - 1)
        return self._cycle.now + self._seconds([count for count in counts.values() if count])

    def take(self, function: Function, count: int) -> None:
        """Take the function's first requests, and refuse those past their deadline."""
        ids = _first(self._cycle, function, count)
        self.taken.setdefault(function, []).extend(ids)
        self.left -= len(ids)

    def parts(self) -> tuple[Part, ...]:
        """The requests of each function, those of the leading one first."""
        return tuple(Part(each, tuple(ids)) for each, ids in self.taken.items() if ids)


def _waiting(function: Function) -> Iterable[Function]:
    """The other functions with waiting requests that could share a run; if there are many, those waiting longest,
    because each arriving request checks them all. Usually there is none, and the result is empty.
    """
    waiting = function.family.trunks[function.trunk].waiting
    if not waiting or (len(waiting) == 1 and function.spec.id in waiting):
        return ()
    members, own = function.family.members, function.spec.id
    return (members[id_] for id_ in islice(waiting, CANDIDATES_MAX) if id_ != own)


def candidates(cycle: Cycle, function: Function) -> Iterable[Function]:
    """The functions with waiting requests that may share a run with the function; an empty tuple if none waits, or the
    function may share none now.
    """
    waiting = _waiting(function)
    if not waiting or not cycle.policy.joins or is_suspect(function):
        return ()
    if not function.family.trunks[function.trunk].sharing.joins:
        return ()
    return (other for other in waiting if other.queue and not is_suspect(other))


def _candidates_in(cycle: Cycle, function: Function, workers: Sequence[Worker]) -> Iterable[Function]:
    """Return those of the candidates that could join a run in one of these workers."""
    waiting = candidates(cycle, function)
    return _able(waiting, workers) if waiting else ()


def _able(waiting: Iterable[Function], workers: Sequence[Worker]) -> Iterator[Function]:
    """Of these functions, those that may run together with another in one of these workers."""
    for other in waiting:
        if any(worker.point.batch > 1 and worker.serves(other.spec.id) for worker in workers):
            yield other


def _rank(cycle: Cycle, function: Function, run_s: float) -> Rank:
    first = cycle.state.requests[function.queue[0]]
    return first.level, cycle.now + run_s > first.due, first.due

"""Whose requests share a run?

Functions of a family that allow batches run together as far as their weights are the same (worker/trunk.py): a head
that was retrained runs by itself, all before it as one batch. A run is led by the function that is asked for its want;
the requests of its mates that are due next join it, up to the batch of the worker. Mates have half of their blocks'
bytes or more in common with the same member; a function of which a worker died lately has none.

How long such a run takes is taken from the profile of one function's batch.
"""

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heapreplace

from overwinter.core.ids import RequestId
from overwinter.scheduler import order
from overwinter.scheduler.answers import expire
from overwinter.scheduler.containment import expected_s
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.operation import Part
from overwinter.scheduler.policies import queueing
from overwinter.scheduler.policies.batching import Send
from overwinter.scheduler.state import Function, Worker

FORGIVEN = 100
"""After so many runs of a function its last death counts no more."""

Rank = tuple[int, bool, float]
"""The level of a request, whether it would be late, and when it is due."""
FIRST: Rank = (-1, False, 0.0)


def is_suspect(function: Function) -> bool:
    """Whether a worker died of a run of it not long ago."""
    return function.killed_at is not None and function.runs - function.killed_at <= FORGIVEN


def waiting(cycle: Cycle, function: Function, slots: Sequence[Worker]) -> int:
    """How many requests of its mates could join a run of the function in one of these workers, as far as is counted."""
    most, count = max(worker.point.batch for worker in slots), 0
    for mate in _mates(cycle, function, slots):
        count += len(mate.queue)
        if count >= most:
            break
    return count


def came(cycle: Cycle, function: Function) -> None:
    """A request came: those that wait for more of them look again."""
    if cycle.policy.joins:
        for id_ in function.family.waiting:
            mate = function.family.members[id_]
            if mate is not function and mate.batch_at is not None:
                cycle.mark(mate)


def take(cycle: Cycle, function: Function, send: Send) -> tuple[Part, ...]:
    """What a run has: the function's first request, then its own and its mates' that are due next. Those apart whose
    deadline has come, which are refused.
    """
    state, worker = cycle.state, send.worker
    mates = list(_mates(cycle, function, [worker]))
    run_s = expected_s(state, function, worker.point, send.count) or 0.0
    line = [(FIRST, 0, function)]
    for number, mate in enumerate(mates, 1):
        if cycle.policy.order == "deadline":
            order.arrange(cycle, mate)
        rank = _rank(cycle, mate, run_s)
        if not (rank[1] and mate.spec.settings.late == "refuse"):
            line.append((rank, number, mate))
    heapify(line)
    taken: dict[int, list[RequestId]] = {}
    left = send.count
    while line and left:
        _, number, each = line[0]
        ids, expired = queueing.take(each.queue, 1, state.requests, cycle.now)
        for id_ in expired:
            expire(cycle, id_)
        taken.setdefault(number, []).extend(ids)
        left -= len(ids)
        if each.queue:
            heapreplace(line, (_rank(cycle, each, run_s), number, each))
        else:
            heappop(line)
    for number in sorted(taken.keys() - {0}):
        mate = mates[number - 1]
        if not mate.queue:
            order.leave(cycle, mate)
        cycle.mark(mate)
    everybody = [function, *mates]
    return tuple(Part(everybody[number], tuple(ids)) for number, ids in sorted(taken.items()) if ids)


def _mates(cycle: Cycle, function: Function, workers: Sequence[Worker]) -> Iterator[Function]:
    """Those whose requests wait and could join a run of the function in one of these workers."""
    family = function.family
    if not cycle.policy.joins or is_suspect(function):
        return
    for id_ in family.waiting:
        mate = family.members[id_]
        if mate is function or not mate.queue or mate.trunk != function.trunk or is_suspect(mate):
            continue
        if any(worker.point.batch > 1 and worker.serves(id_) for worker in workers):
            yield mate


def _rank(cycle: Cycle, function: Function, run_s: float) -> Rank:
    first = cycle.state.requests[function.queue[0]]
    return first.level, cycle.now + run_s > first.due, first.due

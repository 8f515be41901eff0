"""Computes the next want of a function from the facts: at most one. Computing it changes nothing."""

from collections.abc import Sequence
from functools import partial
from itertools import chain, islice
from math import inf

import msgspec

from overwinter.scheduler import shared_runs
from overwinter.scheduler.binding import free_workers, was_unloaded, worker_to_bind_in
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.policies import batching
from overwinter.scheduler.policies.batching import Send, Step, Wait
from overwinter.scheduler.policy_failures import call_policy
from overwinter.scheduler.sizing import keeps_up
from overwinter.scheduler.state import Function, Worker


class NeedBlocks(msgspec.Struct, frozen=True):
    """Get the function's blocks into the host store."""


class BindIn(msgspec.Struct, frozen=True):
    """Bind the function in this worker of its family."""

    worker: Worker


class FreeMemory(msgspec.Struct, frozen=True):
    """Get private memory to bind the function in a worker of its family with a free slot."""


class Fork(msgspec.Struct, frozen=True):
    """Start one more worker, or as many as a scaler asks for."""


class GiveUp(msgspec.Struct, frozen=True):
    """Refuse the requests: the function can never run."""

    why: str


class UseDevice(msgspec.Struct, frozen=True):
    """Run on a device of the pool."""


Want = Send | Wait | NeedBlocks | BindIn | FreeMemory | Fork | GiveUp | UseDevice
"""Send: send a run of the first requests to a worker with a free slot. Wait: wait for more requests, at most this many
seconds.
"""

NEED_BLOCKS, FREE_MEMORY, FORK, USE_DEVICE = NeedBlocks(), FreeMemory(), Fork(), UseDevice()

COUNTED_MAX = 256
"""The most waiting functions of a family whose requests are counted."""


def next_want(cycle: Cycle, function: Function) -> Want | None:
    """Return the best option for the waiting requests, or for a caller that waits for the function to be loaded; None:
    nothing can or need be done now.

    Run them in a worker that has bound the function and has a free slot; otherwise bind it in a worker of its family
    with a free slot and memory; otherwise make memory available there, unless a caller waits for the load; otherwise
    fork a worker, if one is needed. Before any but the first of these, load its blocks. A function of the pool needs
    a device instead.
    """
    if function.unloaded or not (function.queue or function.wants_wake):
        return None
    if function.pool is not None:
        return _on_device(cycle, function)
    return _in_workers(cycle, function)


def _in_workers(cycle: Cycle, function: Function) -> Want | None:
    if function.queue:
        workers = function.workers_with_slot()
        if workers:
            return call_policy(cycle.state, function, Send(workers[0], 1), _next_step, cycle, function, workers)
    if not _may_wake(cycle, function):
        return None
    wants_bind = _wants_bind(function)
    free = free_workers(function) if wants_bind else []
    if wants_bind:
        worker = worker_to_bind_in(cycle, function, free) if free else None
        if worker is not None:
            return BindIn(worker) if function.loaded else NEED_BLOCKS
        if not function.workers and not function.loaded and function.has_usable_worker:
            # It waits for a slot, and needs its blocks in any worker.
            return NEED_BLOCKS
    if _needs_worker_now(cycle, function):
        return FORK if function.loaded else NEED_BLOCKS
    if function.queue and free:
        return FREE_MEMORY if function.loaded else NEED_BLOCKS
    return None


def _on_device(cycle: Cycle, function: Function) -> Want | None:
    """Return the want of a function of the pool: its blocks, then a device for each run."""
    assert function.pool is not None
    if function.pool.no_device_reason:
        return GiveUp(function.pool.no_device_reason)
    if not _may_wake(cycle, function):
        return None
    if not function.loaded:
        return NEED_BLOCKS
    return USE_DEVICE if function.queue else None


def wants_capacity(cycle: Cycle, function: Function) -> bool:
    """Whether a function in the queue for capacity still has the same want."""
    return next_want(cycle, function) == (FREE_MEMORY if function.lacks_memory else FORK)


def _may_wake(cycle: Cycle, function: Function) -> bool:
    may_not = function.loading is not None or cycle.now < function.backoff_until
    return not may_not and function.spec.id != cycle.state.releasing


def _wants_bind(function: Function) -> bool:
    """Whether a bind would suffice. A version on trial gets a new worker, because it may end the worker."""
    if len(function.family.members) == 1 or function.on_trial:
        return False
    return (bool(function.queue) or function.awaited) and not function.is_starting


def _needs_worker_now(cycle: Cycle, function: Function) -> bool:
    if function.wants_wake:
        return not function.is_starting
    return bool(function.queue) and call_policy(cycle.state, function, False, needs_worker, cycle, function)


def needs_worker(cycle: Cycle, function: Function) -> bool:
    """Whether waiting requests need a worker. The first worker always; a further one, one at a time, if the policy is
    eager, a core is free, no worker has a free slot, and the family's last request would wait longer than a wake takes
    and than the SLO of this function allows.
    """
    workers, ready = [each for each in function.usable_workers() if not was_unloaded(each, function)], []
    if len(workers) >= function.family.max_workers or function.is_starting:
        return False
    for worker in workers:
        if worker.start is not None:
            if _will_serve_family(worker):
                return False
        elif not worker.stopping and not _is_unavailable(cycle, worker):
            ready.append(worker)
    if not ready:
        return True
    if not cycle.policy.eager or cores_in_use(cycle) >= cycle.cores:
        return False
    if any(worker.has_slot for worker in ready):
        return False
    return _waits_long(function, ready)


def _waits_long(function: Function, ready: Sequence[Worker]) -> bool:
    """Whether these workers would keep the family's last request waiting for too long."""
    settings, latency, family = function.spec.settings, function.family.latency, function.family
    rate = at_once = 0.0
    for worker in ready:
        seconds = latency.latency_s(worker.point, worker.point.batch)
        if seconds is None:
            # Nothing has run yet: the cost of trying a worker is one wake.
            return True
        together = worker.point.batch * worker.point.concurrency
        rate += together / max(seconds, 1e-9)
        at_once += together
    # The workers of a family may differ: all together serve the waiting requests, slow ones included.
    run_s, slo_s = at_once / rate, 0.0 if settings.slo_ms is None else settings.slo_ms / 1000
    # Many functions may wait, and each asks. Each counts for one request; further requests are counted only for the
    # first functions, and until the result is known.
    count = len(family.waiting) + (function.spec.id not in family.waiting)
    first = (family.members[id_] for id_ in islice(family.waiting, COUNTED_MAX) if id_ != function.spec.id)
    for each in chain([function], first):
        count += len(each.queue) - 1
        wait_s = count / rate
        if wait_s > latency.wake_s and wait_s + run_s > slo_s:
            return True
    return False


def _will_serve_family(worker: Worker) -> bool:
    """Whether a worker that starts will serve all its family. One that is started for a function on trial may never."""
    function = worker.starts_for
    return function is not None and not worker.stopping and not function.on_trial


def _is_unavailable(cycle: Cycle, worker: Worker) -> bool:
    """Whether a worker will not become available soon: `is_stuck` holds, or it drains without a time limit. Then its
    runs may take long, as those of a demoted worker, which gets only idle cores.
    """
    drains_without_limit = worker.drain is not None and worker.drain.until is None
    return drains_without_limit or shared_runs.is_stuck(cycle, worker)


def cores_in_use(cycle: Cycle) -> int:
    """The cores that count for a further worker: those of all workers under the policies that reserve cores, otherwise
    those of the operations in progress.
    """
    resources = cycle.resources
    return resources.reserved.taken if cycle.policy.reserves else resources.load.taken


def _next_step(cycle: Cycle, function: Function, workers: Sequence[Worker]) -> Step:
    slo_ms, latency, requests = function.spec.settings.slo_ms, function.family.latency, cycle.state.requests
    if slo_ms is None or (latency.run_s is None and not latency.points):
        return batching.at_once(
            len(function.queue) + shared_runs.count_joining(cycle, function, workers, 0.0, inf), workers
        )
    first = requests[function.queue[0]].arrived
    if len(function.queue) > 1:
        # A request with a priority may have arrived after those behind it.
        next_ones = islice(function.queue, max(worker.point.batch for worker in workers))
        first = min(requests[id_].arrived for id_ in next_ones)
    waited_s, slo_s = cycle.now - first, slo_ms / 1000
    joined = shared_runs.count_joining(cycle, function, workers, waited_s, slo_s)
    waiting = batching.Waiting(
        count=len(function.queue) + joined,
        waited_s=waited_s,
        slo_s=slo_s,
        latency=(
            partial(shared_runs.expected_shared_run_s, cycle, function)
            if joined
            else lambda worker, count: latency.latency_s(worker.point, count) or 0.0
        ),
        keeps_up=keeps_up(cycle, function),
    )
    return batching.checked(cycle.batching(waiting, workers), workers)

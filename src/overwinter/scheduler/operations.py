"""Begins and ends the operations of workers, in all tables that record them.

A start, a bind and a run each have an id, an owner in the ledger, and a time after which they are overdue (binding.py
begins and ends binds). An event that answers an operation that has ended changes nothing.
"""

from heapq import heapify, heappush
from math import inf

from overwinter.core.actions import Run, StartWorker, StopWorker
from overwinter.core.ids import RunId, Seconds, WorkerId
from overwinter.core.profile import Point
from overwinter.scheduler import families
from overwinter.scheduler.answers import forget_tenant
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.operation import Operation, Part, run_limit_s
from overwinter.scheduler.policies import keepalive
from overwinter.scheduler.policies.worker_eviction import counted
from overwinter.scheduler.policy_failures import expected_s, shared_run_s
from overwinter.scheduler.resources import OperationOwner, bind_owner, run_owner, start_owner, worker_owner
from overwinter.scheduler.state import Binding, Drain, Function, Worker

OVERDUE = 4.0
"""The multiple of the expected time after which an operation is overdue, and no longer holds its cores."""
OVERDUE_LEAST_S = 0.2
"""No run is overdue sooner."""
UNKNOWN_S = 1.0
"""The time after which an operation of unknown duration is overdue. No start of a worker or an executor, and no bind,
is overdue sooner.
"""
TIME_SLICE_WAKES = 10
"""The time slice of a worker when others wait for capacity, in wakes of its function, so that changes of workers take
a small part of the time.
"""
USE_SMOOTHING = 0.2
ENDED_MAX = 16
"""The ended time slices of a tenant are removed when there are about this many more of them than it has workers."""


# Starts


def time_slice_s(function: Function) -> float:
    """How long a worker of the function may stay when others wait for capacity."""
    return TIME_SLICE_WAKES * function.latency.wake_s


def begin_start(cycle: Cycle, function: Function, point: Point, ahead: WorkerId | None = None) -> None:
    """Fork a worker, or use a process that was forked ahead."""
    state, now, spec = cycle.state, cycle.now, function.spec
    id_ = cycle.last_worker = WorkerId(cycle.last_worker + 1)
    wake_s, hangs_at = function.latency.wake_s, now + cycle.config.start_timeout_s
    operation = Operation(function, now, now + wake_s, now + max(UNKNOWN_S, OVERDUE * wake_s), hangs_at)
    bound = {spec.id: Binding(function)}
    worker = Worker(id_, spec.id, function.family, spec.tenant, point, now, bound, start=operation)
    state.workers[id_] = function.workers[id_] = function.family.workers[id_] = worker
    state.tenants[spec.tenant].starting[id_] = worker
    cycle.ledger.take(worker_owner(id_), spec.tenant, cycle.resources.of_worker(point, worker.nbytes))
    hold_cores(cycle, function, start_owner(id_), operation, 1, serves=not function.wants_wake)
    if function.blocks_usable_from is None:
        function.blocks_usable_from = now
    # The function is in use again, so its blocks are not evicted at once. If its time slice in the host store is over,
    # it may be drained for functions that wait for bytes.
    state.evictable.pop(spec.id, None)
    cycle.bytes_changed = True
    cycle.timers.arm(id_, hangs_at)
    if len(function.family.members) > 1:
        # Functions of its family that wait for a new worker may not need one.
        families.mark(cycle, function.family)
    prepared = state.prepared.get(spec.tenant, {})
    if spec.program in prepared:
        del prepared[spec.program]
        prepared[spec.program] = None
    # A program that has run before needs no run on zeros. Runs in workers of other tenants do not count.
    warm_up = function.on_trial and not state.proven[spec.tenant, spec.program]
    cycle.actions.append(StartWorker(id_, spec.id, warm_up, point.cores, point.concurrency, ahead))


def end_start(cycle: Cycle, worker: Worker) -> None:
    """End the start of a worker that is ready, stopped or dead."""
    if worker.start is not None:
        worker.start = None
        del cycle.state.tenants[worker.tenant].starting[worker.id]
        end(cycle, start_owner(worker.id))


# Runs


def begin_run(cycle: Cycle, worker: Worker, parts: tuple[Part, ...]) -> None:
    """Send requests to a worker, those of the leading function first (shared_runs.py). Sets when the run is overdue."""
    now, function = cycle.now, parts[0].function
    for part in parts:
        part.function.runs += 1
        record_use(cycle, part.function)
        worker.bound[part.function.spec.id].runs += 1
    set_to_work(cycle, worker)
    slots_changed(cycle, worker)
    run = RunId(next(cycle.run_ids))
    if len(parts) == 1:
        expected = expected_s(cycle.state, function, worker.point, len(parts[0].requests))
    else:
        expected = shared_run_s(cycle.state, function, worker.point, [len(part.requests) for part in parts])
    overdue_s = UNKNOWN_S if expected is None else max(OVERDUE_LEAST_S, OVERDUE * expected)
    ends = now + (expected or 0.0)
    hangs_at = now + run_limit_s(parts, overdue_s)
    operation = worker.runs[run] = Operation(function, now, ends, now + overdue_s, hangs_at, parts)
    hold_cores(cycle, function, run_owner(run), operation, worker.point.run_cores)
    cycle.timers.arm(worker.id, hangs_at)
    function_id = None if function.spec.id == worker.function else function.spec.id
    of_each = tuple(part.function.spec.id for part in parts for _ in part.requests) if len(parts) > 1 else ()
    cycle.actions.append(Run(worker.id, run, operation.requests, function_id, of_each))


def end_run(cycle: Cycle, worker: Worker, run: RunId) -> Operation:
    """End a run that was answered or given up."""
    end(cycle, run_owner(run))
    operation = worker.runs.pop(run)
    if operation.overdue_at <= cycle.now:
        # A worker with an overdue run is not drained for others if they already wait for the end of such a run.
        cycle.capacity_changed = True
    for part in operation.parts:
        worker.bound[part.function.spec.id].runs -= 1
    return operation


def set_to_work(cycle: Cycle, worker: Worker) -> None:
    """Prepare an idle worker for an operation."""
    if worker.is_idle:
        worker.since = cycle.now
        cycle.state.tenants[worker.tenant].spare.pop(worker.id, None)
        cycle.capacity_changed = True


def slots_changed(cycle: Cycle, worker: Worker) -> None:
    """Have the queues for cores and capacity served again, because a worker's free slots have changed. Other functions
    of its family may wait in these queues.
    """
    if len(worker.family.members) > 1:
        cycle.cores_changed = cycle.capacity_changed = True


def record_use(cycle: Cycle, function: Function) -> None:
    """Record that a run of the function begins."""
    gap = cycle.now - function.used_at
    if cycle.policy.keep_alive == "history" or function.pool is not None:
        keepalive.remember(function.gaps, gap)
    function.use_interval_s += USE_SMOOTHING * (gap - function.use_interval_s)
    family = function.family
    family.uses = counted(family.uses, cycle.now - family.used_at)
    function.used_at = family.used_at = cycle.now
    if function.pool is not None:
        cycle.state.pool.record_use(function)


def smoothed(before: float | None, seconds: float) -> float:
    """A mean that weights recent values most; the first value is taken unchanged."""
    return before + USE_SMOOTHING * (seconds - before) if before else seconds


# Ends of workers


def drain(cycle: Cycle, worker: Worker, why: str, until: Seconds | None = None) -> None:
    """Give a worker no more work, and stop it when its operations have ended, or at `until`. Functions of its family
    that wait for one of its slots may need another worker now.
    """
    if worker.stopping:
        return
    if worker.drain is None or worker.drain.until is None:
        worker.drain = Drain(why, until)
    draining = cycle.state.tenants[worker.tenant].draining_without_limit
    cycle.capacity_changed = True
    slots_changed(cycle, worker)
    if worker.is_idle:
        stop(cycle, worker)
        return
    families.mark(cycle, worker.family)
    if worker.drain.until is None:
        draining[worker.id] = worker
    else:
        draining.pop(worker.id, None)
        cycle.ledger.drain(worker_owner(worker.id))
        cycle.timers.arm(worker.id, worker.drain.until)


def begin_time_slice(cycle: Cycle, worker: Worker, function: Function) -> None:
    """Let a worker that is ready stay for a time slice when others wait for capacity."""
    ends, workers = cycle.state.tenants[worker.tenant].time_slice_ends, cycle.state.workers
    if len(ends) >= 2 * cycle.resources.workers.of(worker.tenant) + ENDED_MAX:
        ends[:] = [each for each in ends if (known := workers.get(each[1])) is not None and known.is_serving]
        heapify(ends)
    heappush(ends, (cycle.now + time_slice_s(function), worker.id))
    cycle.capacity_changed = True


def stop(cycle: Cycle, worker: Worker, kill: bool = False) -> None:
    """Stop a worker's process; its exit will be reported."""
    worker.stopping, worker.since = True, cycle.now
    # Its function may become idle, so that its blocks can be evicted sooner.
    cycle.bytes_changed = True
    end_start(cycle, worker)
    for owner in _owners_in_progress(worker):
        _free_cores(cycle, owner)
    owner = worker_owner(worker.id)
    cycle.ledger.drain(owner)
    cycle.ledger.change(owner, cycle.resources.reserved, 0)
    _leave_tenant(cycle, worker)
    # A worker that does not react is killed.
    cycle.timers.disarm(worker.id)
    cycle.timers.arm(worker.id, cycle.now + cycle.config.stop_timeout_s)
    watch_deadlines(cycle, worker)
    mark_all(cycle, worker)
    cycle.actions.append(StopWorker(worker.id, kill))


def end_worker(cycle: Cycle, worker: Worker) -> None:
    """Remove a worker whose process has ended; its runs stay in its table, so that their requests can be retried."""
    end_start(cycle, worker)
    for owner in _owners_in_progress(worker):
        end(cycle, owner)
    cycle.ledger.release(worker_owner(worker.id))
    _leave_tenant(cycle, worker)
    del cycle.state.workers[worker.id], worker.family.workers[worker.id]
    for binding in worker.bound.values():
        del binding.function.workers[worker.id]
    cycle.timers.disarm(worker.id)
    forget_tenant(cycle, worker.tenant)


def watch_deadlines(cycle: Cycle, worker: Worker) -> None:
    """Set the timer of a worker to the first deadline of the requests of removed functions that it runs."""
    requests = cycle.state.requests
    parts = (part for run in worker.runs.values() for part in run.parts if part.function.removed)
    requested = [id_ for part in parts for id_ in part.requests]
    deadlines = [requests[id_].deadline for id_ in requested if id_ in requests]
    if deadlines:
        cycle.timers.arm(worker.id, min(deadlines))


def mark_all(cycle: Cycle, worker: Worker) -> None:
    """Mark all functions of a worker that gets no more work, and the functions that wait for it."""
    for binding in worker.bound.values():
        cycle.mark(binding.function)
    families.mark(cycle, worker.family)


def _owners_in_progress(worker: Worker) -> list[OperationOwner]:
    """Return its runs and binds, by their owners in the ledger."""
    binds = [bind_owner(bind.id) for bind in worker.binds.values() if bind.id is not None]
    return [*(run_owner(run) for run in worker.runs), *binds]


def _leave_tenant(cycle: Cycle, worker: Worker) -> None:
    tenant = cycle.state.tenants[worker.tenant]
    tenant.spare.pop(worker.id, None)
    tenant.draining_without_limit.pop(worker.id, None)
    cycle.capacity_changed = True


def count_bytes(cycle: Cycle, worker: Worker) -> None:
    """Update the ledger with the memory of a worker."""
    cycle.ledger.change(worker_owner(worker.id), cycle.resources.memory, worker.nbytes)
    cycle.capacity_changed = True


# Cores


def end_overdue(cycle: Cycle) -> None:
    """Release the cores of overdue operations."""
    for owner, operation in list(cycle.state.holding_cores.items()):
        if operation.overdue_at <= cycle.now:
            _free_cores(cycle, owner)
    watch_overdue(cycle)


def watch_overdue(cycle: Cycle) -> None:
    """Set a timer for the next overdue operation: its cores are released then at the latest."""
    at = min((operation.overdue_at for operation in cycle.state.holding_cores.values()), default=inf)
    if at < inf:
        cycle.timers.arm("cores", at)


def hold_cores(
    cycle: Cycle, function: Function, owner: OperationOwner, operation: Operation, cores: int, serves: bool = True
) -> None:
    """Claim cores for an operation. Where operations wait for cores (`orders_cores`), it also holds them, unless its
    function has a handler: user code may wait for something other than a core. `serves`: whether it serves a request. A
    trial or a load does not wait for a core, so it does not hold any either.
    """
    holds = cycle.orders_cores and serves and not function.spec.has_handler
    cycle.ledger.take(owner, None, cycle.resources.of_cores(cores, holds))
    if holds:
        state = cycle.state
        state.holding_cores[owner] = operation
        if state.core_queue.waits:
            cycle.timers.arm("cores", operation.overdue_at)


def _free_cores(cycle: Cycle, owner: OperationOwner) -> None:
    if cycle.state.holding_cores.pop(owner, None) is not None:
        cycle.ledger.change(owner, cycle.resources.cores, 0)
        cycle.cores_changed = True


def end(cycle: Cycle, owner: OperationOwner) -> None:
    """An operation ended: release its claim."""
    cycle.ledger.release(owner)
    if cycle.state.holding_cores.pop(owner, None) is not None:
        cycle.cores_changed = True

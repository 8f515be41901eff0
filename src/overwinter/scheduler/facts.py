"""Applies events to the tables, each in one Python function: ends the operations that they name, and sends replies.

No waiting request gets a resource here, except that a load that found no space is tried once more. Functions whose
wants may have changed are marked; admission.py asks for these wants.
"""

from collections.abc import Mapping
from typing import assert_never

import msgspec

from overwinter.core.actions import Prepare, Reply
from overwinter.core.errors import no_function
from overwinter.core.events import (
    Alarm,
    Arrived,
    BindFailed,
    BlocksLoaded,
    Bound,
    Cancelled,
    Demoted,
    Deployed,
    Event,
    HostCapacityMeasured,
    LoadAsked,
    LoadFailed,
    MemoryMeasured,
    MemoryPressure,
    PreparedOnDevice,
    Profiled,
    RateForecast,
    Removed,
    RunEnded,
    RunFailure,
    TrafficSet,
    UnloadAsked,
    WorkerExited,
    WorkerReady,
    ZygoteLost,
)
from overwinter.core.ids import RequestId, Seconds, TenantId, WorkerId, function_id, is_part
from overwinter.scheduler import (
    ahead,
    any_device,
    counterpart,
    device_ahead,
    executors,
    families,
    functions,
    memory,
    replicas,
    shared_runs,
    worker_exits,
)
from overwinter.scheduler.answers import close_request, open_request, refuse, why_unloaded
from overwinter.scheduler.binding import end_bind, forget, observe, record_bind, unbind_if_done
from overwinter.scheduler.blocks import begin_load, drop_unused, end_load, lose, missing_bytes, release
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.operation import Part
from overwinter.scheduler.operations import begin_time_slice, drain, end_run, end_start, smoothed, stop
from overwinter.scheduler.policies import queueing
from overwinter.scheduler.policy_failures import call_policy
from overwinter.scheduler.request import Request
from overwinter.scheduler.retention import evict_for
from overwinter.scheduler.sizing import count_arrival
from overwinter.scheduler.state import Function, Worker
from overwinter.scheduler.victims import evictable_bytes


def apply(cycle: Cycle, event: Event) -> None:  # noqa: C901, PLR0912, PLR0915
    """Update the tables for an event."""
    match event:
        case Arrived():
            _arrived(cycle, event)
        case RunEnded():
            _run_ended(cycle, event)
        case PreparedOnDevice():
            device_ahead.prepared(cycle, event)
        case Alarm():
            # due.py handles everything that is due.
            pass
        case WorkerReady(worker):
            ahead.ready(cycle, worker)
            executors.ready(cycle, worker)
            _worker_ready(cycle, worker)
        case Bound():
            _bound(cycle, event)
        case BindFailed():
            _bind_failed(cycle, event)
        case WorkerExited():
            if event.worker in cycle.state.pool.executors:
                executors.exited(cycle, event)
            elif not ahead.exited(cycle, event):
                worker_exits.worker_exited(cycle, event)
        case Cancelled(request):
            _cancelled(cycle, request)
        case BlocksLoaded():
            _loaded(cycle, event)
        case LoadFailed():
            _load_failed(cycle, event)
        case Deployed():
            cycle.current = event.function.id
            functions.deploy(cycle, event)
        case Removed(id_):
            functions.remove(cycle, id_)
        case TrafficSet(name, shares):
            if name in cycle.state.versions:
                cycle.state.versions[name].split(shares)
        case LoadAsked(id_):
            functions.load(cycle, id_)
        case UnloadAsked(id_):
            functions.unload(cycle, id_)
        case Demoted(worker):
            _demoted(cycle, worker)
        case ZygoteLost(tenant):
            _zygote_lost(cycle, tenant)
        case Profiled():
            _profiled(cycle, event)
        case RateForecast(id_, rate):
            replicas.forecast(cycle, id_, rate)
        case MemoryPressure(nbytes):
            memory.release(cycle, nbytes)
        case MemoryMeasured():
            memory.measured(cycle, event)
        case HostCapacityMeasured(nbytes):
            cycle.resources.host.capacity, cycle.bytes_changed = nbytes, True
        case _:
            assert_never(event)


# Requests


def _arrived(cycle: Cycle, event: Arrived) -> None:
    named = _named(cycle, event)
    if named is None:
        return
    is_any_device = named.spec.settings.device == "any"
    if is_any_device and named.pool is not None and not any_device.takes_call(cycle, named, event.caller):
        refuse(cycle, event.request, *counterpart.RUN_BY_WORKER, function=named.spec.id)
        return
    function, named_id = any_device.choose(cycle, named) if is_any_device else named, named.spec.id
    cycle.current, spec, now = function.spec.id, function.spec, cycle.now
    if function.unloaded:
        refuse(cycle, event.request, *why_unloaded(function), cycle.config.retry_after_min_s, named_id)
        return
    count_arrival(cycle, function)
    replicas.watch(cycle, function)
    # A part runs for accepted requests, and each run of a handler makes one call at a time, so its queue has no limit.
    queued = counterpart.queued(cycle.state, function) if is_any_device or spec.following else len(function.queue)
    full = None if is_part(event.name) else queueing.why_full(function, queued, cycle.resources.requests)
    if full is not None:
        wait_s = counterpart.retry_after_s(cycle, function)
        refuse(cycle, event.request, "OverloadedError", full, wait_s, named_id)
        return
    limit = Seconds(now + spec.settings.timeout_s)
    deadline = limit if event.deadline is None else min(event.deadline, limit)
    due = families.due_at(spec, now) if event.due is None else event.due
    request = Request(event.request, named_id, spec.tenant, now, deadline, queueing.level(event.priority), due)
    request.part, request.caller = None if function is named else spec.id, event.caller
    if not function.is_ready:
        request.start = "host"
    open_request(cycle, request)
    queueing.insert(function.queue, request, cycle.state.requests)
    cycle.timers.arm(spec.id, deadline)
    cycle.mark(function)
    shared_runs.queue_changed(cycle, function)


def _named(cycle: Cycle, event: Arrived) -> Function | None:
    """Return the named function; None after refusing the request."""
    versions, version = cycle.state.versions.get(event.name), event.version
    if version is None and versions is not None:
        version = versions.choose()
    function = None if version is None else cycle.state.functions.get(function_id(event.name, version))
    if function is None:
        name = event.name if event.version is None else function_id(event.name, event.version)
        error = no_function(name, () if versions is None else versions.numbers)
        refuse(cycle, event.request, "NotFoundError", str(error))
    return function


def _cancelled(cycle: Cycle, id_: RequestId) -> None:
    request = close_request(cycle, id_)
    function = None if request is None else cycle.state.functions.get(request.holder)
    if function is not None and queueing.remove(function.queue, id_):
        cycle.mark(function)
        shared_runs.queue_changed(cycle, function)


def _run_ended(cycle: Cycle, event: RunEnded) -> None:
    worker = cycle.state.workers.get(event.worker)
    if worker is None or event.run not in worker.runs:
        executors.run_ended(cycle, event)
        return
    run = end_run(cycle, worker, event.run)
    cycle.current = run.function.spec.id
    failures = {failure.request: failure for failure in event.failures} if event.failures else {}
    for part in run.parts:
        _answer(cycle, part, failures)
    if worker.is_idle:
        worker.since = cycle.now
    served: list[Function] = []
    for part in run.parts:
        function = part.function
        binding = worker.bound[function.spec.id]
        if binding.draining:
            unbind_if_done(cycle, worker, binding)
        _follow_up(cycle, worker, function)
        if not function.removed:
            function.failures = 0
            served.append(function)
    if served:
        function, spent_s = served[0], cycle.now - run.began
        counts, trunk = [len(part.requests) for part in run.parts], function.family.trunks[function.trunk]
        # After a failure the run was repeated for each function, so its time says nothing about a shared run.
        if len(counts) > 1 and failures:
            trunk.sharing.count(several=True)
        elif not run.called_pool:
            call_policy(
                cycle.state, function, None, function.family.latency.observe, worker.point, counts, spent_s, trunk
            )
        function.family.latency.observe_program(event.program_s)
        _prepare(cycle, function, spent_s)
    families.mark(cycle, worker.family, *served)


def _answer(cycle: Cycle, part: Part, failures: Mapping[RequestId, RunFailure]) -> None:
    """Answer the requests of one function in a run."""
    for id_ in part.requests:
        request, failure = close_request(cycle, id_), failures.get(id_)
        if request is None:
            continue
        if failure is None:
            cycle.actions.append(Reply(id_, request.function, request.start))
        else:
            refuse(cycle, id_, failure.error, failure.message, function=request.function)


def _prepare(cycle: Cycle, function: Function, spent_s: float) -> None:
    """Let the tenant's zygote compile a program that has run, unless the run took too long."""
    spec, config = function.spec, cycle.config
    prepared = cycle.state.prepared.get(spec.tenant, {})
    if spec.program in prepared or spent_s > config.warm_up_max_s:
        return
    cycle.state.prepared[spec.tenant] = prepared
    oldest = next(iter(prepared)) if len(prepared) >= config.prepared_max else None
    if oldest is not None:
        del prepared[oldest]
    prepared[spec.program] = None
    cycle.actions.append(Prepare(spec.id, oldest))
    ahead.set_check(cycle, cycle.now + ahead.REFILL_S)


# Workers


def _worker_ready(cycle: Cycle, id_: WorkerId) -> None:
    worker = cycle.state.workers.get(id_)
    if worker is None or worker.start is None:
        return
    function, family = worker.start.function, worker.family
    family.start_s = smoothed(family.start_s, cycle.now - worker.start.began)
    end_start(cycle, worker)
    worker.since = worker.ready_at = cycle.now
    cycle.current, function.lost_blocks = function.spec.id, False
    if worker.drain is None:
        begin_time_slice(cycle, worker, function)
    if function.on_trial or (function.awaited and function.is_ready):
        functions.prove(cycle, function)
    # The core of its start is still reserved, unless the start was overdue and lost it.
    cycle.mark(function, has_core=worker.point.run_cores == 1 and cycle.resources.cores.fits(1))
    _follow_up(cycle, worker, function)
    _mark_others(cycle, worker, function)


def _bound(cycle: Cycle, event: Bound) -> None:
    worker = cycle.state.workers.get(event.worker)
    began = None if worker is None or (bind := worker.binds.get(event.function)) is None else bind.began
    binding = None if worker is None else end_bind(cycle, worker, event.function, event.operation)
    if worker is None or binding is None or began is None:
        return
    function = binding.function
    observe(function, cycle.now - began)
    function.lost_blocks = False
    if binding.draining or function.removed:
        unbind_if_done(cycle, worker, binding)
    else:
        cycle.current = function.spec.id
        if function.is_ready:
            record_bind(cycle, function)
            if function.awaited:
                functions.prove(cycle, function)
        cycle.mark(function, has_core=worker.point.run_cores == 1 and cycle.resources.cores.fits(1))
    _follow_up(cycle, worker, function)
    _mark_others(cycle, worker, function)


def _bind_failed(cycle: Cycle, event: BindFailed) -> None:
    """Record a failed bind. Lost blocks are loaded again. The worker gets no further bind of the function, unless
    the bind failed because blocks were lost, and this was the first time in a row.
    """
    worker = cycle.state.workers.get(event.worker)
    binding = None if worker is None else end_bind(cycle, worker, event.function, event.operation)
    if worker is None or binding is None:
        return
    function = binding.function
    forget(worker, function)
    if not event.lost_blocks or lose(cycle, function):
        worker.failed_binds.add(event.function)
    if not function.removed:
        cycle.current = function.spec.id
        cycle.mark(function)
    _follow_up(cycle, worker, function)
    _mark_others(cycle, worker, function)


def _follow_up(cycle: Cycle, worker: Worker, function: Function) -> None:
    """After an operation of a function that has left the worker or family: stop the worker if it is idle, and it drains
    or all its functions were removed; otherwise mark the first member of its family, unless the function has left only
    the worker.
    """
    if not function.removed and function.family is worker.family and function.spec.id in worker.bound:
        return
    if worker.is_idle and (worker.is_orphaned or worker.drain is not None):
        stop(cycle, worker)
    elif (function.removed or function.family is not worker.family) and worker.family.members:
        cycle.mark(worker.family.first_member)


def _mark_others(cycle: Cycle, worker: Worker, function: Function) -> None:
    """Mark the other waiting functions of the family, after the one whose start or bind has ended."""
    family, id_ = worker.family, function.spec.id
    if any(other != id_ for other in (*family.waiting, *family.waking)):
        families.mark(cycle, family)


def _demoted(cycle: Cycle, id_: WorkerId) -> None:
    """Drain a worker that gets only idle cores: its runs may end, however late; waiting requests go to others."""
    worker = cycle.state.workers.get(id_)
    if worker is not None and worker.drain is None:
        drain(cycle, worker, "it used more processor time than its runs may")


def _zygote_lost(cycle: Cycle, tenant: TenantId | None) -> None:
    if tenant is None:
        cycle.state.prepared.clear()
    else:
        cycle.state.prepared.pop(tenant, None)
    cycle.ahead_due = True


# Blocks


def _loaded(cycle: Cycle, event: BlocksLoaded) -> None:
    function = cycle.state.functions.get(event.function)
    if function is None or function.loading != event.operation:
        # The function was removed or unloaded meanwhile: the blocks that no function holds now are not needed.
        drop_unused(cycle, event.addresses, event.store)
        return
    end_load(function, cycle.now)
    device_ahead.blocks_loaded(cycle, function)
    if function.pool is not None and function.wants_wake:
        functions.prove(cycle, function)
    cycle.bytes_changed = True
    if event.added:
        for request in function.queue:
            cycle.state.requests[request].start = "disk"
    cycle.mark(function)


def _load_failed(cycle: Cycle, event: LoadFailed) -> None:
    function = cycle.state.functions.get(event.function)
    if function is None or function.loading != event.operation:
        drop_unused(cycle, event.addresses, event.store)
        return
    release(cycle, function)
    missing, is_full = missing_bytes(cycle, function), event.error == "NoSpaceError" and not function.load_again
    may_do = is_full and missing <= evictable_bytes(cycle, function)
    function.load_again = may_do and evict_for(cycle, missing, function)
    if function.load_again:
        # The tmpfs is fuller than the tables say, but the evicted bytes may suffice.
        begin_load(cycle, function)
        return
    counterpart.refuse_waiting(cycle, function, event.error, event.message, cycle.config.retry_after_min_s)
    functions.fail(cycle, function, event.error, event.message)


def _profiled(cycle: Cycle, event: Profiled) -> None:
    function = cycle.state.functions.get(event.function)
    if function is not None:
        function.spec = msgspec.structs.replace(function.spec, profile=event.profile)
        families.use_profile(cycle, function.family, function.spec)
        function.point_to_start, cycle.capacity_changed = None, True
        cycle.mark(function)

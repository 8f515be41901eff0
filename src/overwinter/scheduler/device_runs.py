"""Begins and ends the runs on devices.

A run brings the blocks that its device misses. If they do not fit, functions are evicted from the device, one after the
other, which copies nothing: the host store has their blocks. If the free memory suffices but is not contiguous, the
executor reports that nothing ran; the next attempt there evicts at least one function more.
"""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from overwinter.core.actions import Reply, RunOnDevice
from overwinter.core.errors import ActivationsError
from overwinter.core.events import RunEnded, RunFailure
from overwinter.core.ids import FunctionId, RequestId, RunId, Seconds
from overwinter.scheduler import counterpart, device_sharing, fixed_devices, residency, shared_runs, swaps
from overwinter.scheduler.ahead import KEEP_S
from overwinter.scheduler.answers import close_request, expire, refuse, refuse_unloaded, why_unloaded
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.device_order import correct_run, count_answer, count_run
from overwinter.scheduler.families import has_slo
from overwinter.scheduler.limits import why_never_runs
from overwinter.scheduler.operation import Operation, Part, run_limit_s
from overwinter.scheduler.operations import OVERDUE, OVERDUE_LEAST_S, UNKNOWN_S, record_use
from overwinter.scheduler.policies import queueing
from overwinter.scheduler.policies.device_binding import Choice, is_heavy
from overwinter.scheduler.pool import UNPLACED_SWAPS, Device, Executor, LastBinding, Unplaced, pool_record
from overwinter.scheduler.request import Request
from overwinter.scheduler.resources import run_owner
from overwinter.scheduler.state import Function

REFERENCES_MAX = 1 << 16
"""The most references from functions to blocks on a device; a shared block counts for each of its functions. This
bounds the time of a step, which may evict all of them.
"""
INTERRUPTED_S = 1.0
"""How long a preparation may go on when a run is ordered; the longest operator that is usual ends within that time."""


def begin_run(cycle: Cycle, function: Function, device: Device, choice: Choice, last: LastBinding) -> None:
    """Send the function's first requests to a device with an idle executor, with requests of functions that join."""
    executor, now = device.executor, cycle.now
    assert executor is not None
    assert executor.is_idle
    parts = _take(cycle, function, device, choice)
    if not parts:
        return
    function = parts[0].function
    evicted = _evict_for_references(cycle, [part.function for part in parts], device)
    evicted += _evict_for_run(cycle, function, device)
    sizes = {address: nbytes for part in parts for address, nbytes in pool_record(part.function).sizes.items()}
    missing = device.blocks.missing(sizes)
    device.swap_s, host_s = swaps.swap_times(cycle, sizes, device, choice.peer)
    execution_s = device_sharing.expected_s(cycle, function, [len(part.requests) for part in parts])
    device.swaps_until, device.swaps_heavy = now + host_s, is_heavy(host_s, execution_s)
    expected = max(execution_s, device.swap_s)
    overdue_s = max(OVERDUE_LEAST_S, OVERDUE * expected) if execution_s else UNKNOWN_S
    run = executor.run = RunId(next(cycle.run_ids))
    operation = Operation(function, now, now + expected, now + overdue_s, now + run_limit_s(parts, overdue_s), parts)
    executor.operation, executor.since = operation, now
    count_run(cycle, function, expected)
    binding = LastBinding(last.device, missing, last.swap_wait_s, choice.peer, last.free, evicted)
    for part in parts:
        _begin_part(cycle, part.function, device, binding)
    cycle.bytes_changed = True
    name = device.config.name
    cycle.ledger.take(run_owner(run), None, {cycle.resources.device_time[name]: 1})
    cycle.timers.arm(executor.id, operation.hangs_at)
    limit_preparation(cycle, executor)
    for id_ in operation.requests:
        request = cycle.state.requests[id_]
        if request.start != "disk":
            request.start = "host" if missing else "warm"
    peer = choice.peer if missing else None
    functions = tuple(part.function.spec.id for part in parts for _ in part.requests) if len(parts) > 1 else ()
    order = RunOnDevice(executor.id, name, run, function.spec.id, operation.requests, missing, evicted, peer, functions)
    cycle.actions.append(order)


def bring(cycle: Cycle, function: Function, device: Device, choice: Choice, others: Sequence[Function]) -> None:
    """Bring a function's blocks to a device with an idle executor, without a request. `others`: what may be evicted to
    free bytes.
    """
    executor, now, name = device.executor, cycle.now, device.config.name
    assert executor is not None
    assert executor.is_idle
    evicted = _evict_for_references(cycle, [function], device)
    evicted += _evict_for_run(cycle, function, device, iter(others))
    sizes, pooled = pool_record(function).sizes, pool_record(function)
    missing, is_prepared = device.missing_bytes(pooled), function.spec.program in executor.handed_over.values()
    device.swap_s, host_s = swaps.swap_times(cycle, sizes, device, choice.peer)
    device.swaps_until, device.swaps_heavy = now + host_s, True
    ends, hangs_at = now + device.swap_s, now + max(cycle.config.start_timeout_s, OVERDUE * device.swap_s)
    run = executor.run = RunId(next(cycle.run_ids))
    executor.operation, executor.since = Operation(function, now, ends, hangs_at, hangs_at), now
    residency.hold(cycle, device, function)
    if not is_prepared:
        executor.handed_over[function.spec.id] = None
    pooled.running += 1
    cycle.state.evictable.pop(function.spec.id, None)
    cycle.ledger.take(run_owner(run), None, {cycle.resources.device_time[name]: 1})
    cycle.timers.arm(executor.id, hangs_at)
    limit_preparation(cycle, executor)
    cycle.actions.append(RunOnDevice(executor.id, name, run, function.spec.id, (), missing, evicted, choice.peer))


def limit_preparation(cycle: Cycle, executor: Executor) -> None:
    """Shorten the time after which an executor's preparation counts as hung, because a run was ordered from it."""
    if executor.preparing is not None:
        hangs_at = min(executor.preparing.hangs_at, cycle.now + INTERRUPTED_S)
        since = min(executor.preparing.delays_since, cycle.now)
        executor.preparing = msgspec.structs.replace(executor.preparing, hangs_at=hangs_at, delays_since=since)
        cycle.timers.arm(executor.id, hangs_at)


def _begin_part(cycle: Cycle, function: Function, device: Device, last: LastBinding) -> None:
    """A run begins with requests of this function."""
    pooled = pool_record(function)
    residency.hold(cycle, device, function)
    function.runs += 1
    pooled.running += 1
    pooled.last_binding = last
    if function.used_at + KEEP_S <= cycle.now:
        # Devices may prepare it again.
        cycle.state.pool.look_for_preparations()
    record_use(cycle, function)
    if function.blocks_usable_from is None:
        function.blocks_usable_from = cycle.now


def _take(cycle: Cycle, function: Function, device: Device, choice: Choice) -> tuple[Part, ...]:
    """Take the requests of a run from the queues: as many as together are answered by the due time of the first one, or
    up to `max_batch` if that one is late even alone. Requests past their deadline are refused, and those that cannot
    meet their SLO, if the function's settings say so.
    """
    swap_s, _ = swaps.swap_times(cycle, pool_record(function).sizes, device, choice.peer)
    if function.spec.settings.late == "refuse":
        _shed(cycle, function, swap_s)
    others = device_sharing.candidates(cycle, function, device) if function.queue else []
    if others:
        return device_sharing.take(cycle, function, others)
    count = min(len(function.queue), function.spec.settings.max_batch)
    if count > 1:
        due = cycle.state.requests[function.queue[0]].due
        in_time = (each for each in range(count, 0, -1) if _ends(cycle, function, swap_s, each) <= due)
        # If the first request is late anyway, a full batch serves most.
        count = next(in_time, count)
    ids, expired = queueing.take(function.queue, count, cycle.state.requests, cycle.now)
    for id_ in expired:
        expire(cycle, id_)
        count_answer(cycle, function, in_time=False)
    return (Part(function, ids),) if ids else ()


def _ends(cycle: Cycle, function: Function, swap_s: float, count: int) -> float:
    return cycle.now + max(swap_s, swaps.run_s(cycle, function, count))


def _shed(cycle: Cycle, function: Function, swap_s: float) -> None:
    ends, requests, config = _ends(cycle, function, swap_s, 1), cycle.state.requests, cycle.config
    # Without an SLO no request is too late, although it has a due time.
    too_late = [id_ for id_ in function.queue if requests[id_].due < ends and has_slo(function, requests[id_])]
    if len(too_late) == len(function.queue):
        # Where even new requests would be late, only a run can bring the blocks or correct the expected time.
        served = [id_ for id_ in too_late if _would_be_late_if_new(requests[id_], cycle.now, ends)]
        too_late = queueing.without_newest(too_late, served, function.spec.settings.max_batch, requests)
    queueing.remove_all(function.queue, too_late)
    for id_ in too_late:
        slo_ms = function.spec.settings.slo_ms
        slo = "the SLO of its pipeline" if slo_ms is None else f"its SLO of {slo_ms} ms"
        message = f"function {function.spec.id} can no longer answer this request within {slo}"
        refuse(cycle, id_, "OverloadedError", message, config.retry_after_min_s)
        count_answer(cycle, function, in_time=False)


def _would_be_late_if_new(request: Request, now: Seconds, ends: float) -> bool:
    """Whether a request whose due time has not passed would be answered too late even if it had arrived now."""
    return now < request.due < ends - (now - request.arrived)


def _evict_for_run(
    cycle: Cycle, function: Function, device: Device, victims: Iterator[Function] | None = None
) -> tuple[FunctionId, ...]:
    """Evict functions from the device until the function fits, but at least one if its blocks found no places there
    before. `victims`: those that may be evicted, in this order; None: all that `swaps.victims` returns.
    """
    pooled, evicted = pool_record(function), list[FunctionId]()
    capacity = device.capacity(device.missing_bytes(pooled))
    least = 1 if device.config.name in pooled.unplaced else 0
    while len(evicted) < least or device.blocks.nbytes + device.missing_bytes(pooled) > capacity:
        victims = iter(swaps.victims(cycle, function, device)) if victims is None else victims
        victim = next(victims, None)
        if victim is None:
            break
        residency.drop(cycle, device, victim.spec.id)
        evicted.append(victim.spec.id)
    return tuple(evicted)


def _evict_for_references(cycle: Cycle, functions: Sequence[Function], device: Device) -> tuple[FunctionId, ...]:
    """Evict the least recently used other functions until the device can take `functions` within REFERENCES_MAX, unless
    functions are bound to devices (fixed_devices.py).
    """
    evicted: list[FunctionId] = []
    new = sum(len(pool_record(each).sizes) for each in functions if each.spec.id not in device.residents)
    others = iter([] if fixed_devices.are_used(cycle) else list(device.residents.values()))
    while device.blocks.references + new > REFERENCES_MAX and (other := next(others, None)) is not None:
        if other.function not in functions:
            residency.drop(cycle, device, other.function.spec.id)
            evicted.append(other.function.spec.id)
    return tuple(evicted)


def end_operation(cycle: Cycle, device: Device) -> Operation | None:
    """End the run of a device that was answered or given up."""
    executor = device.executor
    if executor is None or executor.operation is None or executor.run is None:
        return None
    operation = executor.operation
    cycle.ledger.release(run_owner(executor.run))
    executor.run, executor.operation, executor.since = None, None, cycle.now
    device.swaps_until = 0.0
    if operation.parts:
        correct_run(cycle, operation)
    for each in operation.functions:
        pool_record(each).running -= 1
    cycle.devices_changed = True
    return operation


def run_ended(cycle: Cycle, event: RunEnded) -> Operation | None:
    """An executor answered a run; return it, or None if no device has it in progress."""
    device = cycle.state.pool.executors.get(event.worker)
    if device is None or device.executor is None or device.executor.run != event.run:
        return None
    operation = end_operation(cycle, device)
    assert operation is not None
    cycle.current = operation.function.spec.id
    draining = [each for each in operation.functions if device.residents[each.spec.id].draining]
    if event.unplaced:
        _unplaced(cycle, device, operation)
    elif not operation.parts:
        operation.function.lost_blocks = False
        _placed(device, event.moved_bytes)
    else:
        if not event.failures:
            device_sharing.observe(cycle, operation.parts, cycle.now - operation.began, device.swap_s)
        _placed(device, event.moved_bytes)
        failures = {failure.request: failure for failure in event.failures}
        if not event.fault:
            device.failures, device.fault = 0, ""
            device.blamed.clear()
        for part in operation.parts:
            pool_record(part.function).unplaced.clear()
            if not event.fault:
                _ran_well(part.function)
            _answer(cycle, part, failures)
    for function in draining:
        residency.unbind(cycle, device, function.spec.id)
    for function in operation.functions:
        cycle.mark(function)
    return operation


def _ran_well(function: Function) -> None:
    function.lost_blocks = False
    if not shared_runs.is_suspect(function):
        function.failures = 0


def _unplaced(cycle: Cycle, device: Device, operation: Operation) -> None:
    """Nothing ran, and the device no longer has the functions of the run. The next attempt has the first one alone."""
    total = device.blocks.nbytes
    for each in operation.functions:
        residency.drop(cycle, device, each.spec.id)
    device.unplaced = Unplaced(total - device.blocks.nbytes, total)
    function = operation.function
    is_alone = len(operation.functions) == 1
    pool_record(function).unplaced[device.config.name] = is_alone and not swaps.victims(cycle, function, device)
    for part in operation.parts:
        put_back(cycle, part)


def _placed(device: Device, moved_bytes: int) -> None:
    """Count a run for which this many bytes were brought: after UNPLACED_SWAPS such runs `device.unplaced` no longer
    limits the bytes on the device.
    """
    if device.unplaced is not None and moved_bytes:
        device.unplaced.swaps += 1
        if device.unplaced.swaps >= UNPLACED_SWAPS:
            device.unplaced = None


def _answer(cycle: Cycle, part: Part, failures: Mapping[RequestId, RunFailure]) -> None:
    function = part.function
    for id_ in part.requests:
        request, failure = cycle.state.requests.get(id_), failures.get(id_)
        if request is None or (failure is not None and _goes_to_worker(cycle, function, request, failure)):
            continue
        if failure is not None:
            refuse(cycle, id_, failure.error, failure.message)
        elif function.spec.following is not None:
            _pass_on(cycle, request, function.spec.following)
        else:
            close_request(cycle, id_)
            cycle.actions.append(Reply(id_, request.function, request.coldest_start))
        count_answer(cycle, function, in_time=failure is None and cycle.now <= request.due)


def _goes_to_worker(cycle: Cycle, function: Function, request: Request, failure: RunFailure) -> bool:
    """Let a worker serve a request that needs more memory than the device has, if the function may run in workers."""
    if function.removed or failure.error != ActivationsError.__name__:
        return False
    other = counterpart.of(cycle.state, function)
    # A backoff ends soon, and no device can serve the request meanwhile.
    if other is None or other.unloaded or other.on_trial or why_never_runs(other):
        return False
    request.too_large = True
    function.queue.append(request.id)
    counterpart.move(cycle, function, other, [request.id])
    return True


def _pass_on(cycle: Cycle, request: Request, id_: FunctionId) -> None:
    """A slice of the program has run for a request, which now waits for the next slice, or is refused if that no longer
    serves.
    """
    following = cycle.state.functions.get(id_)
    if following is None:
        refuse(cycle, request.id, "NotFoundError", f"function {request.function} was removed")
    elif following.unloaded and counterpart.usable(cycle, following) is None:
        refuse(cycle, request.id, *why_unloaded(following), cycle.config.retry_after_min_s)
    else:
        request.part, request.earlier_start = id_, request.coldest_start
        request.start = "warm" if following.is_ready else "host"
        queueing.insert(following.queue, request, cycle.state.requests)
        cycle.timers.arm(id_, request.deadline)
        cycle.mark(following)
        shared_runs.queue_changed(cycle, following)


def put_back(cycle: Cycle, part: Part) -> None:
    """Return the requests of a run to the queue of their function, or refuse them if it no longer serves."""
    function, requests = part.function, cycle.state.requests
    still_open: list[Request] = [requests[id_] for id_ in part.requests if id_ in requests]
    if function.removed:
        for request in still_open:
            refuse(cycle, request.id, "NotFoundError", f"function {function.spec.id} was removed")
        return
    queueing.put_back(function.queue, tuple(request.id for request in still_open), cycle.state.requests)
    if function.unloaded:
        refuse_unloaded(cycle, function)


def expire_if_removed(cycle: Cycle, device: Device) -> None:
    """Refuse the requests of a removed function past their deadlines, which nothing else checks."""
    operation = device.operation
    if operation is None or not any(each.removed for each in operation.functions):
        return
    requests = [each for id_ in operation.requests if (each := cycle.state.requests.get(id_)) is not None]
    for request in requests:
        if request.deadline <= cycle.now:
            expire(cycle, request.id)
    left: list[Seconds] = [each.deadline for each in requests if each.deadline > cycle.now]
    if left and device.executor is not None:
        cycle.timers.arm(device.executor.id, min(left))

"""Starts, stops and replaces the executors of devices, and handles their deaths.

The requests of a run are tried again, up to `attempts_max` attempts, or refused with a clear error. A device whose
executor failed is not used until a backoff is over; after several failures it counts as out of service meanwhile. A
function in whose runs executors die backs off from the second time on, and counts once against a device, so that one
bad function takes neither the devices nor the other functions out of service.
"""

from math import inf

from overwinter.core.actions import StartExecutor, StopWorker
from overwinter.core.events import RunEnded, WorkerExited
from overwinter.core.ids import Seconds, WorkerId
from overwinter.scheduler import device_ahead, device_runs, functions, residency
from overwinter.scheduler.answers import refuse, why_unloaded
from overwinter.scheduler.backoff import backoff_s, may_retry
from overwinter.scheduler.blocks import evict_blocks_of, is_lost_again, release
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.device_order import count_answer
from overwinter.scheduler.device_runs import end_operation, expire_if_removed, put_back
from overwinter.scheduler.operation import Operation, Part, hung_text
from overwinter.scheduler.operations import OVERDUE, UNKNOWN_S, smoothed
from overwinter.scheduler.pool import Device, DeviceOwner, Executor
from overwinter.scheduler.state import Function
from overwinter.scheduler.swaps import owner_of


def start(cycle: Cycle, device: Device, owner: DeviceOwner) -> None:
    """Fork the executor of a device."""
    id_ = cycle.last_worker = WorkerId(cycle.last_worker + 1)
    device.executor, device.next_owner, device.lost_by = Executor(id_, owner, cycle.now), None, None
    cycle.state.pool.executors[id_] = device
    cycle.timers.arm(id_, cycle.now + cycle.config.start_timeout_s)
    cycle.actions.append(StartExecutor(id_, device.config.name, owner[0]))


def overdue_at(cycle: Cycle, executor: Executor) -> float:
    """Return when an executor that starts is overdue: then it may never be ready."""
    return executor.since + max(UNKNOWN_S, OVERDUE * cycle.state.pool.start_s)


def stop(cycle: Cycle, device: Device, kill: bool = False) -> None:
    """Stop an executor without a run; its exit will be reported. One that prepares a function is killed, because it may
    read no message for a long time.
    """
    executor = device.executor
    assert executor is not None
    executor.stopping, executor.since = True, cycle.now
    residency.clear(cycle, device)
    executor.handed_over.clear()
    cycle.timers.arm(executor.id, cycle.now + cycle.config.stop_timeout_s)
    cycle.actions.append(StopWorker(executor.id, kill or executor.preparing is not None))


def ready(cycle: Cycle, id_: WorkerId) -> None:
    """An executor can run requests."""
    device = cycle.state.pool.executors.get(id_)
    executor = None if device is None else device.executor
    if executor is None or executor.stopping or executor.ready_at is not None:
        return
    pool = cycle.state.pool
    pool.start_s = smoothed(pool.start_s, cycle.now - executor.since)
    executor.since = executor.ready_at = cycle.now
    cycle.timers.disarm(id_)
    cycle.devices_changed = True


def run_ended(cycle: Cycle, event: RunEnded) -> None:
    """An executor answered a run, which may be its last."""
    operation = device_runs.run_ended(cycle, event)
    device = cycle.state.pool.executors.get(event.worker)
    if operation is None or device is None or not event.fault:
        return
    stop(cycle, device)
    _failed(cycle, device, owner_of(cycle, operation.function), operation.function, event.fault)
    for part in operation.parts:
        _count_failure(cycle, operation, part.function, "WorkerError", event.fault)
        # Such a run costs all tenants the device for the time of a start: good runs in between do not clear the count.
        part.function.runs_at_death = part.function.runs


def exited(cycle: Cycle, event: WorkerExited) -> None:
    """An executor ended, whether it was asked to or not."""
    device = cycle.state.pool.executors.pop(event.worker)
    executor, operation = device.executor, end_operation(cycle, device)
    assert executor is not None
    cycle.timers.disarm(event.worker)
    residency.clear(cycle, device)
    device.executor, cycle.devices_changed = None, True
    if device.next_owner is not None and not cycle.state.pool.waiting.count(*device.next_owner):
        # Those for whom it was stopped have left the queue meanwhile.
        device.next_owner = None
    if executor.stopping:
        return
    preparing = executor.preparing
    if preparing is not None:
        spared = _spare(preparing.function, event)
        if event.lost_blocks:
            _lose_blocks(cycle, preparing.function, operation)
        device_ahead.preparation_failed(cycle, preparing.function, operation, spared)
        return
    if operation is not None and not operation.parts:
        spared = _spare(operation.function, event)
        if event.lost_blocks:
            _lose_blocks(cycle, operation.function, None)
        device_ahead.preparation_failed(cycle, operation.function, None, spared)
        return
    _failed(cycle, device, executor.owner, None if operation is None else operation.function, event.reason)
    if operation is not None:
        cycle.current = operation.function.spec.id
        _retry(cycle, operation, event)


def _spare(function: Function, event: WorkerExited) -> bool:
    """Record whether a block was missing, before the function's blocks are released. Return whether that excuses the
    exit: not if it happens twice in a row.
    """
    spared = event.lost_blocks and not is_lost_again(function)
    function.lost_blocks = event.lost_blocks
    return spared


def _lose_blocks(cycle: Cycle, prepared: Function, operation: Operation | None) -> None:
    """Release the blocks of a function that was prepared or whose blocks were prefetched, and of those whose run was
    ordered meanwhile: they are loaded again.
    """
    for function in () if operation is None else operation.functions:
        if function.loaded:
            release(cycle, function)
    if prepared.loaded:
        evict_blocks_of(cycle, prepared, "a block was not in the host store when a device prepared or prefetched it")


def check(cycle: Cycle, id_: WorkerId) -> None:
    """The timer of an executor is due: end it if it hangs."""
    device = cycle.state.pool.executors.get(id_)
    if device is None or device.executor is None:
        return
    expire_if_removed(cycle, device)
    executor, config = device.executor, cycle.config
    if executor.stopping:
        at = executor.since + config.stop_timeout_s
    elif executor.ready_at is None:
        at = executor.since + config.start_timeout_s
    else:
        ends = [each.hangs_at for each in (executor.operation, executor.preparing) if each is not None]
        if not ends:
            return
        at = min(*ends, _must_end_at(executor.operation))
    if cycle.now < at:
        cycle.timers.arm(id_, at)
    elif executor.stopping:
        cycle.actions.append(StopWorker(id_, kill=True))
    elif _must_end_at(executor.operation) <= cycle.now:
        end_drain(cycle, device)
    else:
        _hung(cycle, device)


def _must_end_at(operation: Operation | None) -> float:
    """Return when a run must have ended even if nobody waits for its device."""
    return operation.drain_until if operation is not None and operation.leaving else inf


def end_drain(cycle: Cycle, device: Device, is_needed: bool = False) -> None:
    """The drain timeout of a run has passed: kill its executor, and refuse its requests. If no others need the device,
    the requests of functions that stay are tried again.
    """
    operation, config = end_operation(cycle, device), cycle.config
    assert operation is not None
    stop(cycle, device, kill=True)
    for part in operation.parts:
        refusal = _refusal(operation, part.function, is_needed)
        if refusal is None:
            put_back(cycle, part)
            continue
        error, why = refusal
        message = f"{why}, and its run did not end within {config.drain_timeout_s:g} s"
        for request in [each for each in part.requests if each in cycle.state.requests]:
            refuse(cycle, request, error, message, config.retry_after_min_s)
            count_answer(cycle, part.function, in_time=False)
    for function in operation.functions:
        cycle.mark(function)


def _refusal(operation: Operation, function: Function, is_needed: bool) -> tuple[str, str] | None:
    id_ = function.spec.id
    if function.removed:
        return "NotFoundError", f"function {id_} was removed"
    if function.unloaded:
        return why_unloaded(function)
    if id_ in operation.unloaded:
        return "OverloadedError", f"function {id_} was unloaded"
    if is_needed:
        return "OverloadedError", f"the device of function {id_} was needed by others"
    if id_ in operation.leaving:
        return "OverloadedError", f"the blocks of function {id_} had to leave the host store for another tenant"
    return None


def _hung(cycle: Cycle, device: Device) -> None:
    """Kill an executor whose start, preparation or run hangs. The requests of a run that hangs are refused; those of a
    shared run are tried again.
    """
    executor, operation = device.executor, end_operation(cycle, device)
    assert executor is not None
    preparing = executor.preparing
    stop(cycle, device, kill=True)
    # Functions may wait for its start.
    cycle.devices_changed = True
    if preparing is not None:
        device_ahead.preparation_failed(cycle, preparing.function, operation)
        return
    if operation is not None and not operation.parts:
        device_ahead.preparation_failed(cycle, operation.function, None)
        return
    if operation is None:
        _failed(cycle, device, executor.owner, None, "its executor did not start in time")
        return
    function, id_ = operation.function, operation.function.spec.id
    _failed(cycle, device, executor.owner, function, f"a run of function {id_} hung")
    if len(operation.parts) > 1:
        for part in operation.parts:
            part.function.runs_at_death = part.function.runs
            _try_again(cycle, part, "DeadlineError", f"a run on {device.config.name} hung and was stopped")
        return
    for request in operation.requests:
        if request in cycle.state.requests:
            refuse(
                cycle, request, "DeadlineError", f"function {id_} hung on {device.config.name}: {hung_text(function)}"
            )
            count_answer(cycle, function, in_time=False)
    if not (function.removed or id_ in operation.unloaded):
        functions.fail(cycle, function, "WorkerError", f"function {id_} hung: {hung_text(function)}")


def _failed(cycle: Cycle, device: Device, owner: DeviceOwner, function: Function | None, reason: str) -> None:
    """Count a failure of a device, whose executor served this owner. Since its last success each function counts once,
    and if several tenants have functions of the pool, so does each tenant: none of them takes a device out of service
    for the others.
    """
    device.fault, device.lost_by = reason, owner
    if function is None:
        device.failures += 1
    else:
        id_, tenant = function.spec.id, function.spec.tenant
        tenants = {each.spec.tenant for each in cycle.state.functions.values() if each.pool is not None}
        if not (tenant in device.blamed.values() if tenants - {tenant} else id_ in device.blamed):
            device.failures += 1
        device.blamed[id_] = tenant
    device.backoff_until = Seconds(cycle.now + backoff_s(device.failures, cycle.config))


def _retry(cycle: Cycle, operation: Operation, event: WorkerExited) -> None:
    """Try again the requests of a run whose executor died, or refuse them."""
    for part in operation.parts:
        _retry_part(cycle, operation, part, event)


def _retry_part(cycle: Cycle, operation: Operation, part: Part, event: WorkerExited) -> None:
    function = part.function
    spared = _spare(function, event)
    if event.lost_blocks and function.loaded:
        release(cycle, function)
    _try_again(cycle, part, event.error, event.reason)
    if not (spared and len(operation.parts) == 1):
        _count_failure(cycle, operation, function, event.error, event.reason)


def _count_failure(cycle: Cycle, operation: Operation, function: Function, error: str, reason: str) -> None:
    """An executor ended in a run of this function, which counts unless the function was unloaded since: a load that was
    asked for after that does not fail with an error of the old run.
    """
    if function.spec.id in operation.unloaded:
        return
    if len(operation.parts) > 1:
        # Separate runs will show which function it was.
        function.runs_at_death = function.runs
    elif function.failures and not function.removed:
        functions.fail(cycle, function, error, reason)
    else:
        function.failures = 1


def _try_again(cycle: Cycle, part: Part, error: str, reason: str) -> None:
    """Put the requests of a function back into its queue, and refuse those that have no attempt left."""
    function, requests = part.function, cycle.state.requests
    for request in [requests[each] for each in part.requests if each in requests]:
        request.failures += 1
        if not may_retry(request, cycle.config):
            refuse(cycle, request.id, error, f"function {function.spec.id} failed in every attempt: {reason}")
            count_answer(cycle, function, in_time=False)
    put_back(cycle, part)
    cycle.mark(function)

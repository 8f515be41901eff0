"""Decides for each request to a function with `device = "any"` whether it waits for a worker or for a device.

When the request arrives, the time until its answer is estimated for both. Both use the same blocks in the host store,
so loading them is no part of the estimates. A request that waits for a worker moves to a device if a device is free
while no worker is, and would answer it sooner; and the reverse. If all operations that it waits for are overdue, it
also moves to an executor, or to a first worker, that has to be started. While a request waits, this is checked at
events of workers and devices, and when an operation that it waits for is overdue.

If the function has a handler, the handler runs in a worker, and the same is decided for each call of its program: the
worker runs it, or it is a request to the program on the pool. Such a request is refused if the worker is to run it.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import ceil, inf

from overwinter.core.ids import RunId, WorkerId
from overwinter.core.profile import Point
from overwinter.scheduler import counterpart, executors, handler_calls, order, swaps
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.device_admission import backlog_s, could_begin, could_start
from overwinter.scheduler.operation import Operation
from overwinter.scheduler.policies import worker_or_device
from overwinter.scheduler.policies.device_binding import transfer_s
from overwinter.scheduler.policies.worker_or_device import Estimate, Estimates
from overwinter.scheduler.policy_failures import call_policy, expected_s
from overwinter.scheduler.pool import Device, pool_record
from overwinter.scheduler.replacement import may_take_at
from overwinter.scheduler.state import Function, Worker
from overwinter.scheduler.swaps import owner_of


def choose(cycle: Cycle, function: Function) -> Function:
    """Return the function whose queue a request that arrives now joins: this one, or its counterpart."""
    other = counterpart.of(cycle.state, function)
    if other is None or function.pool is not None or function.on_trial or not counterpart.is_usable(cycle, other):
        return function
    if not counterpart.is_usable(cycle, function):
        return other
    return other if _device_is_sooner(cycle, function, other, is_first=False) else function


def takes_call(cycle: Cycle, function: Function, caller: tuple[WorkerId, RunId] | None) -> bool:
    """Whether a device answers a handler's call of a program sooner than the handler's worker would. A trial has no run
    in the tables: its worker runs the program.
    """
    if function.waits_in == "bytes":
        # The blocks that have to leave may be those that the worker uses.
        return False
    run = handler_calls.run_of(cycle, caller)
    return run is not None and counterpart.is_usable(cycle, function) and _answers_call(cycle, function, run)


def _leave_calls_if_sooner(cycle: Cycle, function: Function) -> None:
    """Leave calls that wait for a device to the workers that made them, if these run the program sooner."""
    if counterpart.caller_of(cycle.state, function) is None or could_begin(cycle, function):
        return
    in_progress = _on_devices_now(cycle, function)
    _check_again(cycle, in_progress)
    if not pool_record(function).times.is_known and not _are_overdue(cycle, in_progress):
        # A device runs it for the first time, and its executor may be starting.
        return
    left = []
    for request in [cycle.state.requests[each] for each in function.queue]:
        run, is_first = handler_calls.run_of(cycle, request.caller), request.id == function.queue[0]
        if run is not None and not _answers_call(cycle, function, run, is_first):
            left.append(request.id)
    if left:
        counterpart.leave_to_workers(cycle, function, left)


def _answers_call(cycle: Cycle, program: Function, run: Operation, is_first: bool = False) -> bool:
    """Whether a device answers a call of this run sooner than its worker would run the program."""
    function, latency = run.function, run.function.latency
    seconds = latency.program_s
    if seconds is None and latency.points:
        seconds = expected_s(cycle.state, function, latency.default_point, len(run.requests))
    in_worker = Estimate("workers", 0.0, seconds, may_try=True)
    estimates = function.estimates = Estimates(in_worker, _on_devices(cycle, program, is_first))
    return call_policy(cycle.state, function, in_worker, worker_or_device.sooner, estimates) is estimates.devices


def move_to_worker(cycle: Cycle, function: Function) -> bool:
    """Let a worker of the function take a request that waits for a device; return whether it does."""
    other = counterpart.of(cycle.state, function)
    if other is None or function.pool is not None or function.on_trial:
        return False
    return any(each.queue and _move_first(cycle, function, each) for each in counterpart.with_later(cycle.state, other))


def _move_first(cycle: Cycle, function: Function, other: Function) -> bool:
    """Let a worker take the first request in the queue of `other`, if the worker answers it sooner; return whether the
    worker takes it.
    """
    if not _worker_may_take(cycle, function, other) or could_begin(cycle, other):
        return False
    if not pool_record(other).times.is_known and not _are_overdue(cycle, _on_devices_now(cycle, other)):
        # A device runs it for the first time, and its executor may be starting.
        return False
    if _device_is_sooner(cycle, function, other, is_first=True):
        return False
    counterpart.move(cycle, other, function, [other.queue[0]])
    return True


def move_to_devices(cycle: Cycle) -> None:
    """Let each device that nobody waits for take a request that waits for a worker, if the device answers it sooner.
    Let an executor start for such a request only if all operations that it waits for are overdue, or if there are none
    and it waits for capacity. Functions with workers that may take a request that waits for a device are marked.
    """
    pool = cycle.state.pool
    for function in [each for each in pool.waiting.first() if each.spec.settings.device == "any"]:
        _leave_calls_if_sooner(cycle, function)
        other = counterpart.of(cycle.state, function)
        if other is not None:
            if _worker_may_take(cycle, other, function):
                cycle.mark(other)
            _check_again(cycle, _on_devices_now(cycle, function))
    unused = sum(each.is_free(cycle.now) for each in pool.devices.values())
    for function in list(pool.waiting_for_workers.first()):
        pool.waiting_for_workers.requeue(function)
        request = next((each for each in function.queue if not cycle.state.requests[each].too_large), None)
        if request is None or _has_free_worker(cycle, function):
            continue
        other = counterpart.of(cycle.state, function)
        if other is None:
            continue
        if not (unused and counterpart.is_usable(cycle, other)):
            _check_after_backoff(cycle, other)
            continue
        begins = could_begin(cycle, other)
        if not (begins or could_start(cycle, other)):
            continue
        in_progress = [each for worker in function.usable_workers() for each in _in_worker_now(worker)]
        is_stuck = _are_overdue(cycle, in_progress) if in_progress else function.waits_in == "capacity"
        if (begins or is_stuck) and _device_is_sooner(cycle, function, other, is_first=True):
            counterpart.move(cycle, function, other, [request])
            unused -= 1
        else:
            _check_again(cycle, in_progress)


def _worker_may_take(cycle: Cycle, function: Function, other: Function) -> bool:
    """Whether a worker may take a request that waits for a device: a free one; or a new one, if the function has no
    usable worker and all operations for which the request waits on devices are overdue.
    """
    if function.usable_workers():
        return _has_free_worker(cycle, function)
    return counterpart.is_usable(cycle, function) and _are_overdue(cycle, _on_devices_now(cycle, other))


def _are_overdue(cycle: Cycle, operations: Sequence[Operation]) -> bool:
    """Whether there are operations and all are overdue, so that perhaps none of them ends."""
    return bool(operations) and all(each.overdue_at <= cycle.now for each in operations)


def _check_again(cycle: Cycle, operations: Iterable[Operation]) -> None:
    """Compare the estimates again when one of these operations becomes overdue: then it may never end. If one is
    overdue already, compare them again after its `_left_s`.
    """
    times = (
        each.overdue_at if cycle.now < each.overdue_at else cycle.now + _left_s(cycle, each) for each in operations
    )
    at = min(times, default=inf)
    if at < inf:
        cycle.timers.arm("devices", at)


def _check_after_backoff(cycle: Cycle, function: Function) -> None:
    """Compare the estimates again when the next backoff is over: that of a device, of the function (the counterpart),
    or of a later slice.
    """
    devices, parts = cycle.state.pool.devices.values(), counterpart.with_later(cycle.state, function)
    ends = [*(each.backoff_until for each in devices if each.executor is None), *(each.backoff_until for each in parts)]
    at = min((each for each in ends if each > cycle.now), default=inf)
    if at < inf:
        cycle.timers.arm("devices", at)


def _has_free_worker(cycle: Cycle, function: Function) -> bool:
    """Whether a worker could run a request of the function now."""
    if not function.has_slot:
        return False
    has_core = cycle.resources.cores.fits(1) and not cycle.state.core_queue.waits
    return has_core or not order.waits_for_cores(cycle, function)


# Estimates


def _device_is_sooner(cycle: Cycle, function: Function, other: Function, is_first: bool) -> bool:
    """Whether a device answers a request sooner than a worker. `is_first`: no other waits before it."""
    in_workers, on_devices = _in_workers(cycle, function, is_first), _on_devices(cycle, other, is_first)
    estimates = function.estimates = Estimates(in_workers, on_devices)
    return (
        call_policy(cycle.state, function, estimates.workers, worker_or_device.sooner, estimates) is estimates.devices
    )


def _in_workers(cycle: Cycle, function: Function, is_first: bool) -> Estimate:
    latency, id_ = function.latency, function.spec.id
    wait_s, point = min(_workers(cycle, function), key=lambda each: each[0], default=(inf, latency.default_point))
    is_known = bool(latency.points) or latency.run_s is not None
    run_s = expected_s(cycle.state, function, point, 1) if is_known else None
    if not is_first:
        serving = [each.point for each in function.usable_workers() if each.is_serving] or [point]
        wait_s += len(function.queue) * (run_s or 0.0) / sum(each.batch * each.concurrency for each in serving)
    if order.waits_for_cores(cycle, function) and not cycle.resources.cores.fits(1):
        cores = cycle.state.core_queue
        wait_s = max(wait_s, min((_left_s(cycle, each) for each in cycle.state.holding_cores.values()), default=0.0))
        wait_s += len(cores.timely.keys() | cores.late.keys()) * (run_s or 0.0) / cycle.cores
    is_tried = function.queue or any(each.bound[id_].runs for each in function.workers.values())
    return Estimate("workers", wait_s, run_s, may_try=not is_tried)


def _workers(cycle: Cycle, function: Function) -> Iterator[tuple[float, Point]]:
    """Yield the time until a run could begin in each worker that may run it, and in a new one, with the worker's
    configuration.
    """
    family, latency, id_, usable = function.family, function.latency, function.spec.id, function.usable_workers()
    for worker in usable:
        if worker.stopping or worker.drain is not None:
            continue
        bind_s = 0.0 if id_ in worker.bound else family.bind_s
        wait_s = 0.0 if worker.has_slot else min(_left_s(cycle, each) for each in _in_worker_now(worker))
        yield wait_s + bind_s, worker.point
    may_fork = len(usable) < family.max_workers and (cycle.policy.eager or not usable)
    if may_fork and _has_capacity(cycle, latency.default_point):
        yield latency.wake_s, latency.default_point


def _in_worker_now(worker: Worker) -> list[Operation]:
    return [worker.start] if worker.start else [*worker.runs.values(), *worker.binds.values()]


def _on_devices_now(cycle: Cycle, function: Function) -> list[Operation]:
    in_progress = (_on_device_now(cycle, function, each) for each in swaps.fitting(cycle, function))
    return [each for each in in_progress if each is not None]


def _on_device_now(cycle: Cycle, function: Function, device: Device) -> Operation | None:
    """The run in progress, or the start of the executor, as an operation of the function."""
    executor, start_s = device.executor, cycle.state.pool.start_s
    if executor is None or executor.stopping or executor.ready_at is not None:
        return device.operation
    since = executor.since
    return Operation(function, since, since + start_s, executors.overdue_at(cycle, executor), inf)


def _has_capacity(cycle: Cycle, point: Point) -> bool:
    """Whether there is capacity for a worker, or an idle one could give it."""
    fits = all(each.fits(amount) for each, amount in cycle.resources.of_start(point).items())
    return fits or any(tenant.spare for tenant in cycle.state.tenants.values())


def _on_devices(cycle: Cycle, function: Function, is_first: bool) -> Estimate:
    """The estimate on the device that answers first. `function` is the one that runs on the pool: the counterpart, or
    the program of a handler. The later slices of its program are included.
    """
    parts, owner = list(counterpart.with_later(cycle.state, function)), owner_of(cycle, function)
    devices = list(swaps.fitting(cycle, function))
    wait_s, device = min(
        ((_device_s(cycle, function, each), each.config.name) for each in devices), default=(inf, "devices")
    )
    own = max(1, sum(each.owner == owner for each in devices))
    if not is_first:
        wait_s += backlog_s(cycle, owner) / own
    # Not on a device that serves others: its executor would have to be replaced.
    is_free = any(each.owner in (None, owner) and each.is_free(cycle.now) for each in devices)
    is_tried = any(each.queue or pool_record(each).running for each in parts)
    if not pool_record(function).times.is_known:
        return Estimate(device, wait_s, None, may_try=is_free and not is_tried)
    runs_s = _runs_s(cycle, parts)
    if not is_first:
        # The backlog has the runs for which requests wait now, and not the runs of later slices that they need then.
        wait_s += sum(_runs(each) * sum(runs_s[number:]) for number, each in enumerate(parts, 1)) / own
    wait_s += _waits_between_s(cycle, parts, runs_s, wait_s)
    return Estimate(device, wait_s, sum(runs_s), may_try=False)


def _runs(function: Function) -> int:
    """The runs that its waiting requests need."""
    return ceil(len(function.queue) / function.spec.settings.max_batch)


def _runs_s(cycle: Cycle, parts: Sequence[Function]) -> list[float]:
    """The execution of each slice; one that was never measured is assumed to take as long as the others."""
    known = [swaps.run_s(cycle, each, 1) for each in parts if pool_record(each).times.is_known]
    usual_s = sum(known) / len(known)
    return [swaps.run_s(cycle, each, 1) if pool_record(each).times.is_known else usual_s for each in parts]


def _waits_between_s(cycle: Cycle, parts: Sequence[Function], runs_s: Sequence[float], wait_s: float) -> float:
    """How long a request waits for devices and blocks between the slices. If the devices can hold all slices at once,
    the later ones are transferred while earlier ones run. Otherwise each replaces an earlier one when the request
    reaches it; but the first slice, if it has to be transferred, replaces the last one.
    """
    if wait_s == inf:
        return 0.0
    ends = began = wait_s + runs_s[0]
    together = len(parts) == 1 or _fit_together(cycle, parts)
    displaced = None if any(cycle.state.pool.holders(parts[0])) else parts[-1]
    for part, run_s in zip(parts[1:], runs_s[1:], strict=True):
        devices = list(swaps.fitting(cycle, part))
        if together:
            ends = max(ends, min((_device_s(cycle, part, each) for each in devices), default=inf))
        else:
            swaps_s = (_swap_s(part, each, all_bytes=part is displaced) for each in devices)
            ends += max(0.0, min(swaps_s, default=inf) - run_s)
        ends += run_s
    return ends - began - sum(runs_s[1:])


def _swap_s(function: Function, device: Device, all_bytes: bool) -> float:
    missing = pool_record(function).nbytes if all_bytes else device.missing_bytes(pool_record(function))
    return transfer_s(device.config, missing, 0)


def _fit_together(cycle: Cycle, parts: Sequence[Function]) -> bool:
    """Whether the devices in service can hold these functions at once, by their bytes."""
    devices = cycle.state.pool.devices.values()
    free_bytes = [each.config.memory_bytes for each in devices if not each.is_out(cycle.now)]
    for nbytes in sorted((pool_record(each).nbytes for each in parts), reverse=True):
        smallest = min((each for each in free_bytes if each >= nbytes), default=None)
        if smallest is None:
            return False
        free_bytes[free_bytes.index(smallest)] -= nbytes
    return True


def _device_s(cycle: Cycle, function: Function, device: Device) -> float:
    """The time until the execution could begin on a device, with the transfers that it does not hide."""
    executor, now, start_s = device.executor, cycle.now, cycle.state.pool.start_s
    in_progress = _on_device_now(cycle, function, device)
    busy_s = 0.0 if in_progress is None else _left_s(cycle, in_progress)
    if executor is None or executor.stopping or executor.owner != owner_of(cycle, function):
        transfer = transfer_s(device.config, pool_record(function).nbytes, 0)
        hidden_s = swaps.run_s(cycle, function, 1)
        backoff_s = max(0.0, device.backoff_until - now) if executor is None else 0.0
        if executor is not None and not executor.stopping:
            # It serves others, and may be taken from them only later.
            owner, fitting = owner_of(cycle, function), list(swaps.fitting(cycle, function))
            busy_s = max(busy_s, may_take_at(cycle, device, owner, fitting) - now)
        return backoff_s + busy_s + start_s + max(0.0, transfer - hidden_s)
    [option] = swaps.options(cycle, function, [device])
    return busy_s + min([option.swap_wait_s, *(peer.swap_wait_s for peer in option.peers)])


def _left_s(cycle: Cycle, operation: Operation) -> float:
    """How long an operation is still expected to take; past its expected end, as long again as until now."""
    left_s = operation.ends - cycle.now
    return left_s if left_s > 0 else cycle.now - operation.began

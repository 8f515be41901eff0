"""A function with `device = "any"` and without a handler is two functions: one runs in workers, its counterpart on the
pool (any_device.py). If its program is cut, the first slice is the counterpart, and the function in workers is the
counterpart of each slice.

If one of them cannot serve its waiting requests, because it backs off, is out of service, or fits nowhere, they move to
the other one. They are refused only if neither can serve them.
"""

from collections.abc import Collection, Iterable, Iterator

from overwinter.core.ids import RequestId, program_id, whole_id
from overwinter.scheduler import families, fixed_devices, order, shared_runs, swaps
from overwinter.scheduler.answers import refuse, refuse_queue
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.limits import why_never_runs
from overwinter.scheduler.policies import queueing
from overwinter.scheduler.state import Function, State

RUN_BY_WORKER = "OverloadedError", "the worker that calls this program runs it itself"
"""The refusal of a call that is left to the handler's worker."""


def of(state: State, function: Function) -> Function | None:
    """Return the counterpart of a function; None: it has none."""
    if function.spec.settings.device != "any" or function.spec.has_handler:
        return None
    id_ = function.spec.id
    other = state.functions.get(program_id(id_) if function.pool is None else whole_id(id_))
    return None if other is None or other.spec.has_handler else other


def caller_of(state: State, function: Function) -> Function | None:
    """Return the function whose handler calls this program and may run it itself; None: there is none."""
    if function.spec.settings.device != "any" or function.pool is None:
        return None
    whole = state.functions.get(whole_id(function.spec.id))
    return whole if whole is not None and whole.spec.has_handler else None


def with_later(state: State, function: Function) -> Iterator[Function]:
    """Yield a function, and then the later slices of its program."""
    yield function
    yield from swaps.later_slices(state, function)


def queued(state: State, function: Function) -> int:
    """Return the number of waiting requests of a function and its counterpart, with those of later slices."""
    other = of(state, function)
    parts = (function,) if other is None else (function, other)
    return sum(len(each.queue) for part in parts for each in with_later(state, part))


def retry_after_s(cycle: Cycle, function: Function) -> float:
    """Estimate the seconds until the waiting requests are served, by the times of runs in its workers so far, or by the
    expected times of runs on the devices of its owner; at least `retry_after_min_s`.
    """
    batch = function.spec.settings.max_batch
    if function.pool is None:
        places, needed_s = len(function.workers), len(function.queue) / batch * (function.latency.run_s or 0.0)
    else:
        owner, waiting, needed_s = swaps.owner_of(cycle, function), 0, 0.0
        places = sum(device.owner == owner for device in swaps.fitting(cycle, function))
        for part in with_later(cycle.state, function):
            waiting += len(part.queue)
            needed_s += waiting / batch * swaps.run_s(cycle, part, batch)
    return max(cycle.config.retry_after_min_s, needed_s / max(1, places))


def is_usable(cycle: Cycle, function: Function) -> bool:
    """Whether the function, and each later slice of its program, could serve a request, perhaps after others."""
    return all(_is_usable(cycle, each) for each in with_later(cycle.state, function))


def _is_usable(cycle: Cycle, function: Function) -> bool:
    if function.unloaded or function.on_trial:
        return False
    backs_off = cycle.now < function.backoff_until
    if function.pool is None:
        id_ = function.spec.id
        serves = any(worker.is_serving and worker.serves(id_) for worker in function.workers.values())
        return serves or not (backs_off or why_never_runs(function))
    if backs_off or function.pool.no_device_reason:
        return False
    if fixed_devices.are_used(cycle):
        return fixed_devices.has_device_in_service(cycle, function)
    return any(each.executor is not None or each.is_free(cycle.now) for each in swaps.fitting(cycle, function))


def usable(cycle: Cycle, function: Function) -> Function | None:
    """Return the counterpart, if there is one that could serve a request."""
    other = of(cycle.state, function)
    return other if other is not None and is_usable(cycle, other) else None


def move_if_unusable(cycle: Cycle, function: Function) -> None:
    """Hand over the waiting requests of a function with `device = "any"` that cannot serve them."""
    if function.queue and function.spec.settings.device == "any" and not is_usable(cycle, function):
        hand_over(cycle, function)


def refuse_waiting(cycle: Cycle, function: Function, error: str, message: str, retry_after_s: float) -> None:
    """The function cannot serve its waiting requests: its counterpart does, or they are refused."""
    hand_over(cycle, function)
    refuse_queue(cycle, function, error, message, retry_after_s)


def hand_over(cycle: Cycle, function: Function) -> None:
    """Move the waiting requests that the counterpart can serve to it; leave handlers' calls to their workers."""
    other = usable(cycle, function)
    if other is None:
        leave_calls(cycle, function)
        return
    requests = cycle.state.requests
    moved = [id_ for id_ in function.queue if other.pool is None or not requests[id_].too_large]
    if moved:
        move(cycle, function, other, moved)


def leave_calls(cycle: Cycle, function: Function) -> bool:
    """Leave all waiting calls of a program to the handlers' workers, if these may run it; return whether there
    were any. A call must not wait for bytes of a host store, because its worker may use the blocks that have to leave.
    """
    if not function.queue or caller_of(cycle.state, function) is None:
        return False
    leave_to_workers(cycle, function, list(function.queue))
    return True


def leave_to_workers(cycle: Cycle, function: Function, calls: Collection[RequestId]) -> None:
    """Refuse waiting calls of handlers, whose workers then run the program."""
    queueing.remove_all(function.queue, calls)
    for id_ in calls:
        refuse(cycle, id_, *RUN_BY_WORKER)
    _queue_changed(cycle, function)


def move(cycle: Cycle, function: Function, other: Function, requests: Iterable[RequestId]) -> None:
    """Move waiting requests to the queue of the counterpart."""
    for id_ in requests:
        request = cycle.state.requests[id_]
        function.queue.remove(id_)
        request.part = None if other.spec.id == request.function else other.spec.id
        queueing.insert(other.queue, request, cycle.state.requests)
        cycle.timers.arm(other.spec.id, request.deadline)
    _queue_changed(cycle, function)
    _queue_changed(cycle, other)


def _queue_changed(cycle: Cycle, function: Function) -> None:
    if not (function.queue or function.wants_wake):
        order.leave(cycle, function)
    families.record_waiting(cycle, function)
    shared_runs.queue_changed(cycle, function)
    cycle.mark(function)

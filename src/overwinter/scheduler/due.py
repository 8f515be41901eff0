"""An alarm rang: whose time has come, and what is due?

A timer only says at what to look. What is due follows from the tables, and so does the time of the next look.
"""

from typing import get_args

from overwinter.core.actions import StopBody
from overwinter.core.ids import FunctionId, Seconds, WorkerId
from overwinter.scheduler import functions
from overwinter.scheduler.admission import scale_out
from overwinter.scheduler.answers import expire, refuse, why_unloaded
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.operations import end_overdue, end_run, stop, watch_deadlines
from overwinter.scheduler.retention import end_window, idle_until, is_counted
from overwinter.scheduler.sizing import drain_surplus, end_period
from overwinter.scheduler.state import Function, Line, Worker
from overwinter.scheduler.timers import Key

LINES: tuple[Line, ...] = get_args(Line)


def look(cycle: Cycle) -> None:
    """Look at all whose time has come."""
    state = cycle.state
    for key in cycle.timers.pop_due(cycle.now):
        if key in LINES:
            _line(cycle, key)
        elif isinstance(key, str):
            function = state.functions.get(FunctionId(key))
            if function is not None:
                _function(cycle, function)
        else:
            worker = state.workers.get(WorkerId(key))
            if worker is not None:
                _worker(cycle, worker)


def look_at_lines(cycle: Cycle) -> None:
    """Look at the lines whose time has come, whether the alarm has rung or not yet."""
    for line in LINES:
        at = cycle.timers.at(line)
        if at is not None and at <= cycle.now:
            cycle.timers.disarm(line)
            _line(cycle, line)


def _line(cycle: Cycle, line: Key) -> None:
    """What hangs keeps its cores no more; somebody's time slice is over."""
    if line == "cores":
        end_overdue(cycle)
    elif line == "places":
        cycle.places_changed = True
    else:
        cycle.bytes_changed = True


def _function(cycle: Cycle, function: Function) -> None:
    """Refuse what is past its deadline; look at the rate; let go what nobody uses; start again what was left alone."""
    cycle.in_hand, now = function.spec.id, cycle.now
    for request in [each for each in cycle.state.open_requests(function) if each.deadline <= now]:
        if request.id in function.queue:
            function.queue.remove(request.id)
        expire(cycle, request.id)
    if function.look_at is not None and function.look_at <= now:
        scaled = end_period(cycle, function)
        if scaled is not None:
            scale_out(cycle, function, [function.latency.point(shape) for shape in scaled.start])
            drain_surplus(cycle, function, scaled)
    end_window(cycle, function)
    cycle.mark(function)
    functions.watch(cycle, function)


def _worker(cycle: Cycle, worker: Worker) -> None:
    """Let an idle worker go whose keep-alive is over; kill one that hangs or has drained for long enough."""
    function, now = worker.owner, cycle.now
    if function is None:
        for id_ in list(worker.requests()):
            request = cycle.state.requests.get(id_)
            if request is not None and request.deadline <= now:
                expire(cycle, id_)
        watch_deadlines(cycle, worker)
    if worker.is_idle:
        assert function is not None
        _idle(cycle, worker, function)
        return
    at = _must_end_at(cycle, worker)
    if now < at:
        cycle.timers.arm(worker.id, at)
    elif worker.stopping:
        cycle.actions.append(StopBody(worker.id, kill=True))
    elif worker.drain is not None and worker.drain.until is not None and worker.drain.until <= now:
        _overran(cycle, worker)
    else:
        _hung(cycle, worker)


def _idle(cycle: Cycle, worker: Worker, function: Function) -> None:
    at = idle_until(cycle, worker, function)
    if cycle.now >= at:
        if not is_counted(function, worker):
            stop(cycle, worker)
            return
        at = Seconds(cycle.now + cycle.policy.period_s)
    cycle.timers.arm(worker.id, at)


def _must_end_at(cycle: Cycle, worker: Worker) -> float:
    """When a worker that starts, runs or stops hangs, or may go on no longer."""
    config = cycle.config
    if worker.stopping:
        return worker.since + config.stop_timeout_s
    if worker.start is not None:
        return worker.since + config.start_timeout_s
    hangs = next(iter(worker.runs.values())).began + worker.timeout_s
    until = None if worker.drain is None else worker.drain.until
    return hangs if until is None else min(hangs, until)


def _overran(cycle: Cycle, worker: Worker) -> None:
    """Its drain timeout is over: what it runs is refused, and it is killed."""
    config, function = cycle.config, worker.owner
    if function is None:
        error, why = "NotFoundError", f"function {worker.function} was removed"
    elif function.unloaded:
        error, why = why_unloaded(function)
    else:
        error, why = "OverloadedError", f"the worker of function {worker.function} was needed by another tenant"
    for run in list(worker.runs):
        for id_ in end_run(cycle, worker, run).requests:
            if id_ in cycle.state.requests:
                message = f"{why}, and its run did not end within {config.drain_timeout_s:g} s"
                refuse(cycle, id_, error, message, config.retry_after_min_s)
    stop(cycle, worker, kill=True)


def _hung(cycle: Cycle, worker: Worker) -> None:
    # The runs beside the one that hangs get their retry when the worker is gone.
    for run in [run for run, operation in worker.runs.items() if cycle.now >= operation.began + worker.timeout_s]:
        for id_ in end_run(cycle, worker, run).requests:
            if id_ in cycle.state.requests:
                refuse(cycle, id_, "DeadlineError", f"function {worker.function} hung and was stopped")
    stop(cycle, worker, kill=True)
    if worker.owner is not None:
        reason = f"a worker of {worker.function} hung and was stopped"
        functions.fail(cycle, worker.owner, "WorkerError", reason)

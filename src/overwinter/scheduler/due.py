"""Handles an alarm: finds the timers that are due and acts on them.

A timer only names what to check. What is due follows from the tables, and so does the time of the next check.
"""

from collections.abc import Sequence
from math import inf
from typing import get_args

from overwinter.core.actions import StopWorker
from overwinter.core.ids import FunctionId, Seconds, WorkerId
from overwinter.core.profile import Point
from overwinter.scheduler import (
    ahead,
    device_order,
    executors,
    families,
    fixed_devices,
    functions,
    shared_runs,
    worker_exits,
)
from overwinter.scheduler.admission import start_workers
from overwinter.scheduler.answers import expire, refuse, why_unloaded
from overwinter.scheduler.binding import unbind_unused, was_unloaded
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.operation import hung_text
from overwinter.scheduler.operations import end_overdue, end_run, stop, watch_deadlines
from overwinter.scheduler.policies import queueing
from overwinter.scheduler.retention import end_keep_alive_of_blocks, idle_until, outlasts_keep_alive
from overwinter.scheduler.sizing import drain_surplus, end_period, next_to_start, scaling_text
from overwinter.scheduler.state import Family, Function, QueueName, Worker
from overwinter.scheduler.timers import Key

QUEUES: tuple[QueueName, ...] = get_args(QueueName)
DUE_MAX = 256
"""The most timers of a step: those of thousands of functions may be due together."""


def check(cycle: Cycle) -> None:
    """Handle the timers that are due, at most DUE_MAX in this step, and fewer if the step has too many actions."""
    state = cycle.state
    for key in cycle.timers.pop_due(cycle.now, DUE_MAX):
        if cycle.is_long:
            cycle.timers.arm(key, cycle.now)
        elif key in QUEUES:
            _queue(cycle, key)
        elif key == ahead.KEY:
            cycle.ahead_due = True
        elif key == device_order.KEY:
            device_order.end_period(cycle)
        elif isinstance(key, str):
            function = state.functions.get(FunctionId(key))
            if function is not None:
                _function(cycle, function)
        else:
            worker = state.workers.get(WorkerId(key))
            if worker is not None:
                _worker(cycle, worker)
            ahead.hung(cycle, WorkerId(key))
            executors.check(cycle, WorkerId(key))


def check_queues(cycle: Cycle) -> None:
    """Handle the queues whose time has come, even if the alarm has not fired yet."""
    for queue in QUEUES:
        at = cycle.timers.at(queue)
        if at is not None and at <= cycle.now:
            cycle.timers.disarm(queue)
            _queue(cycle, queue)


def _queue(cycle: Cycle, queue: Key) -> None:
    """Release the cores of overdue operations, or have another queue served again."""
    if queue == "cores":
        end_overdue(cycle)
    elif queue == "capacity":
        cycle.capacity_changed = True
    elif queue == "devices":
        cycle.devices_changed = True
    else:
        cycle.bytes_changed = True


def _function(cycle: Cycle, function: Function) -> None:
    """Refuse requests past their deadline; check the rate; unbind or release what is unused; restart after backoff."""
    cycle.current, now = function.spec.id, cycle.now
    expired = [each.id for each in cycle.state.open_requests(function) if each.deadline <= now]
    queueing.remove_all(function.queue, expired)
    for id_ in expired:
        expire(cycle, id_)
        if function.pool is not None:
            device_order.count_answer(cycle, function, in_time=False)
    if function.pool is not None:
        fixed_devices.check(cycle, function)
        if function.failures and function.backoff_until <= now:
            cycle.state.pool.look_for_preparations()
    family = function.family
    if family.first_member is function and family.check_at is not None and family.check_at <= now:
        scaled = end_period(cycle, family)
        if scaled is not None:
            _scale_out(cycle, family, [family.latency.point(configuration) for configuration in scaled.start])
            drain_surplus(cycle, family, scaled)
        for worker in list(family.workers.values()):
            unbind_unused(cycle, worker)
    end_keep_alive_of_blocks(cycle, function)
    cycle.mark(function)
    functions.watch(cycle, function)


def _scale_out(cycle: Cycle, family: Family, points: Sequence[Point]) -> None:
    """Start the workers that a scaler asked for."""
    function = next_to_start(cycle, family) if points else None
    if function is not None:
        started = start_workers(cycle, function, points)
        if started:
            cycle.explain(function, "scale-out", scaling_text(cycle, family, f"{started} more"))


def _worker(cycle: Cycle, worker: Worker) -> None:
    """Stop an idle worker whose keep-alive is over; kill one that hangs or has drained for too long; offer a free slot
    to more functions.
    """
    now = cycle.now
    _expire_removed(cycle, worker)
    watch_deadlines(cycle, worker)
    if worker.has_slot or shared_runs.is_stuck(cycle, worker):
        # Of those that were asked before, all may have left the slot free, because their requests were refused.
        families.mark(cycle, worker.family)
    if worker.is_idle:
        _idle(cycle, worker)
        return
    for binding in worker.bound.values():
        if binding.draining and binding.until is not None and binding.until <= now:
            if not _refuse_runs(cycle, worker, binding.function):
                # Only the end of the worker ends a run that hangs. Those of other functions are tried again.
                stop(cycle, worker, kill=True)
                return
            binding.until = Seconds(now + cycle.config.drain_timeout_s)
    shared_runs.arm_for_overdue_suspects(cycle, worker)
    at = _must_end_at(cycle, worker)
    if now < at:
        if at < inf:
            cycle.timers.arm(worker.id, at)
    elif worker.stopping:
        cycle.actions.append(StopWorker(worker.id, kill=True))
    elif worker.drain is not None and worker.drain.until is not None and worker.drain.until <= now:
        _overran(cycle, worker)
    else:
        _hung(cycle, worker)


def _expire_removed(cycle: Cycle, worker: Worker) -> None:
    """Refuse requests of a removed function past their deadlines, which nothing else checks."""
    for run in worker.runs.values():
        for id_ in [id_ for part in run.parts if part.function.removed for id_ in part.requests]:
            request = cycle.state.requests.get(id_)
            if request is not None and request.deadline <= cycle.now:
                expire(cycle, id_)


def _idle(cycle: Cycle, worker: Worker) -> None:
    at = idle_until(cycle, worker)
    if cycle.now >= at:
        if not outlasts_keep_alive(worker):
            stop(cycle, worker)
            return
        at = cycle.now + cycle.policy.period_s
    if at < inf:
        cycle.timers.arm(worker.id, at)


def _must_end_at(cycle: Cycle, worker: Worker) -> float:
    """Return when a worker that starts, runs or stops counts as hung, or must stop running."""
    config = cycle.config
    if worker.stopping:
        return worker.since + config.stop_timeout_s
    if worker.start is not None:
        return worker.since + config.start_timeout_s
    times = [each.hangs_at for each in (*worker.runs.values(), *worker.binds.values())]
    times += [each.until for each in worker.bound.values() if each.draining and each.until is not None]
    if worker.drain is not None and worker.drain.until is not None:
        times.append(worker.drain.until)
    return min(times)


def _overran(cycle: Cycle, worker: Worker) -> None:
    """The drain timeout of a worker has passed: refuse its runs, and kill it."""
    for binding in worker.bound.values():
        _refuse_runs(cycle, worker, binding.function)
    for run in list(worker.runs):
        end_run(cycle, worker, run)
    stop(cycle, worker, kill=True)


def _refuse_runs(cycle: Cycle, worker: Worker, function: Function) -> bool:
    """Refuse the open requests of a function in the runs of a worker; return whether there were any."""
    config, id_ = cycle.config, function.spec.id
    if function.removed:
        error, why = "NotFoundError", f"function {id_} was removed"
    elif function.unloaded:
        error, why = why_unloaded(function)
    elif was_unloaded(worker, function):
        error, why = "OverloadedError", f"function {id_} was unloaded"
    elif any(each.function.removed or each.function.unloaded for each in worker.bound.values()):
        error, why = "OverloadedError", f"another function in the worker of {id_} was removed or unloaded"
    else:
        error, why = "OverloadedError", f"the worker of function {id_} was needed by another tenant"
    still_open = False
    for run in worker.runs.values():
        for request in run.of(function):
            if request in cycle.state.requests:
                still_open = True
                message = f"{why}, and its run did not end within {config.drain_timeout_s:g} s"
                refuse(cycle, request, error, message, config.retry_after_min_s)
    return still_open


def _hung(cycle: Cycle, worker: Worker) -> None:
    # Other runs in the worker are retried when it has ended. So is a hung run of several functions: separate runs will
    # show which function hangs.
    start = f"its worker did not start or bind it within {cycle.config.start_timeout_s:g} s"
    alone = [each.function for each in worker.binds.values() if cycle.now >= each.hangs_at]
    hung = [(function, start) for function in alone]
    if worker.starts_for is not None:
        hung.append((worker.starts_for, start))
    for run in [run for run, operation in worker.runs.items() if cycle.now >= operation.hangs_at]:
        operation = worker.runs[run]
        if len(operation.parts) > 1:
            for function in operation.functions:
                function.runs_at_death = function.runs
                hung.append((function, "a run that it shared with other functions did not end in time"))
            continue
        alone.append(operation.function)
        hung.append((operation.function, hung_text(operation.function)))
        end_run(cycle, worker, run)
        function = operation.function
        for id_ in operation.requests:
            if id_ in cycle.state.requests:
                refuse(cycle, id_, "DeadlineError", f"function {function.spec.id} hung: {hung_text(function)}")
    stop(cycle, worker, kill=True)
    at_fault = {each.spec.id: (each, why) for each, why in hung if not each.removed and not was_unloaded(worker, each)}
    for name, (function, why) in at_fault.items():
        functions.fail(cycle, function, "WorkerError", f"function {name} hung: {why}")
    for function in {each.spec.id: each for each in alone}.values():
        worker_exits.record_death(cycle, function)

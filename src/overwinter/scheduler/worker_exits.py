"""Handles the death of a worker: for its requests, and for its functions.

Each request is tried again, up to `attempts_max` attempts, or refused with a clear error. The functions whose runs
or binds were in progress back off for a while, because one of them may be at fault; if none was in progress, all
functions in the worker do. None does if the worker was asked to stop. If blocks were missing, they do only if that
happens twice in a row. A function whose workers die or hang twice within some runs gets a separate family from then on.
"""

from overwinter.core.events import WorkerExited
from overwinter.scheduler import families, functions
from overwinter.scheduler.answers import refuse, refuse_unloaded
from overwinter.scheduler.backoff import may_retry
from overwinter.scheduler.binding import stop_using, was_unloaded
from overwinter.scheduler.blocks import lose
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.operations import end_worker
from overwinter.scheduler.policies import queueing
from overwinter.scheduler.shared_runs import is_suspect
from overwinter.scheduler.state import Function, Worker


def worker_exited(cycle: Cycle, event: WorkerExited) -> None:
    """A process ended, whether it was asked to or not."""
    worker = cycle.state.workers.get(event.worker)
    if worker is None:
        return
    cycle.current = worker.function
    was_starting, was_stopping = worker.start is not None, worker.stopping
    end_worker(cycle, worker)
    at_work = {each.spec.id for run in worker.runs.values() for each in run.functions} | worker.binds.keys()
    for id_, binding in worker.bound.items():
        function = binding.function
        if function.removed:
            _refuse_removed(cycle, worker, function)
        else:
            # If it is loaded again after an unload, other workers serve it, and one of them proves the load.
            stays = not was_unloaded(worker, function)
            may_be_at_fault = stays and not was_stopping and (id_ in at_work or not at_work)
            was_binding = stays and (was_starting or id_ in worker.binds)
            _lose_worker(cycle, function, worker, event, was_binding, may_be_at_fault)
    families.mark(cycle, worker.family)


def _refuse_removed(cycle: Cycle, worker: Worker, function: Function) -> None:
    for run in worker.runs.values():
        for id_ in run.of(function):
            if id_ in cycle.state.requests:
                refuse(cycle, id_, "NotFoundError", f"function {function.spec.id} was removed")


def _lose_worker(
    cycle: Cycle, function: Function, worker: Worker, event: WorkerExited, was_binding: bool, may_be_at_fault: bool
) -> None:
    """Handle the death of a worker for one of its functions."""
    # Missing blocks do not count as a failure, unless it happens twice in a row. A worker that was ready does not count
    # for that: it mapped the blocks before they were loaded again. Callers that wait for a deploy or a load keep
    # waiting.
    twice = event.lost_blocks and lose(cycle, function) and was_binding
    spared = event.lost_blocks and not twice
    function.lost_blocks = event.lost_blocks
    if worker.runs or not spared:
        _retry(cycle, function, worker, event, never_bound=was_binding and not function.is_ready)
    if function.unloaded:
        refuse_unloaded(cycle, function)
    cycle.mark(function)
    if may_be_at_fault and not spared:
        functions.fail(cycle, function, event.error, event.reason)
        has_siblings = len(function.family.members) > 1
        if has_siblings and (function.spec.id in worker.binds or any(run.of(function) for run in worker.runs.values())):
            record_death(cycle, function)


def record_death(cycle: Cycle, function: Function) -> None:
    """Record that a worker died or hung in a run or a bind of the function; the second time the function gets a
    separate family.
    """
    again, function.runs_at_death = is_suspect(function), function.runs
    if not again or function.removed or len(function.family.members) == 1:
        return
    cycle.explain(function, "isolate", "workers died or hung twice in its runs or binds: it gets separate ones")
    for other in list(function.workers.values()):
        stop_using(cycle, other, function, "its function has separate workers")
    families.isolate(cycle, function)


def _retry(cycle: Cycle, function: Function, worker: Worker, event: WorkerExited, never_bound: bool) -> None:
    """Retry the requests of a dead worker that have attempts left, and refuse the others with a clear error.

    With `never_bound` this includes all waiting requests: the function was not bound yet in this worker, and no other
    has it.
    """
    requests = cycle.state.requests
    current = tuple(id_ for run in worker.runs.values() for id_ in run.of(function))
    affected = current or (tuple(function.queue) if never_bound else ())
    error, reason = ("NoSpaceError", worker.stopped_for) if worker.stopped_for else (event.error, event.reason)
    for id_ in affected:
        request = requests.get(id_)
        if request is not None:
            request.failures += 1
            if not may_retry(request, cycle.config):
                refuse(cycle, id_, error, f"function {function.spec.id} failed in every attempt: {reason}")
    still_open = tuple(id_ for id_ in affected if id_ in requests)
    if current:
        queueing.put_back(function.queue, still_open, requests)
    elif affected:
        function.queue.clear()
        function.queue.extend(still_open)

"""How is a function bound in a worker of its family, and how is it unbound?

A bind takes a slot of the worker and a core, as a run does. What it adds to the worker's memory is little, and counts
as soon as it is measured. An unbind takes no time: its worker hears of it before anything else that comes later.
"""

from overwinter.core.actions import Bind, Unbind
from overwinter.core.ids import FunctionId, OperationId, Seconds
from overwinter.scheduler import families
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.operation import Operation
from overwinter.scheduler.operations import OVERDUE, UNKNOWN_S, drain, end, keep_cores, set_to_work, slots_changed, stop
from overwinter.scheduler.policies import keepalive
from overwinter.scheduler.resources import bind_owner
from overwinter.scheduler.state import Binding, Function, Worker

SMOOTHING = 0.2


def worker_to_bind_in(function: Function) -> Worker | None:
    """A worker of its family with a slot in which the function can be bound: the one with most of them."""
    id_ = function.spec.id
    free = [each for each in function.usable() if each.has_slot and id_ not in each.bound]
    return max(free, key=lambda each: (each.slots, -each.id), default=None)


def begin_bind(cycle: Cycle, function: Function, worker: Worker) -> None:
    """Bind a function in a worker of its family."""
    now, id_, bind_s = cycle.now, function.spec.id, function.family.bind_s
    operation = OperationId(next(cycle.bind_ids))
    set_to_work(cycle, worker)
    slots_changed(cycle, worker)
    hangs_at = now + cycle.config.start_timeout_s
    overdue_at = now + max(UNKNOWN_S, OVERDUE * bind_s)
    bind = worker.binds[id_] = Operation(function, now, now + bind_s, overdue_at, hangs_at, id=operation)
    worker.bound[id_] = Binding(function)
    function.workers[worker.id] = worker
    keep_cores(cycle, function, bind_owner(operation), bind, 1)
    cycle.timers.arm(worker.id, hangs_at)
    if function.slice_from is None:
        function.slice_from, cycle.bytes_changed = now, True
    for request in function.queue:
        if cycle.state.requests[request].start == "host":
            cycle.state.requests[request].start = "bound"
    cycle.actions.append(Bind(worker.id, id_, operation))
    cycle.decide(function, "bind", _why(function, worker))


def _why(function: Function, worker: Worker) -> str:
    others = len(worker.bound) - 1
    has = f"worker {worker.id}, which has {others} {'other' if others == 1 else 'others'} of its family, has a slot"
    bind_s, wake_s = function.family.bind_s, function.latency.wake_s
    return f"{has}: a bind takes about {1e3 * bind_s:.1f} ms, a worker of its own {1e3 * wake_s:.0f}"


def end_bind(cycle: Cycle, worker: Worker, id_: FunctionId, operation: OperationId) -> Binding | None:
    """A worker answered a bind; None: nobody waits for that any more."""
    bind = worker.binds.get(id_)
    if bind is None or bind.id != operation:
        return None
    del worker.binds[id_]
    end(cycle, bind_owner(operation))
    if worker.is_idle:
        worker.since = cycle.now
    return worker.bound[id_]


def observe(function: Function, seconds: float) -> None:
    """A bind took so long."""
    family = function.family
    family.bind_s += SMOOTHING * (seconds - family.bind_s)


def let_go(cycle: Cycle, worker: Worker, function: Function, why: str, until: Seconds | None = None) -> None:
    """A worker runs nothing more of a function: it unbinds it when it has done what it has, and what it still does then
    is refused at `until`. One that has nothing else drains, and stops if it has nothing to do.
    """
    if worker.stopping:
        return
    id_ = function.spec.id
    if all(binding.leaving for other, binding in worker.bound.items() if other != id_):
        if until is not None and not worker.runs:
            stop(cycle, worker)
        else:
            drain(cycle, worker, why, until)
        return
    binding = worker.bound[id_]
    if not binding.leaving:
        cycle.decide(function, "unbind", f"worker {worker.id} goes on with others: {why}")
    binding.leaving, binding.until = True, until
    if until is not None:
        cycle.timers.arm(worker.id, until)
    unbind_if_done(cycle, worker, binding)


def unbind_if_done(cycle: Cycle, worker: Worker, binding: Binding) -> None:
    """Unbind a function that leaves a worker, if nothing of it is under way there."""
    function, id_ = binding.function, binding.function.spec.id
    if not binding.leaving or worker.stopping or worker.works_for(id_):
        return
    forget(worker, function)
    slots_changed(cycle, worker)
    cycle.actions.append(Unbind(worker.id, id_))
    if not function.removed:
        cycle.mark(function)
    families.mark(cycle, worker.family)


def forget(worker: Worker, function: Function) -> None:
    """The worker has the function no more."""
    del worker.bound[function.spec.id]
    function.workers.pop(worker.id, None)


def unbind_unused(cycle: Cycle, worker: Worker) -> None:
    """Let those go that have not run for as long as they may stay, if that has an end, all but the last."""
    for binding in list(worker.bound.values()):
        function = binding.function
        if binding.leaving or function.queue or worker.works_for(function.spec.id):
            continue
        is_last = sum(not other.leaving for other in worker.bound.values()) <= 1
        if not is_last and function.used + keepalive.at_most_s(function, cycle.policy) <= cycle.now:
            let_go(cycle, worker, function, "it has not run for long")


def unbind_half(cycle: Cycle, worker: Worker) -> None:
    """Let half of those go that run nothing, those that ran longest ago, all but one of all that it has."""
    if worker.stopping:
        return
    idle = [each for each in worker.bound.values() if not worker.works_for(each.function.spec.id) and not each.leaving]
    staying = sum(not each.leaving for each in worker.bound.values())
    idle.sort(key=lambda each: (each.function.used, each.function.spec.id))
    for binding in idle[: min((len(idle) + 1) // 2, staying - 1)]:
        let_go(cycle, worker, binding.function, "its worker takes more than it was to need")

"""Binds functions in workers of their family, and unbinds them.

A bind takes a slot of the worker and a core, as a run does. The memory that it is expected to add to the worker counts
from its start until it has ended and the worker is measured. The estimate is the smoothed memory that the family's
workers take beyond the need of one function, divided by the number of bound functions. The part of the worker's claim
that the worker does not use yet is subtracted. If that memory is not free, the bind does not wait: a function that is
idle in the worker is unbound for it, and its memory counts for the new one; and another worker that is idle is stopped,
so that there is memory for the next bind. If no function in the worker is idle, the function waits until a run in the
worker ends. It also joins the queue for capacity, where private memory is released for it as it is for the start of a
worker. A bind that would not fit even if all workers but the busy ones of its family ended waits only for the run.

An unbind takes no time, because the worker receives the message before any later one.
"""

from collections.abc import Sequence

from overwinter.core.actions import Bind, Unbind
from overwinter.core.ids import FunctionId, OperationId, Seconds
from overwinter.scheduler import families, idle, order, victims
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.ledger import Claim
from overwinter.scheduler.operation import Operation
from overwinter.scheduler.operations import (
    OVERDUE,
    UNKNOWN_S,
    count_bytes,
    drain,
    end,
    hold_cores,
    set_to_work,
    slots_changed,
    stop,
)
from overwinter.scheduler.policies import keepalive
from overwinter.scheduler.resources import bind_owner
from overwinter.scheduler.state import Binding, Function, Worker

SMOOTHING = 0.2
UNBOUND_MAX = 256
"""The most functions that one check of a worker, or one shortage of memory, unbinds."""


def worker_to_bind_in(cycle: Cycle, function: Function, free: Sequence[Worker]) -> Worker | None:
    """Return the worker in which the function can be bound: of the `free` workers with memory for it, or with an idle
    function to replace, the one with the most free slots; None: there is none.
    """
    candidates = [
        each for each in free if _has_memory_for(cycle, function, each) or _least_recently_used(each) is not None
    ]
    return max(candidates, key=lambda each: (each.free_slots, -each.id), default=None)


def best_fit(function: Function) -> Worker | None:
    """Return the worker with a free slot whose claim a bind would increase least."""
    return min(free_workers(function), key=lambda each: (_growth(function, each), each.id), default=None)


def claim_of_queued(cycle: Cycle, function: Function) -> Claim:
    """Return the claim of what a function in the queue for capacity waits for: memory for a bind, or a worker."""
    if function.lacks_memory:
        worker = best_fit(function)
        return cycle.resources.of_bind(0 if worker is None else _growth(function, worker))
    return cycle.resources.of_start(function.point_to_start or function.latency.default_point)


def could_fit(cycle: Cycle, function: Function) -> bool:
    """Whether the claim of a function in the queue for capacity would fit if all workers ended but the busy ones of its
    family.
    """
    resources = cycle.resources
    at_work = [each for each in function.usable_workers() if each.is_serving and not each.is_idle]
    staying = [resources.of_worker(each.point, each.nbytes) for each in at_work]
    wanted = claim_of_queued(cycle, function).items()
    return all(each.fits(amount, sum(claim[each] for claim in staying)) for each, amount in wanted)


def free_workers(function: Function) -> list[Worker]:
    """The workers of the function's family that have a free slot, have not bound the function, and can bind it."""
    return [each for each in function.family.workers.values() if each.has_slot and function.can_bind_in(each)]


def _growth(function: Function, worker: Worker) -> int:
    """The memory that a bind is expected to add to the claim of its worker."""
    return max(0, worker.expected_bytes + int(function.family.bind_bytes) - worker.nbytes)


def _has_memory_for(cycle: Cycle, function: Function, worker: Worker) -> bool:
    """Whether the memory of a bind is free, and not reserved for the first in the queue for capacity."""
    memory, growth = cycle.resources.memory, _growth(function, worker)
    if not growth or memory.capacity is None:
        return True
    first = order.first_for_capacity(cycle)
    is_behind = first is not None and order.is_behind(cycle, function)
    reserved = claim_of_queued(cycle, first)[memory] if first is not None and is_behind else 0
    return memory.fits(growth + reserved)


def _least_recently_used(worker: Worker) -> Binding | None:
    """Return the idle function to replace in a worker: preferably without waiting requests, the least recently used
    one.
    """
    candidates = [
        each for each in worker.bound.values() if not each.draining and not worker.works_for(each.function.spec.id)
    ]
    return min(candidates, key=_when_used, default=None)


def _when_used(binding: Binding) -> tuple[bool, float, FunctionId]:
    """Order functions by their last use; those with waiting requests come last."""
    function = binding.function
    return bool(function.queue), function.used_at, function.spec.id


def _evict_idle_for_bind(cycle: Cycle, function: Function, worker: Worker) -> None:
    """Stop an idle worker if there is no memory for a bind, unless memory is already being freed."""
    memory, growth = cycle.resources.memory, _growth(function, worker)
    if memory.fits(growth) or memory.draining:
        return
    victim = victims.idle_for_capacity(cycle, function, cycle.resources.of_bind(growth)).worker
    if victim is not None:
        idle.evict(cycle, victim)


def begin_bind(cycle: Cycle, function: Function, worker: Worker) -> None:
    """Bind a function in a worker of its family; without free memory it replaces an idle function."""
    now, id_, bind_s = cycle.now, function.spec.id, function.family.bind_s
    replaced = None if _has_memory_for(cycle, function, worker) else _least_recently_used(worker)
    # A replaced function's memory counts for the new one until the worker is measured.
    added = 0 if replaced is not None else int(function.family.bind_bytes)
    operation = OperationId(next(cycle.bind_ids))
    set_to_work(cycle, worker)
    if replaced is not None:
        _evict_idle_for_bind(cycle, function, worker)
    slots_changed(cycle, worker)
    hangs_at = now + cycle.config.start_timeout_s
    overdue_at = now + max(UNKNOWN_S, OVERDUE * bind_s)
    bind = worker.binds[id_] = Operation(function, now, now + bind_s, overdue_at, hangs_at, id=operation)
    if added:
        worker.coming_bytes += added
        count_bytes(cycle, worker)
    worker.bound[id_] = Binding(function)
    if worker.keep_alive_s is not None:
        worker.keep_alive_s = max(worker.keep_alive_s, keepalive.at_most_s(function, cycle.policy))
    function.workers[worker.id] = worker
    hold_cores(cycle, function, bind_owner(operation), bind, 1, serves=not function.wants_wake)
    cycle.timers.arm(worker.id, hangs_at)
    if function.blocks_usable_from is None:
        function.blocks_usable_from = now
    # The function is in use again. If its time slice in the host store is over, it may be drained for functions that
    # wait for bytes.
    cycle.bytes_changed = True
    cycle.actions.append(Bind(worker.id, id_, operation))
    cycle.explain(function, "bind", _why(function, worker))
    if replaced is not None:
        stop_using(cycle, worker, replaced.function, f"there is no private memory for {id_} beside it")


def _why(function: Function, worker: Worker) -> str:
    others = len(worker.bound) - 1
    bound = f"{others} other {'function is' if others == 1 else 'functions are'} bound"
    has = f"worker {worker.id}, in which {bound}, has a free slot"
    bind_s, wake_s = function.family.bind_s, function.latency.wake_s
    return f"{has}: a bind takes about {1e3 * bind_s:.1f} ms, a new worker {1e3 * wake_s:.0f}"


def end_bind(cycle: Cycle, worker: Worker, id_: FunctionId, operation: OperationId) -> Binding | None:
    """Handle the answer to a bind, and return the binding; None: the bind is no longer awaited."""
    bind = worker.binds.get(id_)
    if bind is None or bind.id != operation:
        return None
    del worker.binds[id_]
    end(cycle, bind_owner(operation))
    if worker.is_idle:
        worker.since = cycle.now
    return worker.bound[id_]


def observe(function: Function, seconds: float) -> None:
    """Update the estimate of a bind's time."""
    family = function.family
    family.bind_s += SMOOTHING * (seconds - family.bind_s)


def record_bind(cycle: Cycle, function: Function) -> None:
    """Record in the waiting requests that a bind was what they needed, unless their blocks came from disk."""
    for id_ in function.queue:
        if cycle.state.requests[id_].start == "host":
            cycle.state.requests[id_].start = "bound"


def stop_using(
    cycle: Cycle, worker: Worker, function: Function, why: str, until: Seconds | None = None, marks: bool = True
) -> None:
    """Stop using a worker for a function: unbind the function after its runs, and refuse the requests of those that
    have not ended at `until`. `marks`: as in `unbind_if_done`.

    If no other function stays bound, the worker drains, and is stopped when it is idle; with `until`, at once if it has
    no run.
    """
    if worker.stopping:
        return
    id_ = function.spec.id
    if all(binding.draining for other, binding in worker.bound.items() if other != id_):
        if until is not None and not worker.runs:
            stop(cycle, worker)
        else:
            drain(cycle, worker, why, until)
        return
    binding = worker.bound[id_]
    if not binding.draining:
        cycle.explain(function, "unbind", f"worker {worker.id} continues with other functions: {why}")
    binding.draining, binding.until = True, until
    if until is not None:
        cycle.timers.arm(worker.id, until)
    unbind_if_done(cycle, worker, binding, marks)


def was_unloaded(worker: Worker, function: Function) -> bool:
    """Whether the function leaves the worker because it was unloaded, even if it is loaded again by now."""
    binding = worker.bound.get(function.spec.id)
    return binding is not None and binding.unloaded


def unbind_if_done(cycle: Cycle, worker: Worker, binding: Binding, marks: bool = True) -> None:
    """Unbind a function that leaves a worker if it has no operation in progress there. `marks`: mark the functions that
    may use the worker now; otherwise the caller marks them.
    """
    function, id_ = binding.function, binding.function.spec.id
    if not binding.draining or worker.stopping or worker.works_for(id_):
        return
    forget(worker, function)
    slots_changed(cycle, worker)
    if worker.is_idle and (worker.family.keep_alive_members or cycle.policy.keep_alive != "unlimited"):
        # The unbound function may have had the longest keep-alive.
        cycle.timers.arm(worker.id, cycle.now)
    cycle.actions.append(Unbind(worker.id, id_))
    cycle.mark(function)
    if marks:
        families.mark(cycle, worker.family)


def forget(worker: Worker, function: Function) -> None:
    """The function is no longer bound in the worker."""
    del worker.bound[function.spec.id]
    worker.keep_alive_s = None
    function.workers.pop(worker.id, None)


def unbind_unused(cycle: Cycle, worker: Worker) -> None:
    """Unbind functions that have been idle for their keep-alive, if they have one, except the last function. A call
    unbinds at most UNBOUND_MAX.
    """
    before = staying = sum(not each.draining for each in worker.bound.values())
    least = max(1, before - UNBOUND_MAX)
    for binding in list(worker.bound.values()):
        function = binding.function
        if binding.draining or function.queue or worker.works_for(function.spec.id):
            continue
        is_old = function.used_at + keepalive.at_most_s(function, cycle.policy) <= cycle.now
        if is_old and staying > least:
            staying -= 1
            stop_using(cycle, worker, function, "it has not been used for a long time", marks=False)
    if staying < before:
        families.mark(cycle, worker.family)


def unbind_half(cycle: Cycle, worker: Worker) -> None:
    """Unbind half of the idle functions, but at most UNBOUND_MAX and never the worker's last one, the least recently
    used first.
    """
    if worker.stopping:
        return
    unused = [
        each for each in worker.bound.values() if not worker.works_for(each.function.spec.id) and not each.draining
    ]
    staying = sum(not each.draining for each in worker.bound.values())
    unused.sort(key=lambda each: (each.function.used_at, each.function.spec.id))
    leaving = unused[: min((len(unused) + 1) // 2, staying - 1, UNBOUND_MAX)]
    for binding in leaving:
        stop_using(cycle, worker, binding.function, "its worker takes more memory than expected", marks=False)
    if leaving:
        families.mark(cycle, worker.family)

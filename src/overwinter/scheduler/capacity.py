"""Stops or drains workers (victims.py chooses them) to free capacity for the functions that wait for it."""

from itertools import islice
from math import inf

from overwinter.core.ids import Seconds
from overwinter.scheduler import ahead, idle, memory, order, victims
from overwinter.scheduler.binding import claim_of_queued, could_fit
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.functions import fail
from overwinter.scheduler.ledger import Claim
from overwinter.scheduler.operations import drain, stop
from overwinter.scheduler.state import Function, Worker
from overwinter.scheduler.tenant import Tenant
from overwinter.scheduler.wants import wants_capacity

SERVED_AT_ONCE = 8
"""The most waiting functions for which workers are drained at the same time."""


def free_for_queue(cycle: Cycle) -> None:
    """Drain workers for the first functions in the queue, until there will be capacity for each, or none may be drained
    now.
    """
    first = order.first_for_capacity(cycle)
    if first is not None and could_fit(cycle, first) and memory.stop_excessive(cycle, first):
        return
    future = victims.FutureClaims(cycle)
    for function in list(islice(order.queue_for_capacity(cycle), SERVED_AT_ONCE)):
        if function.has_usable_worker and not (could_fit(cycle, function) and wants_capacity(cycle, function)):
            look_again(cycle, function)
            return
        wanted = claim_of_queued(cycle, function)
        while not future.has_capacity(function, wanted):
            if not _free_capacity(cycle, future, function, wanted):
                break
        if not future.has_capacity(function, wanted, overdue_end=True):
            return
        future.add(function, wanted)
        _watch_draining(cycle, cycle.state.tenants[function.spec.tenant])


def _watch_draining(cycle: Cycle, tenant: Tenant) -> None:
    """Serve the queue again when the next run in a worker that drains without a time limit is overdue: until then the
    worker counts as ended.
    """
    times = (victims.overdue_at(worker) for worker in tenant.draining_without_limit.values())
    at = min((each for each in times if each > cycle.now), default=inf)
    if at < inf:
        cycle.timers.arm("capacity", at)


def look_again(cycle: Cycle, function: Function) -> None:
    """Ask a waiting function for its want again, and serve the queue again even if the function stays in it."""
    cycle.mark(function)
    cycle.capacity_changed = True


def _free_capacity(cycle: Cycle, future: victims.FutureClaims, function: Function, wanted: Claim) -> bool:
    """Stop a process forked ahead, or if none would help, stop or drain a worker; False: nothing may be stopped now."""
    if ahead.stop_for(cycle, function, wanted):
        return True
    victim = future.victim(function, wanted)
    if victim.worker is None:
        if victim.at < inf:
            cycle.timers.arm("capacity", victim.at)
        return False
    if victim.worker.is_idle:
        idle.evict(cycle, victim.worker)
        return True
    if victim.worker.start is not None:
        _kill_start(cycle, victim.worker, victim.worker.start.function)
        return True
    other = victim.worker.tenant != function.spec.tenant
    until = Seconds(cycle.now + cycle.config.drain_timeout_s) if other else None
    drain(cycle, victim.worker, "its time slice is over, and others wait for capacity", until)
    return True


def _kill_start(cycle: Cycle, worker: Worker, function: Function) -> None:
    """Kill a worker whose start takes too long while another tenant waits for capacity."""
    limit_s = cycle.config.drain_timeout_s
    why = f"a worker of {function.spec.id} was not ready after {limit_s:g} s, and another tenant needed capacity"
    stop(cycle, worker, kill=True)
    if not function.removed:
        fail(cycle, function, "OverloadedError", why)

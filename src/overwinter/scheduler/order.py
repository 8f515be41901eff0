"""The queues: which function waits for which resource, and which one is next.

A function has one want at a time, and waits in the queue of the one resource that its want lacks.

* Cores: if more runs were in progress than there are cores, the kernel would share the cores equally, and all of them
  could miss their SLO. Requests that can still meet it, or have a level before ORDINARY, are first, by priority and
  then by due time; then the late ones, those of the function that has waited longest first. Every LATE_EVERY-th time
  that a core is assigned, a late request gets it, so that each is answered eventually; a function with requests of both
  kinds is in both lists. An additional run may begin for a request that would otherwise be late and is not late at the
  lower speed, so that short runs need not wait for long ones: one, and one more for each further tenant that holds
  cores. So may one operation of each tenant whose operations hold no core: the kernel then shares the cores among
  the tenants.
* Worker capacity (the number, memory and concurrency of workers), and private memory for binds: the tenant with the
  smallest share is first, and tenants with their maximum of workers are last; of the functions of a tenant, those
  without a worker are first, then the others, each the longest waiting first.
* Bytes of a host store: the longest waiting function first.
* Devices: by the device time of the tenants; for the functions of each, as the queueing policy decides
  (device_order.py).
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import chain, islice

from overwinter.core.ids import FunctionId, TenantId
from overwinter.scheduler.core_queue import CoreQueue
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.operations import watch_overdue
from overwinter.scheduler.policies.queueing import ORDINARY, order_late
from overwinter.scheduler.policy_failures import expected_s
from overwinter.scheduler.request import Request
from overwinter.scheduler.state import Function, QueueName
from overwinter.scheduler.tenant import Tenant

LATE_EVERY = 10
URGENT_CHECKED = 16
"""The most functions waiting for a core that are checked for an additional urgent run."""
INVALID_MAX = 16
"""The heap `CoreQueue.due` is rebuilt when it has about this many more invalid entries than valid ones."""
UNSERVED_CHECKED = 64
"""The most waiting functions of a tenant without a core that are compared, to find the one that is due first."""
REQUESTS_CHECKED = 32
"""The number of requests at the end of a function's queue that are checked for late ones: `arrange` moves those there.
"""
SHARED_SLOWDOWN = 1.5
"""The assumed slowdown while one run more than the cores is in progress, as with three runs on two cores."""
FREE_ONE_IN = 16
"""One in this many workers is kept free for other tenants."""


def join(cycle: Cycle, function: Function, queue: QueueName) -> None:
    """Join this queue, and leave any other; a function that is already in it keeps its position, unless its first
    request or its usable workers have changed.
    """
    if function.waits_in is not None and function.waits_in != queue:
        leave(cycle, function)
    function.waits_in = queue
    if queue == "cores":
        _join_cores(cycle, function)
    elif queue == "capacity":
        _join_for_capacity(cycle, function)
    elif queue == "devices":
        cycle.state.pool.waiting.join(function)
        cycle.devices_changed = True
    elif function.spec.id not in cycle.state.waiting_for_bytes:
        cycle.state.waiting_for_bytes[function.spec.id] = None
        cycle.bytes_changed = True


def leave(cycle: Cycle, function: Function) -> None:
    """Leave the queue."""
    if function.waits_in is None:
        return
    id_, state = function.spec.id, cycle.state
    if function.waits_in == "cores":
        state.core_queue.timely.pop(id_, None)
        state.core_queue.late.pop(id_, None)
        own = state.core_queue.tenants[function.spec.tenant]
        own.pop(id_)
        if not own:
            del state.core_queue.tenants[function.spec.tenant]
        # It may have needed more cores than the functions behind it.
        cycle.cores_changed = True
    elif function.waits_in == "capacity":
        tenant = state.tenants[function.spec.tenant]
        tenant.first_workers.pop(id_, None)
        tenant.more_workers.pop(id_, None)
        if tenant.first_waiting is None:
            del state.waiting_for_capacity[tenant.id]
        function.point_to_start, function.lacks_memory = None, False
        cycle.capacity_changed = True
    elif function.waits_in == "bytes":
        del state.waiting_for_bytes[id_]
        cycle.bytes_changed = True
    else:
        state.pool.waiting.leave(function)
        cycle.devices_changed = True
    function.waits_in = None


# Cores


def waits_for_cores(cycle: Cycle, function: Function) -> bool:
    """Whether the function's next operation has to wait for a core.

    User code may wait for something other than a core, and a trial or a load serves no request.
    """
    return cycle.orders_cores and not function.spec.has_handler and not function.wants_wake


def arrange(cycle: Cycle, function: Function, late_first: bool = False) -> None:
    """If the first request is late, move those that can be in time to the front. With `late_first`, move the late ones
    to the front in any case.
    """
    if function.spec.settings.slo_ms is None or len(function.queue) < 2:
        return
    needed_s = _needed_s(cycle, function)
    if late_first or cycle.now + needed_s > _first(cycle, function).due:
        order_late(function.queue, cycle.state.requests, cycle.now + needed_s, late_first)


def needs(function: Function) -> int:
    """The cores of the function's next operation."""
    ready = next(iter(function.workers_with_slot()), None)
    return 1 if ready is None else ready.point.run_cores


def has_spare_core(cycle: Cycle) -> bool:
    """Whether no function waits for a core or capacity for a worker, and either no core is busy or at least two are
    free: a deferrable operation takes one.
    """
    busy = cycle.resources.load.taken
    return not (cycle.state.waiting_for_capacity or cycle.state.core_queue.waits) and (
        not busy or busy + 1 < cycle.cores
    )


def first_of_unserved(cycle: Cycle) -> Function | None:
    """Return a waiting function whose tenant has no operation that holds a core; None if there is none. It gets cores
    even if none is free.

    The kernel shares the cores among the tenants, so that the runs of others cannot stop those of a tenant.
    """
    state, served = cycle.state, _served(cycle)
    own = next((functions for tenant, functions in state.core_queue.tenants.items() if tenant not in served), None)
    if own is None:
        return None
    first = [state.functions[id_] for id_ in islice(own, UNSERVED_CHECKED)]
    return min(first, key=lambda each: (_first(cycle, each).level, _first(cycle, each).due))


def _served(cycle: Cycle) -> set[TenantId]:
    """The tenants whose operations hold cores."""
    return {each.function.spec.tenant for each in cycle.state.holding_cores.values()}


def is_turn_of_late(count: int) -> bool:
    """Whether, after this many assigned cores or begun runs, the next one is for late requests."""
    return (count + 1) % LATE_EVERY == 0


def first_for_cores(cycle: Cycle) -> Function | None:
    """The function that gets the next free core; None: none waits."""
    queue, functions = cycle.state.core_queue, cycle.state.functions
    timely = _first_timely(cycle)
    if queue.late and (timely is None or is_turn_of_late(queue.assigned)):
        return functions[next(iter(queue.late))]
    return timely


def urgent(cycle: Cycle) -> Function | None:
    """The function whose first request justifies a run beyond the number of cores, or None."""
    cores, now, state = cycle.resources.cores, cycle.now, cycle.state
    if cores.taken > cycle.cores + max(0, len(_served(cycle)) - 1):
        return None
    ends = min((operation.ends for operation in state.holding_cores.values()), default=now)
    wait_s = max(0.0, ends - now)
    best: tuple[tuple[int, float], Function] | None = None
    queue = state.core_queue
    valid = (entry for entry in queue.due if queue.timely.get(entry[-1]) is entry)
    for level, due, _, id_ in islice(valid, URGENT_CHECKED):
        function = state.functions[id_]
        needed_s = _needed_s(cycle, function)
        is_urgent = SHARED_SLOWDOWN * needed_s <= due - now < wait_s + needed_s and needs(function) == 1
        if is_urgent and (best is None or (level, due) < best[0]):
            best = (level, due), function
    return None if best is None else best[1]


def _join_cores(cycle: Cycle, function: Function) -> None:
    queue, id_ = cycle.state.core_queue, function.spec.id
    arrange(cycle, function)
    first = _first(cycle, function)
    level, due = first.level, first.due
    queue.tenants.setdefault(function.spec.tenant, {}).setdefault(id_)
    cycle.cores_changed = True
    if not queue.waits:
        watch_overdue(cycle)
    needed_s = _needed_s(cycle, function)
    is_late = level >= ORDINARY and cycle.now + needed_s > due
    if is_late or _has_late(cycle, function, needed_s):
        queue.late.setdefault(id_)
    else:
        queue.late.pop(id_, None)
    if is_late:
        queue.timely.pop(id_, None)
        return
    before = queue.timely.get(id_)
    if before is not None and before[:2] == (level, due):
        return
    queue.number += before is None
    entry = (level, due, queue.number if before is None else before[2], id_)
    queue.timely[id_] = entry
    if len(queue.due) < 2 * len(queue.timely) + INVALID_MAX:
        heappush(queue.due, entry)
    else:
        queue.due = list(queue.timely.values())
        heapify(queue.due)


def _first_timely(cycle: Cycle) -> Function | None:
    """Return the first function of `due` whose first request does not count as late. Those before it join the queue
    again, because their first request has become late.
    """
    queue = cycle.state.core_queue
    while _drop_invalid(queue):
        level, due, _, id_ = queue.due[0]
        function = cycle.state.functions[id_]
        if level < ORDINARY or cycle.now + _needed_s(cycle, function) <= due:
            return function
        heappop(queue.due)
        del queue.timely[id_]
        _join_cores(cycle, function)
    return None


def _drop_invalid(queue: CoreQueue) -> bool:
    """Remove the entries at the front of `due` that are not valid any more; return whether any entry is left."""
    while queue.due and queue.timely.get(queue.due[0][-1]) is not queue.due[0]:
        heappop(queue.due)
    return bool(queue.due)


def _first(cycle: Cycle, function: Function) -> Request:
    return cycle.state.requests[function.queue[0]]


def _has_late(cycle: Cycle, function: Function, needed_s: float) -> bool:
    """Whether a late request waits behind those that can be in time, as far as is checked."""
    settings, requests = function.spec.settings, cycle.state.requests
    if settings.slo_ms is None or settings.late == "refuse":
        return False
    return any(requests[id_].due < cycle.now + needed_s for id_ in islice(reversed(function.queue), REQUESTS_CHECKED))


def _needed_s(cycle: Cycle, function: Function) -> float:
    """The expected seconds until the function's first request is answered, if it gets a core now."""
    state = cycle.state
    for worker in function.workers.values():
        if worker.is_serving:
            return expected_s(state, function, worker.point, 1) or 0.0
    if len(function.family.members) > 1:
        for worker in function.usable_workers():
            if worker.is_serving:
                return (expected_s(state, function, worker.point, 1) or 0.0) + function.family.bind_s
    return (expected_s(state, function, function.latency.default_point, 1) or 0.0) + function.latency.wake_s


# Worker capacity


def share(cycle: Cycle, tenant: TenantId, workers: int = 0, nbytes: int = 0) -> float:
    """Return a tenant's dominant share, which is the largest of its shares of the workers, their memory and their
    concurrent runs, as if it had `workers` more of them and `nbytes` more of their memory.

    Workers that stop or drain with a time limit do not count.
    """
    resources, config = cycle.resources, cycle.config
    part = (resources.workers.staying(tenant) + workers) / cycle.workers_max
    if config.memory_bytes is not None:
        part = max(part, (resources.memory.staying(tenant) + nbytes) / config.memory_bytes)
    if config.runs_max is not None:
        part = max(part, (resources.runs.staying(tenant) + workers) / config.runs_max)
    return part


def tenant_workers_max(cycle: Cycle) -> int:
    """The maximum of workers of one tenant: as configured, or else all, but for a part that is kept free for other
    tenants while there are any.
    """
    most, own = cycle.workers_max, cycle.config.tenant_workers_max
    if own is not None:
        return min(own, most)
    return most - (0 if len(cycle.state.tenants) <= 1 else most // FREE_ONE_IN)


def first_for_capacity(cycle: Cycle) -> Function | None:
    """The function that gets the next free worker capacity; None: none waits."""
    waiting = cycle.state.waiting_for_capacity
    if not waiting:
        return None
    if len(waiting) == 1:
        tenant = next(iter(waiting.values()))
    else:
        tenant = min(waiting.values(), key=lambda each: _rank(cycle, each))
    assert tenant.first_waiting is not None
    return cycle.state.functions[tenant.first_waiting]


def queue_for_capacity(cycle: Cycle) -> Iterator[Function]:
    """All functions that wait for capacity, in order."""
    for tenant in sorted(cycle.state.waiting_for_capacity.values(), key=lambda each: _rank(cycle, each)):
        for id_ in chain(tenant.first_workers, tenant.more_workers):
            yield cycle.state.functions[id_]


def is_behind(cycle: Cycle, function: Function) -> bool:
    """Whether other functions get worker capacity before this one."""
    first = first_for_capacity(cycle)
    if first is None or first is function:
        return False
    tenant = cycle.state.tenants[function.spec.tenant]
    if first.spec.tenant != tenant.id:
        return function.waits_in == "capacity" or _rank(cycle, cycle.state.tenants[first.spec.tenant]) <= _rank(
            cycle, tenant
        )
    before = tenant.first_workers or (tenant.more_workers if function.has_usable_worker else {})
    return bool(before) and next(iter(before)) != function.spec.id


def _join_for_capacity(cycle: Cycle, function: Function) -> None:
    id_, tenant = function.spec.id, cycle.state.tenants[function.spec.tenant]
    queue, other = tenant.first_workers, tenant.more_workers
    if function.has_usable_worker:
        queue, other = other, queue
    other.pop(id_, None)
    if id_ not in queue:
        queue[id_] = None
        cycle.capacity_changed = True
    cycle.state.waiting_for_capacity[tenant.id] = tenant


def _rank(cycle: Cycle, tenant: Tenant) -> tuple[bool, float]:
    """The order of tenants: by share, those at their maximum last."""
    return cycle.resources.workers.of(tenant.id) >= tenant_workers_max(cycle), share(cycle, tenant.id)


# Bytes of a host store


def first_for_bytes(cycle: Cycle) -> Function | None:
    """The function that gets the next space in a host store; None: none waits."""
    id_: FunctionId | None = next(iter(cycle.state.waiting_for_bytes), None)
    return None if id_ is None else cycle.state.functions[id_]

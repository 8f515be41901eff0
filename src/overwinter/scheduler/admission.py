"""Assigns resources to waiting functions (devices: device_admission.py). Elsewhere operations begin only ahead of
requests (ahead.py, device_ahead.py, replicas.py, slices.py), except a load that is tried once more (facts.py).

Each changed function is asked for its want: the operation that it needs next (wants.py). A want that fits begins at
once, unless other functions wait for the same resource (for worker capacity, only those before it in the order count);
otherwise the function joins the queue of the resource that it lacks, if others can release enough of it. Then the
queues are served in the order below, the first three each from its front, up to the first function that does not fit.
Free resources are reserved for that function, and other functions must release resources only for it. The exception is
worker capacity: workers are drained for several functions at once (capacity.py).

1. Worker capacity, and private memory for binds. The first in the queue also takes the next free core, because a
   function that wants a worker joins this queue only when it may have a core.
2. Cores, including the operations that may begin beyond the number of cores (order.py). If a core is left, functions
   that got no further worker while all cores were in use are asked again, at most ASKED_MAX in each step.
3. Bytes of a host store.
4. Devices of the pool (device_admission.py).
"""

from collections.abc import Sequence
from itertools import islice
from typing import assert_never

from overwinter.core.ids import Seconds
from overwinter.core.profile import Point
from overwinter.scheduler import ahead, capacity, device_admission, order, retention, shared_runs, shedding, victims
from overwinter.scheduler.any_device import move_to_devices, move_to_worker
from overwinter.scheduler.binding import begin_bind, best_fit, claim_of_queued, could_fit
from overwinter.scheduler.blocks import begin_load, missing_bytes
from overwinter.scheduler.counterpart import leave_calls, move_if_unusable
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.functions import give_up
from overwinter.scheduler.ledger import Claim
from overwinter.scheduler.limits import why_never_fits, why_never_runs
from overwinter.scheduler.operations import begin_run, begin_start
from overwinter.scheduler.policies.batching import Send, Wait
from overwinter.scheduler.sizing import points_to_start
from overwinter.scheduler.state import Function, Worker
from overwinter.scheduler.wants import (
    BindIn,
    Fork,
    FreeMemory,
    GiveUp,
    NeedBlocks,
    UseDevice,
    Want,
    cores_in_use,
    next_want,
)

ASKED_MAX = 16
"""The most functions that a step asks again whether they want a further worker, because a core is free."""


def admit(cycle: Cycle) -> None:
    """Assign free resources to wants, in order."""
    _serve_changed(cycle)
    waiting = cycle.state.core_queue.for_workers
    if waiting and cores_in_use(cycle) < cycle.cores:
        for id_ in list(islice(waiting, ASKED_MAX)):
            del waiting[id_]
            cycle.mark(cycle.state.functions[id_])
        _serve_changed(cycle)
        if waiting and cores_in_use(cycle) < cycle.cores:
            # The next step, which follows at once, asks more.
            cycle.timers.arm("cores", cycle.now)


def _serve_changed(cycle: Cycle) -> None:
    """Serve changed functions, then the queues, until nothing more begins."""
    changed, state = cycle.changed, cycle.state
    continues = True
    while continues:
        while changed:
            id_ = next(iter(changed))
            has_core = changed.pop(id_)
            function = state.functions.get(id_)
            if function is not None:
                serve(cycle, function, has_core)
        if not (
            state.waiting_for_capacity or state.waiting_for_bytes or state.core_queue.waits or _wants_device(cycle)
        ):
            # Usually nobody waits.
            cycle.capacity_changed = False
            return
        if state.waiting_for_capacity:
            _assign_capacity(cycle)
        else:
            cycle.capacity_changed = False
        if cycle.cores_changed and state.core_queue.waits:
            _assign_cores(cycle)
        if cycle.bytes_changed and state.waiting_for_bytes and not changed:
            _assign_bytes(cycle)
        if cycle.devices_changed and _wants_device(cycle) and not changed:
            device_admission.assign_devices(cycle)
            move_to_devices(cycle)
        continues = bool(changed) or _may_continue(cycle)


def _may_continue(cycle: Cycle) -> bool:
    """Whether a function waits for a resource that may have become free."""
    state = cycle.state
    return bool(
        (cycle.capacity_changed and state.waiting_for_capacity)
        or (cycle.cores_changed and state.core_queue.waits)
        or (cycle.bytes_changed and state.waiting_for_bytes)
        or (cycle.devices_changed and _wants_device(cycle))
    )


def _wants_device(cycle: Cycle) -> bool:
    """Whether a function waits for a device, or could use one."""
    return bool(cycle.state.pool.waiting or cycle.state.pool.waiting_for_workers)


def serve(cycle: Cycle, function: Function, has_core: bool = False, late_first: bool = False) -> None:
    """Begin the function's wants one after the other, until it has none or must wait. For the first
    want, `has_core`: a core is reserved; `late_first`: late requests go first.
    """
    cycle.current, function.batch_at = function.spec.id, None
    cycle.state.core_queue.for_workers.pop(function.spec.id, None)
    is_any_device = function.spec.settings.device == "any"
    if is_any_device:
        move_if_unusable(cycle, function)
    while function.queue or function.wants_wake or (is_any_device and move_to_worker(cycle, function)):
        if len(function.queue) > 1 and cycle.policy.order == "due-time" and function.has_slot:
            order.arrange(cycle, function, late_first or (not has_core and order.is_turn_of_late(function.runs)))
        want = next_want(cycle, function)
        if want is None:
            order.leave(cycle, function)
            if function.queue and cycle.policy.eager and cores_in_use(cycle) >= cycle.cores:
                cycle.state.core_queue.for_workers[function.spec.id] = None
            break
        if not _begin(cycle, function, want, has_core):
            break
        has_core = late_first = False
    else:
        order.leave(cycle, function)
    if function.spec.id in cycle.state.functions:
        retention.settle(cycle, function)


def _begin(cycle: Cycle, function: Function, want: Want, has_core: bool) -> bool:
    """Begin a want if it fits; otherwise let the function wait, or refuse its requests. Return whether it began."""
    match want:
        case Send():
            return _run(cycle, function, want, has_core)
        case Fork() | NeedBlocks() if (why := why_never_runs(function)) is not None:
            give_up(cycle, function, why)
            return False
        case BindIn(worker):
            return _bind(cycle, function, worker, has_core)
        case Fork():
            return _fork(cycle, function, has_core)
        case FreeMemory():
            _wait_for_capacity(cycle, function, None, lacks_memory=True)
            return False
        case NeedBlocks():
            return _load(cycle, function)
        case GiveUp(why):
            give_up(cycle, function, why)
            return False
        case UseDevice():
            order.join(cycle, function, "devices")
            return False
        case Wait(seconds):
            function.batch_at = Seconds(cycle.now + seconds)
            cycle.timers.arm(function.spec.id, function.batch_at)
            order.leave(cycle, function)
            return False
        case _:
            assert_never(want)


# Cores


def _run(cycle: Cycle, function: Function, send: Send, has_core: bool) -> bool:
    """Send requests to a worker, if the function may use the cores for that now."""
    if not _has_cores(cycle, function, send.worker.point.run_cores, has_core):
        return False
    order.leave(cycle, function)
    if send.late and function.spec.settings.late == "refuse" and not function.family.slo_infeasible:
        shedding.shed(cycle, function, send)
    parts = shared_runs.take(cycle, function, send)
    if parts:
        begin_run(cycle, send.worker, parts)
        shared_runs.arm_for_overdue_suspects(cycle, send.worker)
    elif len(function.family.waiting) > 1:
        # Its requests were refused. The slot stays free, also for functions that `families.mark` has left out.
        cycle.timers.arm(send.worker.id, cycle.now)
    return True


def _bind(cycle: Cycle, function: Function, worker: Worker, has_core: bool) -> bool:
    """Bind the function in a worker of its family, if the function may use a core now."""
    if not _has_cores(cycle, function, 1, has_core):
        return False
    order.leave(cycle, function)
    begin_bind(cycle, function, worker)
    return True


def _has_cores(cycle: Cycle, function: Function, needed: int, has_core: bool) -> bool:
    """Whether the function may use this many cores now; if not, it joins the queue."""
    if has_core or (cycle.resources.cores.fits(needed) and not cycle.state.core_queue.waits):
        return True
    if not order.waits_for_cores(cycle, function):
        return True
    order.join(cycle, function, "cores")
    return False


def _assign_cores(cycle: Cycle) -> None:
    """Assign free cores to the functions in the queue. Beyond the number of cores, let urgent runs begin, and one
    operation of each tenant that holds no core.
    """
    queue, cores = cycle.state.core_queue, cycle.resources.cores
    while queue.waits:
        function, late_first = None, False
        if not cores.fits(1):
            function = order.urgent(cycle)
        else:
            first = order.first_for_cores(cycle)
            if first is not None and cores.fits(order.needs(first)):
                function, late_first = first, first.spec.id not in queue.timely or order.is_turn_of_late(queue.assigned)
                queue.assigned += 1
        function = function or order.first_of_unserved(cycle)
        if function is None:
            break
        order.leave(cycle, function)
        serve(cycle, function, True, late_first)
    cycle.cores_changed = False


# Worker capacity


def _fork(cycle: Cycle, function: Function, has_core: bool) -> bool:
    """Start workers while there is capacity and no other function is before this one, if it may use a core now."""
    if function.waits_in != "capacity" and not _has_cores(cycle, function, 1, has_core):
        return False
    starts = function.point_to_start
    if _may_start(cycle, function, has_core):
        # Ask the scaler only when a start is possible.
        points = points_to_start(cycle, function)
        if start_workers(cycle, function, points):
            return True
        starts = points[0]
    _wait_for_capacity(cycle, function, starts, lacks_memory=False)
    return False


def _wait_for_capacity(cycle: Cycle, function: Function, starts: Point | None, lacks_memory: bool) -> None:
    """Join the queue for capacity, if the want would fit after all workers but the busy ones of the function's family
    were stopped. Otherwise the function joins no queue, so that no other function waits behind it. It is asked again
    when a run in a worker of its family ends.
    """
    before = function.point_to_start, function.lacks_memory
    function.point_to_start, function.lacks_memory = starts, lacks_memory
    if could_fit(cycle, function):
        order.join(cycle, function, "capacity")
        if before != (starts, lacks_memory):
            # Other workers may be stopped for another claim.
            cycle.capacity_changed = True
        return
    order.leave(cycle, function)
    function.point_to_start, function.lacks_memory = None, False


def _may_start(cycle: Cycle, function: Function, has_core: bool) -> bool:
    """Whether asking the scaler for configurations can lead to a start."""
    if order.is_behind(cycle, function):
        return False
    resources, point = cycle.resources, function.latency.default_point
    if not resources.workers.fits(1) and ahead.usable_process(cycle, function, resources.of_start(point)) is None:
        return False
    return has_core or resources.cores.fits(1) or not order.waits_for_cores(cycle, function)


def start_workers(cycle: Cycle, function: Function, points: Sequence[Point]) -> int:
    """Start workers of these configurations while resources allow and no other function is before this one; return
    their number.
    """
    if function.spec.id == cycle.state.releasing:
        return 0
    for started, point in enumerate(points):
        if order.is_behind(cycle, function) or not _fits(cycle, function, cycle.resources.of_start(point)):
            return started
        order.leave(cycle, function)
        begin_start(cycle, function, point, ahead.take_over(cycle, function, point))
        # The first function in the queue may have had capacity until now, and waited only for a core.
        cycle.capacity_changed = True
    return len(points)


def has_capacity(cycle: Cycle, function: Function) -> bool:
    """Whether there is capacity for what a waiting function wants."""
    return _fits(cycle, function, claim_of_queued(cycle, function))


def _fits(cycle: Cycle, function: Function, wanted: Claim) -> bool:
    workers = cycle.resources.workers
    # A start can take over the claim of the process forked ahead that it uses.
    own = {} if ahead.usable_process(cycle, function, wanted) is None else ahead.claim(cycle)
    most = order.tenant_workers_max(cycle)
    if wanted.get(workers) and workers.of(function.spec.tenant) - own.get(workers, 0) >= most:
        return False
    return all(each.fits(amount, each.taken - own.get(each, 0)) for each, amount in wanted.items())


def _assign_capacity(cycle: Cycle) -> None:
    """Begin the want of the first function in the queue if there is capacity, otherwise free some."""
    may_stop, cycle.capacity_changed = cycle.capacity_changed, False
    while (function := order.first_for_capacity(cycle)) is not None:
        if function.lacks_memory and best_fit(function) is None:
            # The slot is no longer free.
            capacity.look_again(cycle, function)
            return
        if not has_capacity(cycle, function):
            if may_stop:
                capacity.free_for_queue(cycle)
            return
        if order.waits_for_cores(cycle, function) and not cycle.resources.cores.fits(1):
            return
        serve(cycle, function, has_core=True)
        if order.first_for_capacity(cycle) is function:
            return


# Bytes of a host store


def _load(cycle: Cycle, function: Function) -> bool:
    """Load the function's blocks, if no other function is before it, and there is space or it can be freed at once."""
    host, first = cycle.resources.host, order.first_for_bytes(cycle)
    if host.capacity is not None:
        behind = first is not None and first is not function
        waits = behind or not host.fits(missing_bytes(cycle, function))
        why = why_never_fits(function, host.capacity, victims.pinned_bytes(cycle, function)) if waits else None
        if why is not None:
            give_up(cycle, function, why)
            return False
        if behind or not retention.make_space(cycle, function):
            if not leave_calls(cycle, function) and function.waits_in != "bytes":
                order.join(cycle, function, "bytes")
                full_of = (
                    "unused blocks, which are being evicted" if retention.has_evicted_enough(cycle) else "blocks in use"
                )
                cycle.explain(function, "wait", f"the host store is full of {full_of}")
            return False
    order.leave(cycle, function)
    begin_load(cycle, function)
    return True


def _assign_bytes(cycle: Cycle) -> None:
    """Space may be free: the function that has waited longest for a host store tries again. If nothing more can be
    evicted, a function in use is drained for it, one at a time.
    """
    cycle.bytes_changed = False
    while (function := order.first_for_bytes(cycle)) is not None:
        serve(cycle, function)
        if order.first_for_bytes(cycle) is function:
            retention.drain_for_bytes(cycle)
            return

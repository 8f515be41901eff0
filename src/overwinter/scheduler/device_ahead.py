"""Prepares functions on idle devices, so that their first run there does not wait for a preparation.

An executor needs the program of a function, compiled and, on a virtual device, run once, and mappings of its blocks,
which a GPU's executor also registers. One executor at a time prepares one function: the most recently used one whose
program it does not have, while no function waits for a device, a core or capacity for a worker, and no core is busy or
at least two are free. The device stays free, because a run that is ordered ends the preparation early: before the next
call that reads a new weight (on a GPU: before the next block is registered), or by a kill of the executor
(`limit_preparation` in device_runs.py). Then the device prepares again when it has been idle for IDLE_S, so that a
client with one request after the other does not wait for a preparation at each of them. If an executor dies during a
preparation, or is killed because it hangs, the function is not prepared again, and others of its tenant only after
UNPREPARED_S. A death because of a missing block does not count, unless a block is missing twice in a row. The end of
the executor counts as a failure neither of the device nor of the requests that waited for the end of the preparation.
After a preparation that delays a run for longer than DELAY_MAX_S, no function of its tenant is prepared for
UNPREPARED_S either.
"""

from itertools import islice
from math import ceil

from overwinter.core.actions import PrepareOnDevice
from overwinter.core.events import PreparedOnDevice
from overwinter.core.ids import OperationId, Seconds, TenantId
from overwinter.scheduler.ahead import KEEP_S
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.device_runs import put_back
from overwinter.scheduler.operation import Operation
from overwinter.scheduler.order import has_spare_core
from overwinter.scheduler.pool import Device, Executor, Preparation, pool_record
from overwinter.scheduler.state import Function
from overwinter.scheduler.swaps import owner_of

PREPARATION_MAX_S = 20.0
"""The longest preparation: no other begins meanwhile."""
CANDIDATES_MAX = 256
"""The approximate number of functions of which one is chosen."""
UNPREPARED_S = 60.0
"""How long no function of a tenant is prepared after a preparation of one of them ended its executor, or delayed a run.
"""
IDLE_S = 1.0
"""How long a device must be idle after an interrupted preparation until the next one begins."""
DELAY_MAX_S = 0.1
"""A preparation may delay a run for this long without consequence: a usual operator or compilation takes less."""


def check(cycle: Cycle) -> None:
    """Begin a preparation, if a device is idle."""
    pool = cycle.state.pool
    _end_pauses(cycle)
    executors = [each.executor for each in pool.executors.values() if each.executor is not None]
    can_prepare = any(each.may_prepare for each in executors) and not any(each.preparing for each in executors)
    if not can_prepare or cycle.policy.device_ahead == "nothing" or pool.waiting or not has_spare_core(cycle):
        return
    for device in pool.executors.values():
        executor = device.executor
        if executor is None or not executor.is_idle or not executor.may_prepare:
            continue
        if executor.was_interrupted and cycle.now < executor.since + IDLE_S:
            cycle.timers.arm(executor.id, executor.since + IDLE_S)
            continue
        function = _next_function(cycle, device, executor)
        if function is not None:
            _begin(cycle, device, executor, function)
            return
        executor.may_prepare = False


def _end_pauses(cycle: Cycle) -> None:
    """Look again for functions to prepare when a tenant's pause is over."""
    pool, paused = cycle.state.pool, cycle.state.pool.unprepared_until
    ended = [tenant for tenant, until in paused.items() if until <= cycle.now]
    for tenant in ended:
        del paused[tenant]
    if ended:
        pool.look_for_preparations()
    if paused:
        cycle.timers.arm("devices", min(paused.values()))


def _next_function(cycle: Cycle, device: Device, executor: Executor) -> Function | None:
    """Return the function to prepare on a device: of those with a program that it lacks, the most recently used one.
    About CANDIDATES_MAX are considered, equally many of each tenant that the device serves, but at least one.
    """
    programs, last_used = set(executor.handed_over.values()), cycle.state.pool.last_used
    if len(executor.handed_over) >= cycle.config.prepared_max:
        return None
    tenants = list(last_used) if device.owner is None or device.owner[0] is None else [device.owner[0]]
    count = ceil(CANDIDATES_MAX / len(tenants)) if tenants else 0
    candidates = [
        each
        for tenant in tenants
        for each in islice(reversed(last_used.get(tenant, {}).values()), count)
        if each.loaded and each.spec.program not in programs and _suits(cycle, device, each)
    ]
    return max(candidates, key=lambda each: (each.used_at, each.spec.id), default=None)


def _suits(cycle: Cycle, device: Device, function: Function) -> bool:
    """Whether a function may be prepared now, and is likely to run on a device."""
    pooled, name, now = pool_record(function), device.config.name, cycle.now
    if pooled.preparation_failed or now < function.backoff_until or function.used_at + KEEP_S <= now:
        return False
    if now < cycle.state.pool.unprepared_until.get(function.spec.tenant, 0.0):
        return False
    if pooled.nbytes > device.config.memory_bytes or pooled.fixed_device not in (None, name) or name in pooled.unplaced:
        return False
    return owner_of(cycle, function) == device.owner


def _begin(cycle: Cycle, device: Device, executor: Executor, function: Function) -> None:
    id_, name = function.spec.id, device.config.name
    hangs_at = cycle.now + min(cycle.config.start_timeout_s, PREPARATION_MAX_S)
    operation = OperationId(next(cycle.run_ids))
    executor.preparing = Preparation(function, operation, hangs_at)
    executor.handed_over[id_] = None
    cycle.timers.arm(executor.id, hangs_at)
    cycle.actions.append(PrepareOnDevice(executor.id, name, id_, operation))
    cycle.explain(function, "ahead", f"{name} is idle, and prepares the program before the first request there")


def prepared(cycle: Cycle, event: PreparedOnDevice) -> None:
    """An executor has ended a preparation."""
    device = cycle.state.pool.executors.get(event.worker)
    executor = None if device is None else device.executor
    if executor is None or executor.preparing is None or executor.preparing.operation != event.operation:
        return
    function = executor.preparing.function
    spec = function.spec
    if cycle.now - executor.preparing.delays_since > DELAY_MAX_S:
        _leave_unprepared(cycle, spec.tenant)
    executor.preparing, executor.was_interrupted = None, event.interrupted
    if not event.interrupted:
        function.lost_blocks = False
    # It may have been unbound meanwhile.
    if spec.id in executor.handed_over and not event.interrupted:
        executor.handed_over[spec.id] = spec.program


def blocks_loaded(cycle: Cycle, function: Function) -> None:
    """The host store has the blocks of a function of the pool."""
    if function.pool is not None:
        cycle.state.pool.look_for_preparations()


def preparation_failed(cycle: Cycle, failed: Function, operation: Operation | None, spared: bool = False) -> None:
    """An executor died or hung while it prepared a function or prefetched its blocks. A run that was ordered has not
    begun. `spared`: the function may be prepared again.
    """
    cycle.mark(failed)
    if not spared:
        pool_record(failed).preparation_failed = True
        _leave_unprepared(cycle, failed.spec.tenant)
    if operation is None:
        return
    for part in operation.parts:
        put_back(cycle, part)
    # A function whose blocks were prefetched may wait for that, and need them again.
    for function in operation.functions:
        cycle.mark(function)


def _leave_unprepared(cycle: Cycle, tenant: TenantId) -> None:
    """Prepare no function of a tenant in the next UNPREPARED_S."""
    cycle.state.pool.unprepared_until[tenant] = Seconds(cycle.now + UNPREPARED_S)

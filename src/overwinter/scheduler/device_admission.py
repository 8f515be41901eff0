"""Assigns devices to the functions that wait for one.

The queueing policy orders the functions, the binding policy chooses among the free devices whose executor may run them,
and the eviction policy chooses what is evicted there. A function without such a device gets an executor: on a device
without one, or on one that serves others. Starting an executor takes long and empties the device, so an executor is
replaced only if

* a function waits and no device on which it fits serves its owner. The device of an owner without waiting functions is
  taken, or one that has served its owner for a time slice; later if the device's tenant has had less device time than
  the tenant that waits;
* or the owner's functions would wait longer for its own devices than for a start, and the device is not used, and not
  the only one of another tenant that used it lately: this tenant's next request would wait for a time slice.
"""

from bisect import bisect_left
from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush
from math import ceil, inf

from overwinter.core.ids import DeviceId, Seconds, TenantId
from overwinter.scheduler import (
    counterpart,
    device_order,
    device_runs,
    executors,
    fixed_devices,
    functions,
    residency,
    slices,
    swaps,
)
from overwinter.scheduler.counterpart import refuse_waiting
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.policies.device_binding import RULES, Choice
from overwinter.scheduler.policies.device_queueing import LONG_EVERY
from overwinter.scheduler.policy_failures import call_policy
from overwinter.scheduler.pool import Device, DeviceOwner, LastBinding, pool_record
from overwinter.scheduler.replacement import (
    idle_since,
    is_wanted,
    may_take_at,
    time_slice_ends,
)
from overwinter.scheduler.request import Request
from overwinter.scheduler.state import Function
from overwinter.scheduler.swaps import owner_of

FURTHER_S = 0.25
"""The pause after which functions behind the first ones are tried again while a device stays free."""


def assign_devices(cycle: Cycle) -> None:
    """Begin runs, and start or replace executors, for the functions that wait for a device; refuse requests that no
    device can run.
    """
    cycle.devices_changed = False
    devices, now = cycle.state.pool.devices.values(), cycle.now
    if any(each.executor is None or each.is_free(now) for each in devices):
        for function in _first(cycle):
            counterpart.move_if_unusable(cycle, function)
        _refuse_unservable(cycle)
    is_free = any(each.is_free(now) for each in devices)
    if cycle.config.device_isolation != "none" and (is_free or not _are_served(cycle)):
        _replace_for_unserved(cycle)
    if is_free:
        _serve_in_order(cycle)
    for device in devices if cycle.state.pool.waiting else ():
        executor = device.executor
        if executor is None and device.backoff_until > now:
            cycle.timers.arm("devices", device.backoff_until)
        elif executor is not None and executor.ready_at is None and executors.overdue_at(cycle, executor) > now:
            cycle.timers.arm("devices", executors.overdue_at(cycle, executor))


def _first(cycle: Cycle) -> list[Function]:
    """Return the waiting functions that a step looks at: all, if each must be bound to a device."""
    waiting = cycle.state.pool.waiting
    return list(waiting if fixed_devices.are_used(cycle) else waiting.first())


def _servable(cycle: Cycle) -> list[Function]:
    """Return the waiting functions that a device may serve: if functions are bound to devices, only those that are."""
    functions = _first(cycle)
    if not fixed_devices.are_used(cycle):
        return functions
    return [each for each in functions if fixed_devices.may_have_device(cycle, each)]


def _refuse_unservable(cycle: Cycle) -> None:
    """Refuse the requests of functions that no device in service can run, or move them to the counterparts. Under
    `infless`, functions that do not fit beside the bound ones wait.
    """
    pool, config = cycle.state.pool, cycle.config
    any_out = any(each.is_out(cycle.now) for each in pool.devices.values())
    for function in _first(cycle):
        pooled, id_ = pool_record(function), function.spec.id
        if fixed_devices.are_used(cycle) and fixed_devices.find_or_bind(cycle, function) is None:
            if cycle.policy.device_binding == "native":
                why = f"function {id_} needs {pooled.nbytes} bytes, and no device has as many beside bound functions"
                refuse_waiting(cycle, function, "NoSpaceError", why, config.retry_after_min_s)
                cycle.mark(function)
            else:
                counterpart.move_if_unusable(cycle, function)
            continue
        if not (any_out or pooled.unplaced):
            continue
        fitting = list(swaps.large_enough(cycle, function))
        if all(pooled.unplaced.get(each.config.name) for each in fitting):
            pooled.unplaced.clear()
            why = f"no device can hold each block of function {id_} ({pooled.nbytes} bytes in all) in contiguous memory"
            functions.give_up(cycle, function, f"{why}: serve with a larger device")
        elif any_out and all(each.is_out(cycle.now) and not _waits_for(function, each) for each in fitting):
            first = min(fitting, key=lambda each: each.backoff_until)
            wait_s = max(config.retry_after_min_s, first.backoff_until - cycle.now)
            # A failure in a run may be that of another tenant's function.
            fault = "runs there failed" if first.blamed else first.fault
            why = f"all devices for function {id_} are out of service: {first.config.name}: {fault}"
            refuse_waiting(cycle, function, "WorkerError", why, wait_s)
            cycle.mark(function)


def _waits_for(function: Function, device: Device) -> bool:
    """Whether a function waits for a device that is out of service: runs of other tenants failed there, and none of its
    own tenant. Requests of those tenants are refused meanwhile. Its own run may show that the device is sound.
    """
    return bool(device.blamed) and function.spec.tenant not in device.blamed.values()


# Runs


def _serve_in_order(cycle: Cycle) -> None:
    """Begin runs, and start executors, in the order of the queueing policy."""
    pool = cycle.state.pool
    # An executor that starts will serve one of the functions.
    coming = [each for each in pool.devices.values() if each.coming_owner is not None]
    candidates = [each for each in _servable(cycle) if each.queue]
    if long := device_order.waiting_long(cycle, candidates):
        _serve_one(cycle, long, _free(cycle))
    _serve(cycle, candidates, coming)
    # Those behind the first functions matter only where these leave a device free.
    if (free := _free(cycle)) and not fixed_devices.are_used(cycle):
        tenants = {None if each.owner is None else each.owner[0] for each in free}
        further = pool.waiting.further(tenants, max(each.config.memory_bytes for each in free))
        _serve(cycle, further, coming)
        if further and _free(cycle):
            # There may be more behind them.
            cycle.timers.arm("devices", Seconds(cycle.now + FURTHER_S))


def _free(cycle: Cycle) -> list[Device]:
    return [each for each in cycle.state.pool.devices.values() if each.is_free(cycle.now)]


def _serve(cycle: Cycle, functions: Sequence[Function], coming: list[Device]) -> None:
    """Serve these of the waiting functions. `coming`: the devices whose executors start and will serve no other."""
    free, short = _free(cycle), set[DeviceOwner]()
    waiting = [each for each in functions if each.queue]
    ranks = device_order.ranks(cycle, waiting, free)
    queue = [(device_order.start_tag(cycle, each), rank) for each, rank in zip(waiting, ranks, strict=True)]
    heapify(queue)
    while queue and free:
        if cycle.is_long:
            # For example, a device was chosen for hundreds of requests that had expired.
            cycle.timers.arm("devices", cycle.now)
            return
        tag, rank = heappop(queue)
        function = cycle.state.functions[rank[-1]]
        if tag < (present_tag := device_order.start_tag(cycle, function)):
            # Its tenant has begun a run since.
            heappush(queue, (present_tag, rank))
            continue
        if _begin(cycle, function, free):
            cycle.mark(function)
            if function.queue:
                [rank] = device_order.ranks(cycle, [function], free)
                heappush(queue, (device_order.start_tag(cycle, function), rank))
        elif not slices.is_transferring(cycle, function):
            _want_executor(cycle, function, free, coming, short)
        free = [each for each in free if each.is_free(cycle.now)]


def _serve_one(cycle: Cycle, long: Sequence[tuple[Function, Request]], free: list[Device]) -> None:
    """Of these requests, which have waited for a long time, begin a run with the first that a free device serves."""
    for function, request in long:
        function.queue.remove(request.id)
        function.queue.appendleft(request.id)
        if _begin(cycle, function, free):
            cycle.mark(function)
            cycle.state.pool.next_long_binding = cycle.state.pool.bindings + LONG_EVERY - 1
            return


def _begin(cycle: Cycle, function: Function, free: list[Device]) -> bool:
    """Begin a run on one of the free devices; False: none of them serves the function."""
    owner = owner_of(cycle, function)
    serving = [each for each in free if each.executor is not None and each.owner == owner]
    fitting: Sequence[Device] = sorted(
        (each for each in swaps.fitting(cycle, function) if each in serving), key=idle_since
    )
    suitable = slices.suitable(cycle, function, fitting)
    if not suitable:
        slices.arm_overdue_timer(cycle, function)
        return False
    options = swaps.options(cycle, function, suitable)
    pool, rule, first = cycle.state.pool, RULES[cycle.policy.device_binding], Choice(options[0].device)
    pool.bindings += 1
    choice = call_policy(cycle.state, function, first, rule, options, pool.bindings)
    chosen = next(each for each in options if each.device == choice.device)
    swap_wait_s = next((each.swap_wait_s for each in chosen.peers if each.device == choice.peer), chosen.swap_wait_s)
    free_now = tuple((each.device, each.missing_bytes, each.swap_wait_s) for each in options)
    last = LastBinding(choice.device, chosen.missing_bytes, swap_wait_s, choice.peer, free_now, ())
    device_runs.begin_run(cycle, function, pool.devices[choice.device], choice, last)
    pool.waiting.requeue(function)
    return True


def could_begin(cycle: Cycle, function: Function) -> bool:
    """Whether a free device serves the function now."""
    owner = owner_of(cycle, function)
    if fixed_devices.are_used(cycle) and pool_record(function).fixed_device is None:
        return False
    free = [each for each in swaps.fitting(cycle, function) if each.executor is not None and each.is_free(cycle.now)]
    return bool(slices.suitable(cycle, function, [each for each in free if each.owner == owner]))


# Executors


def could_start(cycle: Cycle, function: Function) -> bool:
    """Whether an executor could be started for a function that does not wait, and for whose owner none starts yet: on a
    device without one, or if no device serves its owner, in the place of one that nobody needs.
    """
    owner, devices = owner_of(cycle, function), list(swaps.fitting(cycle, function))
    if function.queue or any(each.coming_owner == owner for each in devices):
        return False
    if any(each.may_start(cycle.now) for each in devices):
        return True
    if any(each.expected_owner(cycle.now) == owner for each in devices):
        return False
    idle = [each for each in devices if each.executor is not None and each.executor.is_idle]
    return any(not is_wanted(cycle, each) and may_take_at(cycle, each, owner, devices) <= cycle.now for each in idle)


def _want_executor(
    cycle: Cycle, function: Function, free: list[Device], coming: list[Device], short: set[DeviceOwner]
) -> None:
    """Start an executor for a function, unless one starts that will serve it. `coming`: those that will serve no other
    waiting function. `short`: the owners whose backlog is too short for a further executor.
    """
    owner = owner_of(cycle, function)
    candidates = list(swaps.fitting(cycle, function))
    fitting = [each for each in candidates if each in free]
    empty = [each for each in fitting if each.executor is None]
    reserved = next((each for each in empty if each.next_owner == owner), None)
    own = next((each for each in coming if each in candidates and each.coming_owner == owner), None)
    if reserved is not None:
        executors.start(cycle, reserved, owner)
        coming.remove(reserved)
    elif own is not None:
        coming.remove(own)
    elif unreserved := [each for each in empty if not is_wanted(cycle, each)]:
        executors.start(cycle, min(unreserved, key=lambda each: each.failures), owner)
    elif owner not in short:
        unused = [each for each in fitting if each.executor is not None and not is_wanted(cycle, each)]
        count = sum(each.expected_owner(cycle.now) == owner for each in cycle.state.pool.devices.values())
        if unused and (not count or backlog_s(cycle, owner) > count * cycle.state.pool.start_s):
            _replace_or_wait(cycle, unused, owner, candidates)
        elif unused:
            short.add(owner)


def _are_served(cycle: Cycle) -> bool:
    """Whether, with isolation by tenant, each tenant with waiting functions has a device with the most memory, on which
    all its functions fit.
    """
    devices = cycle.state.pool.devices.values()
    most = max((each.config.memory_bytes for each in devices), default=0)
    served = {each.owner[0] for each in devices if each.owner is not None and each.config.memory_bytes == most}
    return cycle.config.device_isolation == "tenant" and cycle.state.pool.waiting.of_tenants.keys() <= served


def _replace_for_unserved(cycle: Cycle) -> None:
    """Stop executors, or limit their runs, for owners that have waiting functions and no device for them."""
    largest_bytes: dict[DeviceOwner | None, int] = {}
    for each in cycle.state.pool.devices.values():
        largest_bytes[each.owner] = max(each.config.memory_bytes, largest_bytes.get(each.owner, 0))
    sizes = sorted({each.config.memory_bytes for each in cycle.state.pool.devices.values()})
    draining: dict[DeviceOwner, Device] = {}
    # What did not help a function does not help another one of its tenant that fits on the same devices.
    failed: set[tuple[TenantId | None, int, DeviceId | None, Collection[DeviceId]]] = set()
    for function in _servable(cycle):
        owner, pooled = owner_of(cycle, function), pool_record(function)
        if pooled.nbytes <= largest_bytes.get(owner, 0) and pooled.fixed_device is None and not pooled.unplaced:
            continue
        unplaced = frozenset(name for name, is_final in pooled.unplaced.items() if is_final)
        fit = owner[0], bisect_left(sizes, pooled.nbytes), pooled.fixed_device, unplaced
        if fit in failed:
            continue
        devices = list(swaps.fitting(cycle, function))
        if any(each.expected_owner(cycle.now) == owner for each in devices):
            continue
        empty = [each for each in devices if each.executor is None and each.is_free(cycle.now)]
        if any(not is_wanted(cycle, each) for each in empty):
            continue
        candidates = [each for each in devices if each.executor is not None and each.executor.is_idle]
        if _replace_or_wait(cycle, candidates, owner, devices):
            cycle.state.pool.waiting.end_turn(function)
            continue
        if owner in draining or not _drain_for_unserved(cycle, devices, function, draining):
            failed.add(fit)


def _drain_for_unserved(
    cycle: Cycle, devices: Sequence[Device], function: Function, draining: dict[DeviceOwner, Device]
) -> bool:
    """One of these devices whose time slice is over gets a limit for its run. When that has passed, the device is taken
    for the function's owner. `draining`: those for which other owners wait; the chosen one is added. False: there is no
    such device.
    """
    owner = owner_of(cycle, function)
    over_at = {each.config.name: time_slice_ends(cycle, each, owner, devices) for each in devices}
    busy = [each for each in devices if each not in draining.values() and over_at[each.config.name] <= cycle.now]
    runs = [(each.operation, each) for each in busy if each.operation is not None and each.operation.parts]
    ends = min((at for at in over_at.values() if at > cycle.now), default=inf)
    if runs:
        operation, device = min(runs, key=lambda each: (each[0].drain_until, each[0].began))
        residency.limit_drain(cycle, operation)
        if operation.drain_until <= cycle.now:
            executors.end_drain(cycle, device, is_needed=True)
            device.next_owner = owner
            cycle.state.pool.waiting.end_turn(function)
            return True
        draining[owner] = device
        ends = min(ends, operation.drain_until)
    if ends < inf:
        cycle.timers.arm("devices", ends)
    return bool(runs)


def _replace_or_wait(cycle: Cycle, idle: Sequence[Device], owner: DeviceOwner, fitting: Sequence[Device]) -> bool:
    """Replace the executor of one of these idle devices: of those that may be taken, one that nobody waits for, then
    the one that was idle for longest. False: none may be taken yet. `fitting`: all devices that fit.
    """
    at = {each.config.name: may_take_at(cycle, each, owner, fitting) for each in idle}
    if takeable := [each for each in idle if at[each.config.name] <= cycle.now]:
        _replace(cycle, min(takeable, key=lambda each: (is_wanted(cycle, each), idle_since(each))), owner)
        return True
    if (soonest := min(at.values(), default=inf)) < inf:
        cycle.timers.arm("devices", soonest)
    return False


def _replace(cycle: Cycle, device: Device, owner: DeviceOwner) -> None:
    executors.stop(cycle, device)
    device.next_owner = owner


def backlog_s(cycle: Cycle, owner: DeviceOwner) -> float:
    """The time of the runs for which functions of this owner wait; of many functions, estimated by the first ones."""
    queue = cycle.state.pool.waiting
    waiting = list(queue.first(*owner))
    found_s = sum(
        ceil(len(each.queue) / each.spec.settings.max_batch)
        * swaps.run_s(cycle, each, min(len(each.queue), each.spec.settings.max_batch))
        for each in waiting
    )
    return found_s * queue.count(*owner) / max(1, len(waiting))

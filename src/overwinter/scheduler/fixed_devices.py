"""Binds functions to one device each, under the policies that bind before the first run (the baselines `native` and
`infless`).

Under `native` a function stays bound to its device until it is unloaded or removed. Under `infless` the binding also
ends when the function has been idle for its keep-alive or releases its blocks. The bytes of bound functions are
reserved on their device, so they are never evicted for others.
"""

from collections.abc import Iterator
from math import inf

from overwinter.core.ids import DeviceId
from overwinter.scheduler import residency
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.held_blocks import HeldBlocks
from overwinter.scheduler.policies import keepalive
from overwinter.scheduler.policies.device_binding import fixed_device
from overwinter.scheduler.pool import pool_record
from overwinter.scheduler.state import Function
from overwinter.scheduler.swaps import owner_of


def may_have_device(cycle: Cycle, function: Function) -> bool:
    """Whether a device may serve the function: it is bound to one, or functions are not bound to devices."""
    return pool_record(function).fixed_device is not None or not are_used(cycle)


def are_used(cycle: Cycle) -> bool:
    """Whether each function is bound to one device, under the policy in use."""
    return cycle.policy.device_binding in ("native", "infless")


def find_or_bind(cycle: Cycle, function: Function) -> DeviceId | None:
    """Return the device to which a function is bound, and bind it if it is not; None: it fits on none."""
    pooled, departures = pool_record(function), cycle.state.pool.departures
    if pooled.fixed_device is None and pooled.departures_at_misfit != departures:
        pooled.fixed_device = fixed_device(dict(_bytes_left(cycle, function)))
        pooled.departures_at_misfit = departures if pooled.fixed_device is None else None
    return pooled.fixed_device


def has_device_in_service(cycle: Cycle, function: Function) -> bool:
    """Whether the device to which a function is bound, or would be bound now, has an executor or may start one."""
    pooled, pool = pool_record(function), cycle.state.pool
    name = pooled.fixed_device
    if name is None and pooled.departures_at_misfit != pool.departures:
        name = fixed_device(dict(_bytes_left(cycle, function)))
    return (
        name is not None
        and not pooled.unplaced.get(name)
        and (pool.devices[name].executor is not None or pool.devices[name].is_free(cycle.now))
    )


def _bytes_left(cycle: Cycle, function: Function) -> Iterator[tuple[DeviceId, int]]:
    """Yield the bytes that would remain on each device beside the functions bound to it, unless those have another
    owner.
    """
    pool, owner, sizes = cycle.state.pool, owner_of(cycle, function), pool_record(function).sizes
    bound: dict[DeviceId, list[Function]] = {name: [] for name in pool.devices}
    for each in cycle.state.functions.values():
        if each.pool is not None and each.pool.fixed_device is not None:
            bound[each.pool.fixed_device].append(each)
    for name, others in bound.items():
        if any(owner_of(cycle, each) != owner for each in others):
            continue
        blocks = HeldBlocks()
        for each in others:
            blocks.hold(each.spec.id, pool_record(each).sizes)
        yield name, pool.devices[name].config.memory_bytes - blocks.nbytes - blocks.missing(sizes)


def ends_at(cycle: Cycle, function: Function) -> float:
    """Return when a function leaves its device for lack of use; inf: it does not."""
    pooled = pool_record(function)
    if cycle.policy.device_binding != "infless" or pooled.fixed_device is None or function.queue or pooled.running:
        return inf
    own = function.spec.settings.keep_alive_s
    at_most_s = cycle.policy.keep_alive_s if own is None else own
    return function.used_at + keepalive.from_history(function.gaps, at_most_s)


def watch(cycle: Cycle, function: Function) -> None:
    """Set the function's timer to the end of its keep-alive."""
    at = ends_at(cycle, function)
    if at < inf:
        cycle.timers.arm(function.spec.id, at)


def check(cycle: Cycle, function: Function) -> None:
    """Let a function that has been idle for its keep-alive leave its device."""
    if ends_at(cycle, function) <= cycle.now:
        residency.forget(cycle, function)
        release(cycle, function)


def release(cycle: Cycle, function: Function) -> None:
    """End the binding of a function to its device under `infless`, also when it releases its blocks: otherwise
    functions whose blocks are loaded would wait for its device while it waits for space in the host store.
    """
    pooled = pool_record(function)
    if cycle.policy.device_binding == "infless" and pooled.fixed_device is not None:
        pooled.fixed_device, cycle.devices_changed = None, True
        cycle.state.pool.departures += 1

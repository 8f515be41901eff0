"""Computes the earliest time at which an executor may be replaced by one for another owner of its device."""

from collections.abc import Sequence
from math import inf

from overwinter.scheduler import device_order, fixed_devices, swaps
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.pool import Device, DeviceOwner
from overwinter.scheduler.victims import KEPT_FOR_TENANT_S

TIME_SLICE_STARTS = 10
"""How long an executor may serve its owner when others wait for a device, as a multiple of the time of a start."""
START_MAX_S = 5.0
"""The longest time of a start that counts for this: a tenant can delay its own starts."""


def may_take_at(cycle: Cycle, device: Device, owner: DeviceOwner, fitting: Sequence[Device]) -> float:
    """Return the earliest time at which an owner may take this idle device, one of the `fitting` ones: the end of its
    time slice if functions of its present owner wait. Otherwise at once, but later if the device is kept (once it has
    been idle for KEPT_FOR_TENANT_S), or if its tenant has had less device time (once it has been idle for as long as a
    start takes).
    """
    if is_wanted(cycle, device):
        return time_slice_ends(cycle, device, owner, fitting)
    if _is_kept(cycle, device, owner, fitting):
        return idle_since(device) + KEPT_FOR_TENANT_S
    return idle_since(device) + _start_s(cycle) if _behind_s(cycle, device, owner) else cycle.now


def time_slice_ends(cycle: Cycle, device: Device, owner: DeviceOwner, fitting: Sequence[Device]) -> float:
    """Return when a device's executor has served its owner for a time slice, or later; inf: the device has no ready
    executor, or is kept. If the device's tenant has had less device time than this owner's, the slice lasts until that
    tenant would have caught up, but is longer by at most a time slice and the drain timeout. Before the end of the
    slice, only this end is computed.
    """
    executor, start_s = device.executor, _start_s(cycle)
    if executor is None or executor.ready_at is None or executor.stopping:
        return inf
    ends = executor.ready_at + TIME_SLICE_STARTS * start_s
    if ends > cycle.now:
        # It is asked again then.
        return ends
    if _is_kept(cycle, device, owner, fitting):
        return inf
    latest = ends + TIME_SLICE_STARTS * start_s + cycle.config.drain_timeout_s
    return max(ends, min(latest, cycle.now + _behind_s(cycle, device, owner)))


def _start_s(cycle: Cycle) -> float:
    return min(cycle.state.pool.start_s, START_MAX_S)


def _is_kept(cycle: Cycle, device: Device, owner: DeviceOwner, fitting: Sequence[Device]) -> bool:
    """Whether a device is the only one of another tenant, while the tenant that wants it has one of the `fitting`
    devices.
    """
    if device.owner is None or device.owner[0] == owner[0]:
        return False
    others = [each.owner[0] for each in cycle.state.pool.devices.values() if each.owner is not None]
    expected = (each.expected_owner(cycle.now) for each in fitting)
    return others.count(device.owner[0]) == 1 and any(each is not None and each[0] == owner[0] for each in expected)


def _behind_s(cycle: Cycle, device: Device, owner: DeviceOwner) -> float:
    """Return how much less device time the device's tenant has had than this owner's; 0 if it is less than a start
    takes.
    """
    behind_s = 0.0 if device.owner is None else device_order.behind_s(cycle, device.owner[0], owner[0])
    return behind_s if behind_s > _start_s(cycle) else 0.0


def is_wanted(cycle: Cycle, device: Device) -> bool:
    """Whether a function of the owner that has the device, or for which it is reserved, waits and can run there."""
    waiting = () if device.owner is None else cycle.state.pool.waiting.first(*device.owner)
    return any(device in swaps.fitting(cycle, each) for each in waiting if fixed_devices.may_have_device(cycle, each))


def idle_since(device: Device) -> float:
    """Return since when an idle device has been idle."""
    return inf if device.executor is None else device.executor.since

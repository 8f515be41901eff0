"""Records which functions are on which devices.

A function whose blocks leave the host store leaves the devices too: at once, or when its run in progress on a device
has ended. So blocks are never copied back from a device.
"""

from math import inf

from overwinter.core.actions import Unbind
from overwinter.core.ids import FunctionId, Seconds
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.held_blocks import HeldBlocks
from overwinter.scheduler.operation import Operation
from overwinter.scheduler.pool import Device, Resident
from overwinter.scheduler.resources import device_owner
from overwinter.scheduler.state import Function


def hold(cycle: Cycle, device: Device, function: Function) -> None:
    """Record that a function, now the most recently used one, is on a device: the run that begins brings its blocks."""
    assert function.pool is not None
    id_ = function.spec.id
    resident = device.residents.pop(id_, None)
    if resident is None:
        resident = Resident(function, function.pool.sizes, cycle.now)
        device.blocks.hold(id_, resident.sizes)
        device.missing.clear()
    resident.used_at = cycle.now
    device.residents[id_] = resident
    if device.executor is not None:
        device.executor.handed_over[id_] = function.spec.program
    _count(cycle, device)


def drop(cycle: Cycle, device: Device, id_: FunctionId) -> None:
    """Record that a function is no longer on the device, which frees the blocks that no other function has there."""
    resident = device.residents.pop(id_)
    device.blocks.release(id_, resident.sizes)
    device.blocks.remove_unused(set(resident.sizes))
    device.missing.clear()
    _count(cycle, device)


def clear(cycle: Cycle, device: Device) -> None:
    """Record that nothing is on the device any more, because its executor ends."""
    device.residents.clear()
    device.blocks, device.unplaced = HeldBlocks(), None
    device.missing.clear()
    _count(cycle, device)


def forget(cycle: Cycle, function: Function) -> None:
    """Remove a function from all devices and executors; from a device that runs it, when the run has ended."""
    id_ = function.spec.id
    for device in list(cycle.state.pool.holders(function)):
        resident, operation = device.residents[id_], device.operation
        if operation is not None and function in operation.functions:
            resident.draining = True
            _watch_deadlines(cycle, device)
        else:
            unbind(cycle, device, id_)
    for device in cycle.state.pool.executors.values():
        if device.executor is not None and id_ in device.executor.handed_over and id_ not in device.residents:
            unbind(cycle, device, id_)


def drain_runs(cycle: Cycle, function: Function) -> None:
    """Let the runs of a function that leaves its devices continue there for the drain timeout."""
    for device in cycle.state.pool.holders(function):
        executor, operation = device.executor, device.operation
        if executor is not None and operation is not None and function in operation.functions:
            if not operation.leaving and operation.drain_until <= cycle.now:
                # The limit was set for functions that waited for the device. They wait no longer.
                operation.drain_until = Seconds(inf)
            limit_drain(cycle, operation)
            if function.spec.id not in operation.leaving:
                operation.leaving += (function.spec.id,)
            cycle.timers.arm(executor.id, operation.drain_until)


def limit_drain(cycle: Cycle, operation: Operation) -> None:
    """Let a run on a device continue for the drain timeout, unless it has a limit already."""
    operation.drain_until = min(operation.drain_until, cycle.now + cycle.config.drain_timeout_s)


def unbind(cycle: Cycle, device: Device, id_: FunctionId) -> None:
    """Have the executor of a device forget a function."""
    assert device.executor is not None
    if id_ in device.residents:
        drop(cycle, device, id_)
    device.executor.handed_over.pop(id_, None)
    cycle.actions.append(Unbind(device.executor.id, id_))
    cycle.devices_changed = True


def _watch_deadlines(cycle: Cycle, device: Device) -> None:
    """Set the timer of an executor to the first deadline of the requests in its run: if the function was removed,
    nothing else checks them.
    """
    executor, requests = device.executor, cycle.state.requests
    if executor is not None and executor.operation is not None:
        deadlines = [requests[id_].deadline for id_ in executor.operation.requests if id_ in requests]
        if deadlines:
            cycle.timers.arm(executor.id, min(deadlines))


def _count(cycle: Cycle, device: Device) -> None:
    """Update the ledger with the bytes on the device."""
    name = device.config.name
    owner, resource = device_owner(name), cycle.resources.device_bytes[name]
    if cycle.ledger.has(owner):
        cycle.ledger.change(owner, resource, device.blocks.nbytes)
    else:
        cycle.ledger.take(owner, None, {resource: device.blocks.nbytes})

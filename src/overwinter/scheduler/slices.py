"""On which devices the later slices of programs run, and which of them are brought there before a request reaches them.

A request needs the slices of its program one after the other. So while it is in one, the blocks of the later ones are
loaded into the host store, if there is space for which nobody waits, and are brought to idle devices, while no function
waits for a device. Then a program that sleeps comes over the links of several devices at once.
"""

from collections.abc import Collection, Iterator, Sequence

from overwinter.core.ids import Seconds, slice_number
from overwinter.scheduler import device_runs, executors, swaps
from overwinter.scheduler.blocks import begin_load, missing_bytes
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.homes import are_used
from overwinter.scheduler.policies.device_binding import least_start
from overwinter.scheduler.pool import Device
from overwinter.scheduler.state import Function
from overwinter.scheduler.swaps import facts, owner_of


def suitable(cycle: Cycle, function: Function, serving: Sequence[Device]) -> Sequence[Device]:
    """Return those of the devices that serve a function on which it may run: all, unless it is a later slice. Because
    each request needs all slices, one of those runs where nothing is evicted for it. It waits for the end of its
    transfer, or for an executor on such a device, which can be started or starts, unless the start is overdue; if there
    is no such device, it may run on all.
    """
    if slice_number(function.spec.id) is None or are_used(cycle):
        return serving
    if any(_is_brought(function, each) for each in cycle.state.pool.devices.values()):
        return []
    pooled, owner = facts(function), owner_of(cycle, function)
    has_room = [e for e in serving if e.blocks.nbytes + e.missing_bytes(pooled) <= e.config.memory_bytes]
    if has_room:
        return has_room
    for each in swaps.fitting(cycle, function):
        is_empty = each.executor is None and each.next_owner is None and each.is_free(cycle.now)
        if is_empty or (each.coming_owner == owner and not _is_overdue(cycle, each)):
            return []
    return serving


def _is_overdue(cycle: Cycle, device: Device) -> bool:
    executor = device.executor
    return executor is not None and not executor.stopping and executors.overdue_at(cycle, executor) <= cycle.now


def _is_brought(function: Function, device: Device) -> bool:
    """Whether the device gets the blocks of the function before a request."""
    operation = device.operation
    return operation is not None and not operation.parts and operation.function is function


def check(cycle: Cycle) -> None:
    """Begin the loads and transfers of the slices that requests will reach."""
    if cycle.policy.device_ahead != "replicas" or are_used(cycle):
        return
    coming = dict(_coming(cycle))
    for function, since in coming.items():
        if not _may_come(cycle, function):
            continue
        if function.loaded:
            _bring(cycle, function, coming)
        # Others that wait for bytes, or its keep-alive, may evict it at once; so it is loaded once for each run.
        elif facts(function).loaded_ahead < since and not cycle.state.bytes and _fits(cycle, function):
            facts(function).loaded_ahead = cycle.now
            begin_load(cycle, function)


def _coming(cycle: Cycle) -> Iterator[tuple[Function, Seconds]]:
    """Yield the later slices of the programs that have requests in an earlier one, and since when."""
    functions, devices = cycle.state.functions, cycle.state.pool.executors.values()
    for operation in [each.operation for each in devices if each.operation is not None]:
        for part in operation.parts:
            following = part.function.spec.following
            while following is not None and following in functions:
                yield functions[following], operation.began
                following = functions[following].spec.following


def _fits(cycle: Cycle, function: Function) -> bool:
    """Whether the host store has space for the blocks of a function."""
    return cycle.resources.host.fits(missing_bytes(cycle, function))


def _may_come(cycle: Cycle, function: Function) -> bool:
    """Whether a slice is on no device, and may be brought to one."""
    pooled = facts(function)
    may = not (
        function.unloaded or function.queue or function.loading is not None or pooled.never or pooled.preparation_failed
    )
    return may and cycle.now >= function.backoff_until and not any(True for _ in cycle.state.pool.holders(function))


def _bring(cycle: Cycle, function: Function, coming: Collection[Function]) -> None:
    """Bring a slice to an idle device, while no function waits for one. `coming`: what is not evicted for it."""
    if cycle.state.pool.waiting:
        return
    owner, pooled = owner_of(cycle, function), facts(function)
    idle = [each for each in swaps.fitting(cycle, function) if each.executor is not None and each.executor.is_idle]
    victims: dict[Device, list[Function]] = {}
    for device in suitable(cycle, function, [each for each in idle if each.owner == owner]):
        missing = device.missing_bytes(pooled)
        if not missing:
            # Other functions have all its blocks there.
            return
        short = device.blocks.nbytes + missing - device.capacity(missing)
        may = [each for each in swaps.victims(cycle, function, device) if each not in coming] if short > 0 else []
        if short <= sum(device.blocks.exclusive(facts(each).sizes) for each in may):
            victims[device] = may
    if not victims:
        return
    choice = least_start(swaps.options(cycle, function, list(victims)), 0)
    device = cycle.state.pool.devices[choice.device]
    device_runs.bring(cycle, function, device, choice, victims[device])
    cycle.explain(function, "ahead", f"{choice.device} gets its blocks while an earlier slice runs")

"""On which devices the later slices of programs run, and which of them are brought there before a request reaches them.

A request needs the slices of its program one after the other. So while it is in one, the blocks of the later ones are
loaded into the host store, if there is space for which nobody waits, and are brought to idle devices, while no function
waits for a device; for a slice without such a device, an executor is started on an empty one. Then slices that are
on no device come over the links of several devices at once.

A slice waits for a busy device that has it, if that wait is shorter than the time for which a run on another device
would wait for the slice's blocks. Otherwise requests in quick succession would copy a slice to a second device although
one has it already, and evict other slices for the copy.

With fewer devices than slices, each slice evicts the slice of its program whose next use is furthest in the future
(Belady's rule). If each evicted the least recently used one, all slices would be brought for each request.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from math import inf

from overwinter.core.ids import Seconds, slice_number, whole_id
from overwinter.scheduler import device_runs, executors, fixed_devices, swaps
from overwinter.scheduler.blocks import begin_load, missing_bytes
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.operation import Operation
from overwinter.scheduler.policies.device_binding import least_wait
from overwinter.scheduler.pool import Device, pool_record
from overwinter.scheduler.state import Function
from overwinter.scheduler.swaps import later_slices, owner_of

NEVER = (True, inf)
"""Replaces the values of `_needed` if there are none: no slice of the program would be evicted from the device."""


def suitable(cycle: Cycle, function: Function, serving: Sequence[Device]) -> Sequence[Device]:
    """Return the devices of `serving` on which the function may run: all of them, unless it is a slice and functions
    are not bound to devices (fixed_devices.py). Because each request needs all slices, a later one runs where nothing
    is evicted for it. It waits for the end of its transfer, or for an executor on such a device that can be started or
    is starting, unless the start is overdue. If there is no such device, a slice runs where it takes the place of other
    functions, or of the slice of its program whose next use is furthest in the future. A slice also waits for a busy
    device that has it, if that wait is shorter than the wait for blocks on each of these.
    """
    is_later = slice_number(function.spec.id) is not None
    if fixed_devices.are_used(cycle) or not (is_later or function.spec.following):
        return serving
    if is_later and _waits(cycle, function, serving):
        return []
    without_eviction = [each for each in serving if is_later and _fits_without_eviction(function, each)]
    found = without_eviction or _least_needed(cycle, function, serving)
    return [] if _is_free_sooner(cycle, function, found) else found


def is_transferring(cycle: Cycle, function: Function) -> bool:
    """Whether a device gets the blocks of a function before a request."""
    operations = [each.operation for each in cycle.state.pool.devices.values()]
    return any(each is not None and not each.parts and each.function is function for each in operations)


def arm_overdue_timer(cycle: Cycle, function: Function) -> None:
    """Arm a timer for the time at which the run on the busy device is overdue, because that run may never end. Then the
    slice that waits for the device is assigned again.
    """
    at = min((each.overdue_at for each in _busy_with(cycle, function)), default=inf)
    if at < inf:
        cycle.timers.arm("devices", at)


def _waits(cycle: Cycle, function: Function, serving: Sequence[Device]) -> bool:
    """Whether a later slice waits for its own transfer, or for an executor on a device where nothing is evicted."""
    if is_transferring(cycle, function):
        return True
    if any(_fits_without_eviction(function, each) for each in serving):
        return False
    owner = owner_of(cycle, function)
    for each in swaps.fitting(cycle, function):
        if each.may_start(cycle.now) or (each.coming_owner == owner and not _is_overdue(cycle, each)):
            return True
    return False


def _fits_without_eviction(function: Function, device: Device) -> bool:
    missing = device.missing_bytes(pool_record(function))
    return device.blocks.nbytes + missing <= device.capacity(missing)


def _is_free_sooner(cycle: Cycle, function: Function, devices: Sequence[Device]) -> bool:
    """Whether the wait for a busy device that has a slice is shorter than the wait for blocks on each of these."""
    left_s = min((each.ends - cycle.now for each in _busy_with(cycle, function)), default=inf)
    if left_s == inf or not devices:
        return False
    options = swaps.options(cycle, function, devices)
    waits = (each.swap_wait_s for each in options)
    return left_s < min(*waits, *(peer.swap_wait_s for each in options for peer in each.peers), inf)


def _busy_with(cycle: Cycle, function: Function) -> list[Operation]:
    """The runs in progress, unless they are overdue, on the devices of the function's owner that have all blocks of the
    function; none if it is no slice.
    """
    if slice_number(function.spec.id) is None and function.spec.following is None:
        return []
    owner, pooled = owner_of(cycle, function), pool_record(function)
    having = [each for each in swaps.fitting(cycle, function) if each.owner == owner and not each.missing_bytes(pooled)]
    return [each.operation for each in having if each.operation is not None and each.operation.overdue_at > cycle.now]


def _least_needed(cycle: Cycle, function: Function, serving: Sequence[Device]) -> Sequence[Device]:
    """Return those of these devices where the next use of the evicted slices is furthest in the future."""
    needed = {each: min(_needed(cycle, function, each), default=NEVER) for each in serving}
    last = max(needed.values(), default=NEVER)
    return [each for each in serving if needed[each] == last]


def _needed(cycle: Cycle, function: Function, device: Device) -> Iterator[tuple[bool, float]]:
    """Yield when each slice of the program that would be evicted from a device for this one is needed, as a sort key:
    slices after this one are needed first, by its own requests, and earlier slices later, by the next requests.
    """
    if not device.short_bytes(device.missing_bytes(pool_record(function))):
        # Nothing is evicted. Without this return, `swaps.victims` would compare all functions there.
        return
    number = slice_number(function.spec.id) or 1
    for each in _evicted(function, device, swaps.victims(cycle, function, device)):
        if _is_same_program(each, function):
            other = slice_number(each.spec.id) or 1
            yield other < number, other


def _evicted(function: Function, device: Device, victims: Iterable[Function]) -> Iterator[Function]:
    """Yield those of these functions that have to be evicted from a device for another, in their order."""
    short = device.short_bytes(device.missing_bytes(pool_record(function)))
    freed = swaps.freed_bytes(function, device)
    for each in victims:
        if short <= 0:
            return
        short -= freed(each.spec.id)
        yield each


def _is_same_program(one: Function, other: Function) -> bool:
    return whole_id(one.spec.id) == whole_id(other.spec.id)


def _is_overdue(cycle: Cycle, device: Device) -> bool:
    executor = device.executor
    return executor is not None and not executor.stopping and executors.overdue_at(cycle, executor) <= cycle.now


def check(cycle: Cycle) -> None:
    """Begin the loads and transfers of the slices that requests will reach, and start executors for them."""
    if cycle.policy.device_ahead != "replicas" or fixed_devices.are_used(cycle):
        return
    later = dict(_later_slices(cycle))
    starting = [each for each in cycle.state.pool.devices.values() if each.coming_owner is not None]
    for function, since in later.items():
        if not _may_come(cycle, function):
            continue
        if function.loaded:
            _bring(cycle, function, later, starting)
        # Others that wait for bytes, or its keep-alive, may evict it at once; so it is loaded once for each run.
        elif (
            pool_record(function).loaded_ahead_at < since
            and not cycle.state.waiting_for_bytes
            and _fits(cycle, function)
        ):
            pool_record(function).loaded_ahead_at = cycle.now
            begin_load(cycle, function)


def _later_slices(cycle: Cycle) -> Iterator[tuple[Function, Seconds]]:
    """Yield the later slices of the programs of which an earlier slice runs now, with the start of that run."""
    devices = cycle.state.pool.executors.values()
    for operation in [each.operation for each in devices if each.operation is not None]:
        for part in operation.parts:
            for each in later_slices(cycle.state, part.function):
                yield each, operation.began


def _fits(cycle: Cycle, function: Function) -> bool:
    """Whether the host store has space for the blocks of a function."""
    return cycle.resources.host.fits(missing_bytes(cycle, function))


def _may_come(cycle: Cycle, function: Function) -> bool:
    """Whether a slice is on no device, and may be brought to one."""
    pooled = pool_record(function)
    if function.unloaded or function.queue or function.loading is not None:
        return False
    if pooled.no_device_reason or pooled.preparation_failed:
        return False
    return cycle.now >= function.backoff_until and not any(True for _ in cycle.state.pool.holders(function))


def _bring(cycle: Cycle, function: Function, coming: Collection[Function], starting: list[Device]) -> None:
    """Bring a slice to an idle device, while no function waits for one. No slice of its program and none of `coming` is
    evicted for it. If there is no such device, an executor may be started for it. `starting`: the devices whose
    executors start for no other slice.
    """
    if cycle.state.pool.waiting:
        return
    owner, pooled = owner_of(cycle, function), pool_record(function)
    idle = [each for each in swaps.fitting(cycle, function) if each.executor is not None and each.executor.is_idle]
    victims: dict[Device, list[Function]] = {}
    for device in suitable(cycle, function, [each for each in idle if each.owner == owner]):
        missing = device.missing_bytes(pooled)
        if not missing:
            # Other functions have all its blocks there.
            return
        short = device.short_bytes(missing)
        others = swaps.victims(cycle, function, device) if short else []
        candidates = [each for each in others if each not in coming and not _is_same_program(each, function)]
        freed = swaps.freed_bytes(function, device)
        if short <= sum(freed(each.spec.id) for each in candidates):
            victims[device] = candidates
    if not victims:
        _want_executor(cycle, function, starting)
        return
    choice = least_wait(swaps.options(cycle, function, list(victims)), 0)
    device = cycle.state.pool.devices[choice.device]
    device_runs.bring(cycle, function, device, choice, victims[device])
    cycle.explain(function, "ahead", f"{choice.device} gets its blocks while an earlier slice runs")


def _want_executor(cycle: Cycle, function: Function, starting: list[Device]) -> None:
    """Start an executor for a slice on an empty device, unless one of `starting` will serve it, which then leaves the
    list.
    """
    owner, fitting = owner_of(cycle, function), list(swaps.fitting(cycle, function))
    own = next((each for each in starting if each in fitting and each.coming_owner == owner), None)
    empty = [each for each in fitting if each.may_start(cycle.now)]
    if own is not None:
        starting.remove(own)
    elif empty:
        device = min(empty, key=lambda each: each.failures)
        executors.start(cycle, device, owner)
        cycle.explain(function, "ahead", f"{device.config.name} gets an executor while an earlier slice runs")

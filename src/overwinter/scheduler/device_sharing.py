"""Decides which functions' requests share a run on a device.

If functions of a family of the pool allow batches, they run together as far as their weights are the same, as those of
a worker do (shared_runs.py). The blocks of all of them are copied to the device before such a run begins, and nothing
is evicted to free bytes for the functions that join. So a run is shared only where copying what the device misses takes
a small part of the time of a run.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice

from overwinter.core.ids import Address
from overwinter.scheduler import fixed_devices, latency, shared_runs, swaps
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.operation import Part
from overwinter.scheduler.policies.device_binding import transfer_s
from overwinter.scheduler.pool import Device, pool_record
from overwinter.scheduler.state import Function

MINOR = 0.25
"""The largest transfer before a shared run, as a part of the time of a run."""


def candidates(cycle: Cycle, function: Function, device: Device) -> list[Function]:
    """Return the functions whose waiting requests may join a run of this one on a device."""
    if function.spec.settings.max_batch == 1 or pool_record(function).unplaced:
        return []
    found, sizes = list[Function](), pool_record(function).sizes
    able = (other for other in shared_runs.candidates(cycle, function) if _may_run(cycle, other, device))
    # A run has requests of at most this many functions.
    for other in islice(able, function.spec.settings.max_batch):
        wider = {**sizes, **pool_record(other).sizes}
        if _is_minor(cycle, function, device, wider):
            found.append(other)
            sizes = wider
    return found


def _may_run(cycle: Cycle, other: Function, device: Device) -> bool:
    """Whether requests of a function that waits could be in a shared run on a device."""
    if other.waits_in != "devices" or other.spec.settings.max_batch == 1 or pool_record(other).unplaced:
        return False
    if fixed_devices.are_used(cycle) and pool_record(other).fixed_device != device.config.name:
        return False
    return swaps.owner_of(cycle, other) == device.owner


def _is_minor(cycle: Cycle, function: Function, device: Device, sizes: Mapping[Address, int]) -> bool:
    """Whether what a device misses of these blocks fits there, and takes at most MINOR of a run's time to copy."""
    missing = device.blocks.missing(sizes)
    swap_s = transfer_s(device.config, missing, len(swaps.neighbours(cycle, device)))
    fits = not device.short_bytes(missing)
    return fits and swap_s <= MINOR * swaps.run_s(cycle, function, 1)


def take(cycle: Cycle, function: Function, others: Sequence[Function]) -> tuple[Part, ...]:
    """Take the requests of a shared run: as many as together are answered by the due time of the first request. If that
    one would be late even alone, the run takes up to `max_batch` requests.
    """
    own = len(function.queue)
    count = min(function.spec.settings.max_batch, own + sum(len(each.queue) for each in others))
    left_s = cycle.state.requests[function.queue[0]].due - cycle.now
    in_time = (each for each in range(count, 0, -1) if _spread_s(cycle, function, own, each) <= left_s)
    return shared_runs.take_shared_run(
        cycle, function, next(in_time, count), partial(expected_s, cycle, function), others
    )


def _spread_s(cycle: Cycle, function: Function, own: int, count: int) -> float:
    """Expected seconds of the execution of `count` requests: up to `own` of the leading function, then one of each
    other function. Like `expected_s`, but computed in constant time.
    """
    together, others = swaps.run_s(cycle, function, count), max(0, count - own)
    if not others:
        return together
    apart = swaps.run_s(cycle, function, own) + others * swaps.run_s(cycle, function, 1)
    return latency.shared_run_s(together, apart, function.separate_part)


def expected_s(cycle: Cycle, function: Function, counts: Sequence[int]) -> float:
    """Expected seconds of the execution of this many requests of each function; 0: unknown."""
    together = swaps.run_s(cycle, function, sum(counts))
    if len(counts) == 1:
        return together
    apart = sum(swaps.run_s(cycle, function, count) for count in counts)
    return latency.shared_run_s(together, apart, function.separate_part)


def observe(cycle: Cycle, parts: Sequence[Part], seconds: float, swap_s: float) -> None:
    """Record the time of a run; only one without a transfer tells whether sharing is faster."""
    function, counts = parts[0].function, [len(part.requests) for part in parts]
    if len(counts) == 1:
        pool_record(function).times.observe(counts[0], seconds, swap_s)
    if function.removed or function.spec.settings.max_batch == 1 or swap_s or len(function.family.members) == 1:
        return
    trunk = function.family.trunks[function.trunk]
    trunk.sharing.observe(function.latency.default_point, counts, seconds)
    together = swaps.run_s(cycle, function, sum(counts))
    if len(counts) > 1 and together:
        trunk.observe(together, sum(swaps.run_s(cycle, function, count) for count in counts), seconds)

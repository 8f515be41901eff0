"""Estimates for devices: what a run of a function would have to bring, how long its execution would wait
for it, and which functions may be evicted for it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf

import msgspec

from overwinter.core.ids import Address, DeviceId, FunctionId
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.policies import device_eviction
from overwinter.scheduler.policies.device_binding import Option, Peer, Swapping, transfer_s
from overwinter.scheduler.policies.device_eviction import Candidate, Value
from overwinter.scheduler.policy_failures import call_policy, expected_s
from overwinter.scheduler.pool import Device, DeviceOwner, Resident, pool_record
from overwinter.scheduler.state import Function, State

ON_FAILURE: Value = (0.0, 0.0, 0.0)
"""The value of a function on which the policy failed."""


def owner_of(cycle: Cycle, function: Function) -> DeviceOwner:
    """Whose executor the function needs."""
    isolation = cycle.config.device_isolation
    if isolation == "none":
        return None, None
    return function.spec.tenant, function.spec.id if isolation == "function" else None


def large_enough(cycle: Cycle, function: Function) -> Iterator[Device]:
    """Yield the devices with enough memory for the function; only one if it is bound to one."""
    pooled = pool_record(function)
    for device in cycle.state.pool.devices.values():
        if pooled.nbytes <= device.config.memory_bytes and pooled.fixed_device in (None, device.config.name):
            yield device


def fitting(cycle: Cycle, function: Function) -> Iterator[Device]:
    """Return the devices that have enough memory for the function, and on which its blocks can probably be placed."""
    unplaced, devices = pool_record(function).unplaced, large_enough(cycle, function)
    return (each for each in devices if not unplaced.get(each.config.name)) if unplaced else devices


def run_s(cycle: Cycle, function: Function, count: int) -> float:
    """Expected seconds of the execution of this many requests on a device; 0: unknown."""
    measured = pool_record(function).times.measured_s(count)
    if measured is not None:
        return measured
    model = function.latency
    profiled = expected_s(cycle.state, function, model.default_point, count) if model.points else None
    return pool_record(function).times.expected_s(count, profiled)


def neighbours(cycle: Cycle, device: Device) -> list[Device]:
    """The other devices behind its switch that bring blocks from the host now."""
    switch = device.config.switch
    if not switch:
        return []
    return [
        each
        for each in cycle.state.pool.devices.values()
        if each is not device and each.config.switch == switch and each.operation and each.swaps_until > cycle.now
    ]


def options(cycle: Cycle, function: Function, devices: Sequence[Device]) -> list[Option]:
    """Describe these devices to a policy."""
    execution_s = run_s(cycle, function, 1)
    return [_option(cycle, function, device, execution_s) for device in devices]


def least_swap_wait_s(cycle: Cycle, function: Function, beside: Mapping[Device, int], execution_s: float) -> float:
    """The least time for which a run of `execution_s` would wait for blocks on one of the devices in `beside`, brought
    from the host or from a peer that has the whole function; 0 if none of them serves it. `beside`: for each device,
    the number of neighbours that bring blocks.
    """
    owner, least_s = owner_of(cycle, function), inf
    for device in fitting(cycle, function):
        if device not in beside or device.executor is None or device.owner != owner:
            continue
        missing = device.missing_bytes(pool_record(function))
        swap_s = transfer_s(device.config, missing, beside[device])
        for peer, rate in _providers(cycle, device) if missing else ():
            if function.spec.id in peer.residents:
                swap_s = min(swap_s, device.config.latency_s + missing / rate)
        least_s = min(least_s, max(0.0, swap_s - execution_s))
    return 0.0 if least_s == inf else least_s


def _option(cycle: Cycle, function: Function, device: Device, execution_s: float) -> Option:
    missing, others = device.missing_bytes(pool_record(function)), neighbours(cycle, device)
    doing: Swapping = "heavy" if any(each.swaps_heavy for each in others) else "light" if others else "nothing"
    swap_s = transfer_s(device.config, missing, len(others))
    waits_s = max(0.0, swap_s - execution_s)
    peers = _peers(cycle, function, device, len(others), execution_s) if missing else ()
    return Option(device.config.name, missing, waits_s, doing, peers, device.short_bytes(missing))


def _peers(cycle: Cycle, function: Function, device: Device, sharing: int, execution_s: float) -> tuple[Peer, ...]:
    """The devices that have some of the missing blocks and could provide them."""
    found = []
    for peer, rate in _providers(cycle, device):
        host, provided = missing_from(pool_record(function).sizes, device, peer)
        if provided:
            swap_s = device.config.latency_s + provided / rate + transfer_s(device.config, host, sharing)
            has_all = function.spec.id in peer.residents
            found.append(Peer(peer.config.name, rate, max(0.0, swap_s - execution_s), has_all, host))
    return tuple(found)


def _providers(cycle: Cycle, device: Device) -> Iterator[tuple[Device, float]]:
    """Yield the devices of the same owner that could provide blocks to a device, with the bandwidth of the link.
    Executors of different owners share nothing.
    """
    for name, rate in device.config.peers.items():
        peer = cycle.state.pool.devices.get(name)
        if peer is not None and peer is not device and _may_provide(cycle, device, peer):
            yield peer, rate


def _may_provide(cycle: Cycle, device: Device, peer: Device) -> bool:
    executor, other = device.executor, peer.executor
    if executor is None or other is None or other.stopping or other.owner != executor.owner:
        return False
    # What a run is still bringing cannot be copied.
    return other.operation is None or peer.swaps_until <= cycle.now


def missing_from(sizes: Mapping[Address, int], device: Device, peer: Device | None) -> tuple[int, int]:
    """Return the missing bytes of these blocks that come from the host, and those that the peer provides."""
    missing = {address: nbytes for address, nbytes in sizes.items() if address not in device.blocks.sizes}
    if peer is None:
        return sum(missing.values()), 0
    provided = sum(nbytes for address, nbytes in missing.items() if address in peer.blocks.sizes)
    return sum(missing.values()) - provided, provided


def swap_times(
    cycle: Cycle, sizes: Mapping[Address, int], device: Device, peer: DeviceId | None
) -> tuple[float, float]:
    """Return the expected time of the transfer of what is missing of these blocks, and of the part from the host."""
    config = device.config
    other = None if peer is None else cycle.state.pool.devices[peer]
    host, provided = missing_from(sizes, device, other)
    host_s = transfer_s(config, host, len(neighbours(cycle, device)))
    if peer is None or not provided:
        return host_s, host_s
    return host_s + config.latency_s + provided / config.peers[peer], host_s


def less_valuable(cycle: Cycle, function: Function, device: Device) -> dict[Function, int]:
    """Return the functions that were not used on a device for `policy.period_s`, and are less valuable there than this
    one would be, the first to evict first; with the bytes that the eviction of each frees.
    """
    rule, missing = device_eviction.RULES[cycle.policy.device_eviction], device.missing_bytes(pool_record(function))
    alone = _candidate(cycle, device, Resident(function, {}, cycle.now), 0)
    rate = max((_fastest_link(cycle, each) for each in cycle.state.pool.holders(function)), default=0.0)
    own = msgspec.structs.replace(
        alone,
        nbytes=missing,
        swap_s=transfer_s(device.config, missing, 0),
        peer_s=device.config.latency_s + missing / rate if rate else None,
    )
    most = call_policy(cycle.state, function, ON_FAILURE, rule, own)
    found: list[tuple[Value, Candidate, Function]] = []
    freed = freed_bytes(function, device)
    for id_, each in device.residents.items():
        candidate = _candidate(cycle, device, each, freed(id_))
        value = call_policy(cycle.state, each.function, most, rule, candidate)
        if candidate.unused_s >= cycle.policy.period_s and value < most:
            found.append((value, candidate, each.function))
    return {each: candidate.nbytes for _, candidate, each in sorted(found, key=lambda one: one[0])}


def victims(cycle: Cycle, function: Function, device: Device) -> list[Function]:
    """Return the functions that may be evicted from a device for this one, the first to evict first. The slices that
    its requests will reach come last, the next one at the end.
    """
    rule, later = device_eviction.RULES[cycle.policy.device_eviction], list(later_slices(cycle.state, function))
    candidates = [
        each
        for each in device.residents.values()
        if each.function is not function and pool_record(each.function).fixed_device != device.config.name
    ]

    freed = freed_bytes(function, device)

    def value(resident: Resident) -> tuple[int, Value]:
        other = resident.function
        candidate = _candidate(cycle, device, resident, freed(other.spec.id))
        order = len(later) - later.index(other) if other in later else 0
        return order, call_policy(cycle.state, other, ON_FAILURE, rule, candidate)

    return [each.function for each in sorted(candidates, key=value)]


def later_slices(state: State, function: Function) -> Iterator[Function]:
    """Yield the slices of its program that requests reach after this one, the next one first."""
    functions, following = state.functions, function.spec.following
    while following is not None and following in functions:
        yield functions[following]
        following = functions[following].spec.following


def freed_bytes(function: Function, device: Device) -> Callable[[FunctionId], int]:
    """Return a Python function that tells how many bytes the eviction of a resident would free. Blocks that `function`
    needs too do not count: they would have to be brought again at once.
    """
    needed: Counter[FunctionId | None] = Counter()
    for address, nbytes in pool_record(function).sizes.items():
        needed[device.blocks.sole_holder(address)] += nbytes
    return lambda resident: device.blocks.exclusive(resident) - needed[resident]


def _candidate(cycle: Cycle, device: Device, resident: Resident, nbytes: int) -> Candidate:
    """Describe a resident to the eviction policy. `nbytes`: the bytes that its eviction would free."""
    other = resident.function
    holders = [each for each in cycle.state.pool.holders(other) if each is not device]
    rate = max((_fastest_link(cycle, each) for each in holders), default=0.0)
    return Candidate(
        unused_s=cycle.now - resident.used_at,
        use_interval_s=other.use_interval_s,
        nbytes=nbytes,
        swap_s=transfer_s(device.config, nbytes, 0),
        run_s=run_s(cycle, other, 1),
        replicas=len(holders),
        peer_s=device.config.latency_s + nbytes / rate if rate else None,
        is_wanted=bool(other.queue),
    )


def _fastest_link(cycle: Cycle, holder: Device) -> float:
    """Return the bandwidth of the fastest link from a device to another; 0: it has none."""
    devices = cycle.state.pool.devices.values()
    return max((each.config.peers.get(holder.config.name, 0.0) for each in devices), default=0.0)

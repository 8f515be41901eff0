"""Brings functions to a further device before requests wait for it.

Where requests would too often find all devices of a function busy, and bringing its blocks on demand takes too long
for its SLO (policies/device_ahead.py), the blocks are brought to an idle device, as a run without requests.
There they replace only functions that were unused there for a period and have a lower value, by the eviction policy.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

from overwinter.core.ids import FunctionId
from overwinter.scheduler import device_runs, fixed_devices, sizing, swaps
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.policies.device_ahead import Demand, wants_replica
from overwinter.scheduler.policies.device_binding import least_wait
from overwinter.scheduler.policy_failures import call_policy
from overwinter.scheduler.pool import Device, pool_record
from overwinter.scheduler.state import Function
from overwinter.scheduler.swaps import owner_of

CHECKED_MAX = 8
"""The most functions of `rate_changed` that one step looks at: each is compared with its whole family."""


def watch(cycle: Cycle, function: Function) -> None:
    """Have the rate of a function compared again with what its devices can do."""
    if cycle.policy.device_ahead == "replicas" and function.pool is not None and not fixed_devices.are_used(cycle):
        cycle.state.pool.rate_changed.setdefault(function.spec.id)


def forecast(cycle: Cycle, id_: FunctionId, rate: float) -> None:
    """The future rate of a function is known."""
    function = cycle.state.functions.get(id_)
    if function is not None:
        function.forecast = rate
        watch(cycle, function)


def check(cycle: Cycle) -> None:
    """Bring functions to idle devices, while no function waits for one. A step looks at CHECKED_MAX at most."""
    pool = cycle.state.pool
    if pool.waiting:
        return
    for id_ in list(islice(pool.rate_changed, CHECKED_MAX)):
        idle = [each for each in pool.executors.values() if each.executor is not None and each.executor.is_idle]
        if not idle:
            return
        del pool.rate_changed[id_]
        function = cycle.state.functions.get(id_)
        if function is not None and function.pool is not None and function.loaded:
            _add_replica(cycle, function, idle)


def _add_replica(cycle: Cycle, function: Function, idle: Sequence[Device]) -> None:
    """Bring a function to one more of these devices, if the policy wants it and there is space."""
    slo_ms, holders = function.spec.settings.slo_ms, list(cycle.state.pool.holders(function))
    candidates = [each for each in idle if each not in holders and _suits(cycle, each, function)]
    if slo_ms is None or not holders or not candidates:
        return
    rate, run_s = _rate(cycle, function), swaps.run_s(cycle, function, 1)
    swap_wait_s = min(_swap_wait_s(function, each, holders, run_s) for each in candidates)
    demand = Demand(rate, run_s, swap_wait_s, slo_ms / 1000, len(holders))
    if not call_policy(cycle.state, function, False, wants_replica, demand):
        return
    victims = dict(_with_space(cycle, function, candidates))
    if not victims:
        return
    options = swaps.options(cycle, function, list(victims))
    choice = least_wait(options, 0)
    chosen = next(each for each in options if each.device == choice.device)
    # A transfer behind the same switch would slow down those for which requests wait.
    if chosen.neighbour != "nothing" or not chosen.missing_bytes:
        return
    device = cycle.state.pool.devices[choice.device]
    device_runs.bring(cycle, function, device, choice, victims[device])
    others = ", ".join(each.config.name for each in holders)
    text = f"{rate:.1f} requests/s of {1e3 * run_s:.1f} ms would too often find {others} busy"
    cycle.explain(function, "ahead", f"{choice.device} gets its blocks before a request needs them: {text}")
    watch(cycle, function)


def _with_space(cycle: Cycle, function: Function, devices: Sequence[Device]) -> Iterator[tuple[Device, list[Function]]]:
    """Yield those of these devices on which a function finds space, and what may be evicted there for it."""
    for each in devices:
        short = each.short_bytes(each.missing_bytes(pool_record(function)))
        less_valuable = swaps.less_valuable(cycle, function, each) if short else {}
        if short <= sum(less_valuable.values()):
            yield each, list(less_valuable)


def _swap_wait_s(function: Function, device: Device, holders: Sequence[Device], run_s: float) -> float:
    """The time for which a run on a device would wait for blocks over the fastest of its links from the host and the
    devices that have the function, if nothing else is brought.
    """
    config, missing = device.config, device.missing_bytes(pool_record(function))
    rate = max(config.bytes_per_s, *(config.peers.get(each.config.name, 0.0) for each in holders))
    return max(0.0, config.latency_s + missing / rate - run_s)


def _suits(cycle: Cycle, device: Device, function: Function) -> bool:
    pooled = pool_record(function)
    fits = pooled.nbytes <= device.config.memory_bytes and device.config.name not in pooled.unplaced
    may_be_brought = not pooled.preparation_failed and cycle.now >= function.backoff_until
    return fits and may_be_brought and device.owner == owner_of(cycle, function)


def _rate(cycle: Cycle, function: Function) -> float:
    """The expected requests per second of a function: its family's, times the function's share of the recent uses."""
    family = function.family
    often = {id_: 1 / each.use_interval_s for id_, each in family.members.items() if each.use_interval_s}
    share = 1.0 if len(family.members) == 1 else often.get(function.spec.id, 0.0) / (sum(often.values()) or 1.0)
    return share * max(sizing.expected_rate(cycle, family), sizing.current_rate(cycle, family))

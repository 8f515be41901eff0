"""The queue for devices: its order, and the periods in which the order adapts to the load.

Tenants whose functions wait for the same devices get equal device time, and the policy orders the functions of each.
This is start-time fair queueing (Goyal et al., 1996): the run with the lowest start tag is next, and its finish tag is
later by its time on the device. The start tag of a run is the finish tag of its tenant's last run, but at least the
virtual time: the start tag of the last run that began.
"""

from collections.abc import Iterable, Mapping
from math import inf

from overwinter.core.ids import FunctionId, Seconds, TenantId
from overwinter.scheduler import swaps
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.families import has_slo
from overwinter.scheduler.operation import Operation
from overwinter.scheduler.policies.device_queueing import (
    EVERYONE,
    LONG,
    PERIOD_S,
    RULES,
    Rank,
    Waiting,
    boundary,
    next_alpha,
)
from overwinter.scheduler.policies.queueing import order_late
from overwinter.scheduler.pool import Device, Pool, pool_record
from overwinter.scheduler.request import Request
from overwinter.scheduler.state import Function

KEY = "alpha"
"""The key of the timer of the periods."""


def start_tag(cycle: Cycle, function: Function) -> float:
    """Return the start tag of the next run of the function's tenant, in seconds; 0 if no other tenant waits."""
    pool = cycle.state.pool
    if len(pool.waiting.of_tenants) < 2:
        return 0.0
    return _start_tag(pool, function.spec.tenant)


def behind_s(cycle: Cycle, tenant: TenantId | None, other: TenantId | None) -> float:
    """Return how much less device time this tenant has had than another one that waits."""
    if tenant == other or tenant is None or other is None:
        return 0.0
    return max(0.0, _start_tag(cycle.state.pool, other) - _start_tag(cycle.state.pool, tenant))


def count_run(cycle: Cycle, function: Function, expected_s: float) -> None:
    """A run of the function begins on a device."""
    pool, tenant = cycle.state.pool, function.spec.tenant
    pool.virtual_time = _start_tag(pool, tenant)
    pool.finish_tags[tenant] = pool.virtual_time + expected_s
    if len(pool.finish_tags) > len(cycle.state.tenants):
        pool.finish_tags = {each: tag for each, tag in pool.finish_tags.items() if tag > pool.virtual_time}


def correct_run(cycle: Cycle, operation: Operation) -> None:
    """A run has ended, sooner or later than expected."""
    pool, tenant = cycle.state.pool, operation.function.spec.tenant
    pool.finish_tags[tenant] = pool.finish_tags.get(tenant, pool.virtual_time) + cycle.now - operation.ends


def _start_tag(pool: Pool, tenant: TenantId) -> float:
    """Return the start tag of the tenant's next run."""
    return max(pool.virtual_time, pool.finish_tags.get(tenant, 0.0))


def ranks(cycle: Cycle, functions: Iterable[Function], free: Iterable[Device]) -> list[Rank]:
    """Return the ranks of functions with waiting requests; the lowest gets the next of the free devices. Under the
    default policy, late requests of a function are first moved behind its others, if its first request is late.
    """
    _update_boundary(cycle)
    rule, last = RULES[cycle.policy.device_order], cycle.state.pool.boundary
    if cycle.policy.device_order != "overwinter":
        return [rule(_waiting(cycle, each), last) for each in functions]
    beside = {each: len(swaps.neighbours(cycle, each)) for each in free}
    return [rule(_in_time_first(cycle, each, beside), last) for each in functions]


def _in_time_first(cycle: Cycle, function: Function, beside: Mapping[Device, int]) -> Waiting:
    """Describe a function to the policy. If its first request has an SLO and is late, first move the late requests
    behind those that can be in time, which would otherwise wait until they are late, too. `beside`: for each free
    device, the number of neighbours that bring blocks.
    """
    requests, run_s = cycle.state.requests, swaps.run_s(cycle, function, 1)
    swap_wait_s = swaps.least_swap_wait_s(cycle, function, beside, run_s)
    soonest, first = cycle.now + swap_wait_s + run_s, requests[function.queue[0]]
    with_slo = has_slo(function, first)
    if with_slo and first.due < soonest:
        order_late(function.queue, requests, soonest, late_first=False)
    return _waiting(cycle, function, with_slo, swap_wait_s, soonest)


def _waiting(
    cycle: Cycle, function: Function, with_slo: bool = True, swap_wait_s: float = 0.0, soonest: float = -inf
) -> Waiting:
    """Describe a function to the policy, by its first request. `soonest`: when that could be answered."""
    first, required = cycle.state.requests[function.queue[0]], pool_record(function).outcomes.required
    is_late = first.due < soonest
    return Waiting(function.spec.id, first.level, first.arrived, first.due, required, with_slo, swap_wait_s, is_late)


def waiting_long(cycle: Cycle, functions: Iterable[Function]) -> list[tuple[Function, Request]]:
    """Return the requests that have waited for a long time, one of each function, if the next run is for one of them.
    One in LONG_EVERY runs is, so that requests do not wait until they expire. Ordered by level, then those without an
    SLO first (late requests also get the devices that nobody else uses), then by arrival.
    """
    pool, requests = cycle.state.pool, cycle.state.requests
    if cycle.policy.device_order != "overwinter" or pool.bindings < pool.next_long_binding:
        return []
    found: list[tuple[int, bool, Seconds, FunctionId, Request]] = []
    for function in functions:
        first = min((requests[id_] for id_ in function.queue), key=lambda each: (each.level, each.arrived))
        if cycle.now - first.arrived > LONG * (first.deadline - first.arrived):
            found.append((first.level, has_slo(function, first), first.arrived, function.spec.id, first))
    found.sort(key=lambda each: each[:-1])
    return [(cycle.state.functions[id_], first) for *_, id_, first in found]


def count_answer(cycle: Cycle, function: Function, in_time: bool) -> None:
    """Count an answer to a request of a function."""
    pool, id_ = cycle.state.pool, function.spec.id
    if cycle.policy.device_order != "rrc" or function.removed:
        return
    pool_record(function).outcomes.add(cycle.now, in_time)
    pool.with_answers[id_] = function
    _require(pool, function)
    if cycle.timers.at(KEY) is None:
        cycle.timers.arm(KEY, cycle.now + PERIOD_S)


def end_period(cycle: Cycle) -> None:
    """Forget old answers, and change alpha if the share of functions that comply with their SLO has changed."""
    pool = cycle.state.pool
    for id_, function in list(pool.with_answers.items()):
        outcomes = pool_record(function).outcomes
        outcomes.forget(cycle.now)
        _require(pool, function)
        if not outcomes.count:
            del pool.with_answers[id_]
    pool.is_boundary_stale = True
    if not pool.with_answers:
        pool.ratio = None
        return
    ratio = sum(pool_record(each).outcomes.complies for each in pool.with_answers.values()) / len(pool.with_answers)
    if pool.ratio is not None:
        pool.alpha = next_alpha(pool.alpha, pool.ratio, ratio)
    pool.ratio = ratio
    cycle.timers.arm(KEY, Seconds(cycle.now + PERIOD_S))


def _require(pool: Pool, function: Function) -> None:
    """Note the required requests of a function. Only positive counts matter, and few functions have one."""
    id_, required = function.spec.id, pool_record(function).outcomes.required
    if required > 0:
        pool.is_boundary_stale, pool.required[id_] = True, required
    elif pool.required.pop(id_, None) is not None:
        pool.is_boundary_stale = True


def _update_boundary(cycle: Cycle) -> None:
    pool = cycle.state.pool
    if pool.is_boundary_stale:
        required = ((count, id_) for id_, count in pool.required.items())
        pool.boundary, pool.is_boundary_stale = EVERYONE if pool.alpha >= 1 else boundary(required, pool.alpha), False

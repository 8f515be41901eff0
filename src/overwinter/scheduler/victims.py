"""Chooses the victims that free a scarce resource for the first in its queue.

For capacity for a worker: the least valuable idle worker (idle.py) of a tenant, the tenants with the largest shares
first; otherwise a worker whose time slice is over, which gets no more work. Tenants share by max-min fairness: a share
is the largest of a tenant's parts of the workers, of their private memory and of their concurrent runs. A tenant takes
a worker from another if it then has no more than the other. A tenant without a worker takes one from the tenant with
the most. The runs of another tenant's worker must end within the drain timeout, and so must its start. A worker's time
slice lasts as long as ten wakes, so that replacing workers costs a small share of the time; for another tenant it ends
at the latest `drain_timeout_s` after the worker was ready or, if the worker is idle, after it became idle. A worker
that has been idle for KEPT_FOR_TENANT_S may be stopped for any tenant, regardless of shares, but not for a worker
beyond that tenant's maximum. A worker that drains for its own tenant in an overdue run may not end soon, so another one
is freed too, but none whose run is overdue as well.

For bytes of a host store: the blocks of an unused function; otherwise a whole function in use drains when its time
slice is over. A function's time slice begins with its first worker or run on a device after its blocks were loaded. If
it began earlier, functions that wait for capacity or a core would take the blocks from each other, and none would run.
It is longer than that of a worker, because blocks come from disk. A function in use that has nothing to do is evicted
sooner, unless it is used so often that it would be loaded again at once, or was just loaded.
"""

from collections import Counter
from collections.abc import Iterator
from heapq import heappop
from itertools import islice
from math import inf
from typing import NamedTuple

from overwinter.core.ids import Address, FunctionId, StoreName, TenantId, WorkerId
from overwinter.scheduler import ahead
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.forked import ForkedAhead
from overwinter.scheduler.idle import least_valuable
from overwinter.scheduler.ledger import Claim, Resource
from overwinter.scheduler.operations import TIME_SLICE_WAKES
from overwinter.scheduler.order import share, tenant_workers_max
from overwinter.scheduler.policies.eviction import RULES, Candidate
from overwinter.scheduler.policy_failures import call_policy
from overwinter.scheduler.state import Function, Worker
from overwinter.scheduler.tenant import Tenant

BYTES_TIME_SLICE_WAKES = 100
"""How long a function may keep its blocks when others wait for a host store, in wakes of the function."""
KEPT_USE_INTERVALS = 4.0
"""How long after its last use an idle function keeps its blocks, as a multiple of its usual time between uses. If this
is longer than its time slice, the function is used too rarely to keep them.
"""
CANDIDATES = 32
"""The number of unused functions that are compared, the longest unused first."""
SCANNED_MAX = 1024
"""The number of unused functions among which these are searched: others may share all their blocks."""
TIME_SLICES_CHECKED = 8
"""The number of a tenant's workers that are checked for the earliest end of a time slice."""
KEPT_FOR_TENANT_S = 60.0
"""How long an idle worker is kept for its tenant, if the tenant has no more than its share; also how long the only
device of a tenant is kept while idle (replacement.py).
"""
EVICTION_WORK_MAX = 1 << 15
"""The most work of a step that evicts from the host stores, in blocks that are released and functions that are
considered: about 15 ms.
"""
SEARCHED_WORK = 8
"""The work of considering a function in use, in the same unit."""
EPSILON = 1e-9
"""Shares that differ by less are equal."""


class Victim(NamedTuple):
    """The worker to stop or drain for a resource; without one, the time from which there may be one (inf: never)."""

    worker: Worker | None = None
    at: float = inf


# Worker capacity


class FutureClaims:
    """The claims when workers that stop or drain with a time limit have ended, and the functions that were added have
    started.
    """

    def __init__(self, cycle: Cycle) -> None:
        self._cycle = cycle
        self._added: Counter[Resource] = Counter()
        self._workers: Counter[TenantId] = Counter()
        self._taken_over: set[WorkerId] = set()

    def has_capacity(self, function: Function, wanted: Claim, overdue_end: bool = False) -> bool:
        """Whether there will be capacity for what a function wants. Workers of its own tenant that drain without a time
        limit count as ended, but those with an overdue run only with `overdue_end`: it may last until its timeout.
        """
        cycle, resources, mine = self._cycle, self._cycle.resources, function.spec.tenant
        given_back = [
            resources.of_worker(each.point, each.nbytes)
            for each in cycle.state.tenants[mine].draining_without_limit.values()
            if overdue_end or overdue_at(each) > cycle.now
        ]
        if self._process_for(function, wanted) is not None:
            given_back.append(ahead.claim(cycle))
        workers = resources.workers.staying(mine) - len(given_back) + self._workers[mine]
        if wanted.get(resources.workers) and workers >= tenant_workers_max(cycle):
            return False
        for resource, amount in wanted.items():
            taken = resource.taken - resource.draining - sum(claim.get(resource, 0) for claim in given_back)
            if not resource.fits(amount, taken + self._added[resource]):
                return False
        return True

    def victim(self, function: Function, wanted: Claim) -> Victim:
        """Return the worker to stop so that there will be capacity for what a function wants, or when one may be
        stopped. If enough workers drain already, and only overdue runs delay them, no further one with an overdue run
        is drained.
        """
        return for_capacity(self._cycle, function, wanted, self.has_capacity(function, wanted, overdue_end=True))

    def add(self, function: Function, wanted: Claim) -> None:
        """Add the claim of a function for which there will be capacity."""
        self._added.update(wanted)
        self._workers[function.spec.tenant] += wanted.get(self._cycle.resources.workers, 0)
        process = self._process_for(function, wanted)
        if process is not None:
            self._taken_over.add(process.id)
            self._added.subtract(ahead.claim(self._cycle))
            self._workers[function.spec.tenant] -= 1

    def _process_for(self, function: Function, wanted: Claim) -> ForkedAhead | None:
        """Return the process forked ahead that a start of the function will use, or None."""
        found = ahead.usable_process(self._cycle, function, wanted)
        return None if found is None or found.id in self._taken_over else found


def overdue_at(worker: Worker) -> float:
    """When the first run of a worker is overdue; infinite: it has none."""
    return min((run.overdue_at for run in worker.runs.values()), default=inf)


def for_capacity(cycle: Cycle, function: Function, wanted: Claim, spares_overdue: bool = False) -> Victim:
    """Return the worker to stop so that a function gets what it wants (capacity for a worker, or only private memory),
    or when one may be stopped. `spares_overdue`: return no worker of the function's tenant with an overdue run.
    """
    victim = idle_for_capacity(cycle, function, wanted)
    if victim.worker is not None:
        return victim
    mine, most, next_at = function.spec.tenant, _most_workers(cycle), victim.at
    for tenant in _by_share(cycle):
        if tenant.id == mine and function.has_usable_worker:
            continue
        worker, at = _next_time_slice_end(cycle, tenant, mine == tenant.id, spares_overdue)
        if worker is not None and _may_take(cycle, function, wanted, worker, most):
            if at <= cycle.now:
                return Victim(worker)
            next_at = min(next_at, at)
    return Victim(None, next_at)


def idle_for_capacity(cycle: Cycle, function: Function, wanted: Claim) -> Victim:
    """Return the same as `for_capacity`, but consider idle workers only."""
    most, next_at = _most_workers(cycle), inf
    for tenant in _by_share(cycle):
        spare = least_valuable(tenant)
        if spare is not None and _may_take(cycle, function, wanted, spare, most):
            return Victim(spare)
        worker, at = _idle_for_long(cycle, function, wanted, tenant)
        if worker is not None and at <= cycle.now:
            return Victim(worker)
        next_at = min(next_at, at)
    return Victim(None, next_at)


def may_be_stopped_for(cycle: Cycle, function: Function, wanted: Claim, worker: Worker) -> bool:
    """Whether a worker may be stopped for what a function wants."""
    return not worker.stopping and _may_take(cycle, function, wanted, worker, _most_workers(cycle))


def _by_share(cycle: Cycle) -> list[Tenant]:
    """The order in which tenants free resources: the tenant with the largest share first."""
    return sorted(_with_workers(cycle), key=lambda each: -share(cycle, each.id))


def _most_workers(cycle: Cycle) -> int:
    """The number of workers of the tenant with the most."""
    return max((cycle.resources.workers.staying(each.id) for each in _with_workers(cycle)), default=0)


def _with_workers(cycle: Cycle) -> list[Tenant]:
    """The tenants with workers or processes forked ahead."""
    workers = cycle.resources.workers
    return [each for each in cycle.state.tenants.values() if workers.of(each.id)]


def _idle_for_long(cycle: Cycle, function: Function, wanted: Claim, tenant: Tenant) -> tuple[Worker | None, float]:
    """Return the first in `spare` of another tenant, and when it may be stopped regardless of shares."""
    longest = next(iter(tenant.spare.values()), None)
    if longest is None or _is_at_maximum(cycle, function, wanted):
        return None, inf
    return longest, longest.since + KEPT_FOR_TENANT_S


def _next_time_slice_end(cycle: Cycle, tenant: Tenant, own: bool, spares_overdue: bool) -> tuple[Worker | None, float]:
    """Return the worker of a tenant whose time slice ends first, and when it may be stopped or drained.

    `own`: the tenant is that of the function that wants capacity. Then, with `spares_overdue`, no worker with an
    overdue run is returned. Of another tenant, a worker that already drains without a time limit may be returned too,
    or one whose start lasts longer than the drain timeout.
    """
    draining = () if own else (each for each in tenant.draining_without_limit.values() if each.start is None)
    if (leaving := next(iter(draining), None)) is not None:
        return leaving, cycle.now
    ends, workers = tenant.time_slice_ends, cycle.state.workers
    while ends and ((worker := workers.get(ends[0][1])) is None or not worker.is_serving):
        heappop(ends)
    first = [(at, worker) for at, id_ in ends[:TIME_SLICES_CHECKED] if (worker := workers.get(id_)) is not None]
    if own and spares_overdue:
        first = [(at, worker) for at, worker in first if overdue_at(worker) > cycle.now]
    candidates = [(at if own else _taken_at(cycle, worker, at), worker) for at, worker in first if worker.is_serving]
    at, found = min(candidates, key=lambda each: each[0], default=(inf, None))
    if own:
        return found, at
    starting = next(iter(tenant.starting.values()), None)
    if starting is None or at < (start_until := starting.since + cycle.config.drain_timeout_s):
        return found, at
    return starting, start_until


def _taken_at(cycle: Cycle, worker: Worker, at: float) -> float:
    """When another tenant may take a serving worker whose time slice ends at `at`. An idle one stays for the drain
    timeout: its requests may wait for a full batch or a core, and usually its run begins earlier.
    """
    drain_s = cycle.config.drain_timeout_s
    at = min(at, worker.ready_at + drain_s)
    return at if worker.runs or worker.binds else max(at, worker.since + drain_s)


def _is_at_maximum(cycle: Cycle, function: Function, wanted: Claim) -> bool:
    """Whether a function wants a worker and its tenant has its maximum of workers."""
    workers = cycle.resources.workers
    return bool(wanted.get(workers)) and workers.of(function.spec.tenant) >= tenant_workers_max(cycle)


def _may_take(cycle: Cycle, function: Function, wanted: Claim, worker: Worker, most: int) -> bool:
    """Whether a function may replace this worker; `most`: the workers of the tenant with the most."""
    mine, giver = function.spec.tenant, worker.tenant
    if giver == mine:
        return True
    workers, memory = cycle.resources.workers, cycle.resources.memory
    if _is_at_maximum(cycle, function, wanted):
        return False
    if not workers.staying(mine):
        return workers.staying(giver) == most
    after = share(cycle, giver, -1, -worker.nbytes)
    return share(cycle, mine, wanted.get(workers, 0), wanted[memory]) <= after + EPSILON


# Bytes of a host store


def for_bytes(cycle: Cycle) -> Function | None:
    """Return the unused function to evict, or None.

    A function that shares every block frees nothing. It is evicted last, so that the last function that shares the
    blocks frees them.
    """
    return _least_valuable(cycle, iter(cycle.state.evictable.values()))


def next_in_use(cycle: Cycle) -> tuple[Function | None, float]:
    """Return the function in use whose blocks are evicted next, those with nothing to do first, and the current time or
    an earlier one; or None and the time from which one may be evicted (inf: never).
    """
    state = cycle.state
    waiting = [
        id_ for tenant in state.waiting_for_capacity.values() for id_ in (*tenant.first_workers, *tenant.more_workers)
    ]
    using: dict[FunctionId, None] = dict.fromkeys(id_ for worker in state.workers.values() for id_ in worker.bound)
    using |= dict.fromkeys((*waiting, *state.core_queue.timely, *state.core_queue.late))
    operations = (each.operation for each in state.pool.devices.values())
    using |= dict.fromkeys(each.spec.id for each in state.pool.waiting)
    using |= dict.fromkeys(each.function.spec.id for each in operations if each is not None)
    cycle.eviction_work += SEARCHED_WORK * len(using)
    holding = [each for id_ in using if (each := state.functions.get(id_)) is not None and _may_drain(each)]
    idle = [each for each in holding if _has_nothing_to_do(each) and _drains_at(each) <= cycle.now]
    if idle:
        return _least_valuable(cycle, iter(sorted(idle, key=lambda each: each.used_at))), cycle.now
    first = min(holding, key=lambda function: (_drains_at(function), function.used_at), default=None)
    if first is None:
        return None, inf
    at = _drains_at(first)
    return (first if at <= cycle.now else None), at


def evictable_bytes(cycle: Cycle, keep: Function) -> int:
    """The bytes that evicting the unused functions would free, as many as one step evicts, without the blocks that
    `keep` needs.
    """
    evicted: dict[StoreName, Counter[Address]] = {}
    work = 0
    for function in cycle.state.evictable.values():
        if (work := work + len(function.sizes)) > EVICTION_WORK_MAX:
            break
        evicted.setdefault(function.spec.store, Counter()).update(function.sizes.keys())
    stores = cycle.state.stores
    return sum(
        stores[store].sizes.get(address, 0)
        for store, counts in evicted.items()
        for address, count in counts.items()
        if stores[store].holders[address] == count and not (store == keep.spec.store and address in keep.sizes)
    )


def pinned_bytes(cycle: Cycle, function: Function) -> int:
    """Return the bytes that other functions have pinned in the host stores, without blocks shared with this
    function.
    """
    everywhere = sum(pinned.nbytes for pinned in cycle.state.pinned.values())
    there = cycle.state.pinned.get(function.spec.store)
    shared = () if there is None else (size for address, size in function.sizes.items() if address in there.sizes)
    return everywhere - sum(shared)


def _least_valuable(cycle: Cycle, functions: Iterator[Function]) -> Function | None:
    """Return the least valuable of these functions, which are ordered by last use; the first if no eviction would
    free bytes. Only the first SCANNED_MAX are considered.
    """
    state, rule = cycle.state, RULES[cycle.policy.eviction]
    first: Function | None = None
    values: dict[FunctionId, float] = {}
    for each in islice(functions, SCANNED_MAX):
        first = first or each
        if nbytes := state.held_blocks(each).exclusive(each.spec.id):
            values[each.spec.id] = call_policy(state, each, 0.0, rule, _candidate(cycle, each, nbytes))
        if len(values) == CANDIDATES:
            break
    return state.functions[min(values, key=values.__getitem__)] if values else first


def _candidate(cycle: Cycle, function: Function, nbytes: int) -> Candidate:
    return Candidate(cycle.now - function.used_at, function.use_interval_s, nbytes, len(function.sizes))


def _may_drain(function: Function) -> bool:
    return function.loaded and not function.spec.settings.pinned and not function.wants_wake


def _drains_at(function: Function) -> float:
    if function.blocks_usable_from is None:
        return inf
    wake_s = function.latency.wake_s
    time_slice_s, least_s = BYTES_TIME_SLICE_WAKES * wake_s, TIME_SLICE_WAKES * wake_s
    ends = function.blocks_usable_from + time_slice_s
    if not _has_nothing_to_do(function):
        return ends
    often = KEPT_USE_INTERVALS * function.use_interval_s
    return min(
        ends, max(function.blocks_usable_from + least_s, function.used_at + (often if often < time_slice_s else 0.0))
    )


def _has_nothing_to_do(function: Function) -> bool:
    id_ = function.spec.id
    return not (function.queue or (function.pool is not None and function.pool.running)) and not any(
        each.works_for(id_) and not each.stopping for each in function.workers.values()
    )

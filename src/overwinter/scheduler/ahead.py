"""Decides which processes are forked ahead of requests, which starts use them, and when they are stopped.

A process forked ahead belongs to one tenant, whose zygote forks it: in the sandbox, with the zygote's programs, and
without data of a function. The tenant's next start of a function uses it instead of a fork, if the process has the
function's program, the worker is to have a concurrency of 1, and the function is not on trial. The process claims
capacity for a worker, private memory and a concurrency of 1, and a core while it starts. These processes are forked
while cores are idle, some time after the last start, and are stopped first when any function waits for capacity or
memory.
"""

from overwinter.core.actions import ForkAhead, StopWorker
from overwinter.core.events import WorkerExited
from overwinter.core.ids import Seconds, TenantId, WorkerId
from overwinter.core.profile import Point
from overwinter.scheduler.answers import forget_tenant
from overwinter.scheduler.backoff import backoff_s
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.forked import AHEAD_BYTES, ForkedAhead
from overwinter.scheduler.ledger import Claim
from overwinter.scheduler.operation import Operation
from overwinter.scheduler.operations import OVERDUE_LEAST_S, end
from overwinter.scheduler.order import has_spare_core, tenant_workers_max
from overwinter.scheduler.resources import start_owner, worker_owner
from overwinter.scheduler.state import Function
from overwinter.scheduler.tenant import Tenant

KEY = "ahead"
"""The key of the timer."""
TENANT_AHEAD_MAX = 2
"""The most processes of one tenant: one for its next start, and one for the function that is called after it, as in
a pipeline. A used process is replaced soon.
"""
REFILL_S = 0.25
"""The pause after a tenant's last start, or while cores are busy, so that a burst of wakes gets all cores."""
KEEP_S = 600.0
"""A tenant without a start for this long gets no process ahead."""
OTHERS_S = 60.0
"""A tenant loses its process to a tenant whose last start is this much later."""
FULL_S = 10.0
"""The pause until the next check if there are no free resources."""
CALM_S = 60.0
"""The pause after memory had to be released."""
START_S = 0.01
"""The estimated time of a fork ahead."""


# Using a process for a start


def usable_process(cycle: Cycle, function: Function, wanted: Claim) -> ForkedAhead | None:
    """Return the process that a start of the function with this claim would use: the one that has waited longest."""
    if wanted.get(cycle.resources.runs) != 1 or function.on_trial:
        return None
    spec = function.spec
    for each in cycle.state.ahead.values():
        waits = each.start is None and not each.stopping
        if waits and each.tenant == spec.tenant and spec.program in each.programs:
            return each
    return None


def claim(cycle: Cycle) -> Claim:
    """The claim of a process forked ahead until a start uses it, or its exit."""
    return {cycle.resources.workers: 1, cycle.resources.memory: AHEAD_BYTES, cycle.resources.runs: 1}


def take_over(cycle: Cycle, function: Function, point: Point) -> WorkerId | None:
    """Record a start of the function. Return the process forked ahead that it uses, or None; the process is removed,
    and its claim is released, because the caller takes one for the worker.
    """
    found = usable_process(cycle, function, cycle.resources.of_start(point))
    figures = cycle.state.tenants[function.spec.tenant].fork_figures
    figures.function, figures.started = function.spec.id, cycle.now
    set_check(cycle, cycle.now + REFILL_S)
    if found is None:
        return None
    figures.failures = 0
    del cycle.state.ahead[found.id]
    cycle.ledger.release(worker_owner(found.id))
    cycle.timers.disarm(found.id)
    message = f"its worker uses a process that was forked ahead and waited for {cycle.now - found.since:.1f} s"
    cycle.explain(function, "ahead", message)
    return found.id


# Forking and stopping processes


def set_check(cycle: Cycle, at: float) -> None:
    """Set the time of the next check of the processes forked ahead."""
    if cycle.config.workers_ahead:
        cycle.timers.arm(KEY, at)


def check(cycle: Cycle) -> None:
    """Stop processes that are not needed, and fork one more if no function has to wait for it."""
    cycle.ahead_due = False
    _end_unneeded(cycle)
    tenant = _next_tenant(cycle)
    if tenant is not None and _fits_now(cycle, tenant) and _may_fork(cycle):
        _fork(cycle, tenant)
    for each in cycle.state.ahead.values():
        if each.start is None and not each.stopping:
            set_check(cycle, cycle.state.tenants[each.tenant].fork_figures.started + KEEP_S)


def _end_unneeded(cycle: Cycle) -> None:
    for each in list(cycle.state.ahead.values()):
        if not each.stopping and not _is_needed(cycle, each):
            _stop(cycle, each)


def _is_needed(cycle: Cycle, each: ForkedAhead) -> bool:
    """Whether its tenant starts functions, and it has the most recently used program."""
    tenant, prepared = cycle.state.tenants[each.tenant], cycle.state.prepared.get(each.tenant, {})
    is_fresh = bool(prepared) and next(reversed(prepared)) in each.programs
    return is_fresh and bool(tenant.functions) and tenant.fork_figures.started + KEEP_S > cycle.now


def _next_tenant(cycle: Cycle) -> Tenant | None:
    """Return the tenant for which a process is forked next: of those with less than their share and no pause now, the
    one whose last start is the latest. If no further process is allowed, stop one for it if possible; return None.
    """
    state, now, most = cycle.state, cycle.now, cycle.config.workers_ahead or 0
    able = [
        each
        for each in state.tenants.values()
        if each.fork_figures.function
        and each.functions
        and state.prepared.get(each.id)
        and each.fork_figures.started + KEEP_S > now
    ]
    able.sort(key=lambda each: (-each.fork_figures.started, each.id))
    share = max(1, min(TENANT_AHEAD_MAX, most // max(1, len(able))))
    for tenant in able:
        pauses_until = max(tenant.fork_figures.started + REFILL_S, tenant.fork_figures.backoff_until, cycle.ahead_after)
        # Functions with the same program usually share a worker.
        if _count(cycle, tenant.id) >= min(share, len(state.prepared[tenant.id])):
            continue
        if pauses_until > now:
            set_check(cycle, pauses_until)
        elif len(state.ahead) < most:
            return tenant
        else:
            _end_for(cycle, tenant, share)
            return None
    return None


def _end_for(cycle: Cycle, tenant: Tenant, share: int) -> None:
    """Stop a process of a tenant that has more than its share, or started nothing for some time, in favour of this
    tenant.
    """
    for each in cycle.state.ahead.values():
        figures = cycle.state.tenants[each.tenant].fork_figures
        is_old = figures.started + OTHERS_S <= min(cycle.now, tenant.fork_figures.started)
        if not each.stopping and each.start is None and (is_old or _count(cycle, each.tenant) > share):
            _stop(cycle, each)
            return


def _count(cycle: Cycle, tenant: TenantId) -> int:
    return sum(each.tenant == tenant for each in cycle.state.ahead.values())


def _fits_now(cycle: Cycle, tenant: Tenant) -> bool:
    fits = all(resource.fits(amount) for resource, amount in claim(cycle).items())
    fits = fits and cycle.resources.workers.of(tenant.id) < tenant_workers_max(cycle)
    if not fits:
        set_check(cycle, cycle.now + FULL_S)
    return fits


def _may_fork(cycle: Cycle) -> bool:
    """Whether no function waits for a core or capacity for a worker, no core is busy or at least two are free, and no
    other fork ahead is in progress.
    """
    may_fork = has_spare_core(cycle) and all(each.start is None for each in cycle.state.ahead.values())
    if not may_fork:
        set_check(cycle, cycle.now + REFILL_S)
    return may_fork


def _fork(cycle: Cycle, tenant: Tenant) -> None:
    state, now, config = cycle.state, cycle.now, cycle.config
    function = state.functions.get(tenant.fork_figures.function) or state.functions[next(iter(tenant.functions))]
    id_ = cycle.last_worker = WorkerId(cycle.last_worker + 1)
    hangs_at = now + config.start_timeout_s
    start = Operation(function, now, now + START_S, now + OVERDUE_LEAST_S, hangs_at)
    state.ahead[id_] = ForkedAhead(id_, tenant.id, frozenset(state.prepared[tenant.id]), now, start)
    cycle.ledger.take(worker_owner(id_), tenant.id, claim(cycle))
    cycle.ledger.take(start_owner(id_), None, cycle.resources.of_cores(1, cycle.orders_cores))
    if cycle.orders_cores:
        state.holding_cores[start_owner(id_)] = start
    cycle.timers.arm(id_, hangs_at)
    cycle.actions.append(ForkAhead(id_, function.spec.id))


# Results of forks


def ready(cycle: Cycle, id_: WorkerId) -> None:
    """Handle a process that is forked and waits."""
    found = cycle.state.ahead.get(id_)
    if found is not None and found.start is not None:
        _end_start(cycle, found)
        found.since = cycle.now
        cycle.timers.disarm(id_)
        cycle.ahead_due = True


def exited(cycle: Cycle, event: WorkerExited) -> bool:
    """Handle the exit of a process, for which no function is at fault; False: it was not forked ahead."""
    found = cycle.state.ahead.pop(event.worker, None)
    if found is None:
        return False
    _end_start(cycle, found)
    if not found.stopping:
        _fail(cycle, found)
    cycle.ledger.release(worker_owner(found.id))
    cycle.timers.disarm(found.id)
    cycle.capacity_changed = cycle.ahead_due = True
    forget_tenant(cycle, found.tenant)
    return True


def hung(cycle: Cycle, id_: WorkerId) -> None:
    """Handle a process that takes too long to start or to stop."""
    found = cycle.state.ahead.get(id_)
    if found is not None:
        if not found.stopping:
            _fail(cycle, found)
        _stop(cycle, found)


def _fail(cycle: Cycle, found: ForkedAhead) -> None:
    figures = cycle.state.tenants[found.tenant].fork_figures
    figures.failures += 1
    figures.backoff_until = Seconds(cycle.now + backoff_s(figures.failures, cycle.config))


def _end_start(cycle: Cycle, found: ForkedAhead) -> None:
    if found.start is not None:
        found.start = None
        end(cycle, start_owner(found.id))


def _stop(cycle: Cycle, found: ForkedAhead) -> None:
    """Kill it at once: it has no work to complete."""
    found.stopping, found.since = True, cycle.now
    _end_start(cycle, found)
    cycle.ledger.drain(worker_owner(found.id))
    cycle.capacity_changed = True
    cycle.timers.disarm(found.id)
    cycle.timers.arm(found.id, cycle.now + cycle.config.stop_timeout_s)
    cycle.actions.append(StopWorker(found.id, kill=True))


# Freeing resources


def victim(cycle: Cycle, function: Function, wanted: Claim) -> ForkedAhead | None:
    """Return the process to stop for what a function wants: one of the function's tenant, or else one of another,
    unless the function wants a worker and its tenant has its maximum of workers.

    The process that the function's own start would use is excluded, because its claim already counts for the start.
    """
    mine, workers, used = function.spec.tenant, cycle.resources.workers, usable_process(cycle, function, wanted)
    found = [each for each in cycle.state.ahead.values() if not each.stopping and each is not used]
    own = next((each for each in found if each.tenant == mine), None)
    if own is not None or (wanted.get(workers) and workers.of(mine) - (used is not None) >= tenant_workers_max(cycle)):
        return own
    return next(iter(found), None)


def stop_for(cycle: Cycle, function: Function, wanted: Claim) -> bool:
    """Stop a process for what a function wants; False: no process would help."""
    found = victim(cycle, function, wanted)
    if found is not None:
        _stop(cycle, found)
    return found is not None


def release(cycle: Cycle, nbytes: float) -> int:
    """Stop processes until this many bytes are freed, or none is left; return the freed bytes. If bytes were needed, no
    process is forked for a while.
    """
    freed = 0
    for each in [each for each in cycle.state.ahead.values() if not each.stopping]:
        if freed < nbytes:
            freed += AHEAD_BYTES
            _stop(cycle, each)
    if nbytes > 0:
        cycle.ahead_after = Seconds(cycle.now + CALM_S)
    return freed


def stopping_bytes(cycle: Cycle) -> int:
    """The bytes of the processes that are being stopped."""
    return sum(AHEAD_BYTES for each in cycle.state.ahead.values() if each.stopping)

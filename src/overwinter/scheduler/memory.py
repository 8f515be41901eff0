"""Decides which worker is stopped when all together take more memory than allowed.

A worker is admitted with its need, the measured memory of its function, and may take up to `memory_mib`. Memory is
assigned by needs, so when the limit is exceeded, some worker takes more than its need. Idle workers are a cache and are
stopped first: those of tenants with a worker that exceeds its need, and any that has been idle for KEPT_FOR_TENANT_S.
Then only workers that exceed their needs are stopped: a busy worker within its need is not stopped for others. Workers
may use memory beyond their needs until a function of another tenant needs it. Then a worker that takes far more than
its need is killed at once, if it is ending anyway or the tenants' shares allow it, and neither an idle worker nor a
process forked ahead can be stopped instead.

A need is measured without the handler and without large tensors, and is a guess before that. So a worker may take
somewhat more, and workers that take far more are chosen first. Of these, a worker of the tenant with the largest sum
of their excesses is chosen: many small excesses count as one large one. Of that tenant, an idle worker goes before a
busy one. If no worker takes far more, none is at fault, and the idle workers of all tenants go first.
"""

from collections import Counter
from collections.abc import Iterable

from overwinter.core.actions import StopWorker
from overwinter.core.events import MemoryMeasured
from overwinter.core.ids import TenantId
from overwinter.scheduler import ahead, families, functions, idle
from overwinter.scheduler.answers import refuse
from overwinter.scheduler.binding import claim_of_queued, unbind_half, was_unloaded
from overwinter.scheduler.counterpart import refuse_waiting
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.ledger import Claim
from overwinter.scheduler.operations import count_bytes, end_run, smoothed, stop
from overwinter.scheduler.retention import release_blocks, release_idle
from overwinter.scheduler.state import Function, Worker
from overwinter.scheduler.victims import KEPT_FOR_TENANT_S, idle_for_capacity, may_be_stopped_for

MIB = 1 << 20
SLACK = 1.5
SLACK_BYTES = 32 << 20
"""A worker is far beyond its need when it takes more than SLACK times its need plus these bytes."""
MEMBER_BYTES = 1 << 20
"""What each further function bound in a worker adds to the worker's need in `is_far_beyond`."""


def measured(cycle: Cycle, event: MemoryMeasured) -> None:
    """Record the memory of workers, unbind functions in those far beyond their need, and stop workers if the sum
    exceeds the limit.
    """
    workers, memory = cycle.state.workers, cycle.resources.memory
    for id_, taken in event.taken:
        if id_ in workers:
            _set_memory(cycle, workers[id_], taken)
            if is_far_beyond(workers[id_]):
                unbind_half(cycle, workers[id_])
    if memory.capacity is None or memory.taken <= memory.capacity:
        return
    stopping = [worker for worker in workers.values() if worker.stopping]
    # A worker that was asked to stop may continue to grow.
    cycle.actions += [StopWorker(worker.id, kill=True) for worker in stopping if is_far_beyond(worker)]
    over = memory.taken - memory.capacity - sum(worker.nbytes for worker in stopping)
    over -= ahead.stopping_bytes(cycle)
    over -= ahead.release(cycle, over)
    over -= _stop_idle(cycle, over)
    while over > 0 and (excessive := next_to_stop(workers.values())) is not None:
        over -= excessive.nbytes
        kill_excessive(cycle, excessive)


def _stop_idle(cycle: Cycle, over: int) -> int:
    """Stop idle workers, the least valuable first, until this many bytes are freed, or none may be stopped; returns the
    freed bytes.
    """
    freed, workers = 0, cycle.state.workers.values()
    beyond = {worker.tenant for worker in workers if not worker.stopping and idle.excess(worker) > 0}
    for worker in idle.in_order(cycle.state.tenants.values()) if over > 0 else ():
        if freed < over and (worker.tenant in beyond or cycle.now - worker.since >= KEPT_FOR_TENANT_S):
            freed += worker.nbytes
            idle.evict(cycle, worker, kill=True)
    return freed


def release(cycle: Cycle, nbytes: int) -> None:
    """Release memory because the machine is short of it: stop processes forked ahead, then evict unused blocks, then
    unbind unused functions, then stop idle workers, then workers far beyond their need.
    """
    freed = ahead.release(cycle, nbytes)
    freed += release_blocks(cycle, nbytes - freed)
    freed += release_idle(cycle, nbytes - freed)
    while freed < nbytes and (excessive := next_to_stop(cycle.state.workers.values())) is not None:
        if not is_far_beyond(excessive):
            return
        freed += excessive.nbytes
        kill_excessive(cycle, excessive)


def _excessive_for(cycle: Cycle, function: Function, wanted: Claim) -> Worker | None:
    """Return the worker of another tenant that is stopped for what a function wants: a worker has memory beyond its
    need only until a function of another tenant needs it.
    """
    memory, mine, workers = cycle.resources.memory, function.spec.tenant, cycle.state.workers.values()
    if memory.capacity is None or len(cycle.state.tenants) <= 1:
        return None
    staying = memory.taken - sum(worker.nbytes for worker in workers if worker.stopping)
    staying -= ahead.stopping_bytes(cycle)
    if staying + wanted[memory] <= memory.capacity:
        return None
    others = (worker for worker in workers if worker.tenant != mine and is_far_beyond(worker))
    return next_to_stop(
        worker for worker in others if is_leaving(worker) or may_be_stopped_for(cycle, function, wanted, worker)
    )


def stop_excessive(cycle: Cycle, function: Function) -> bool:
    """If a function in the queue for capacity lacks memory because a worker takes far more than its need, stop an idle
    worker that may be stopped, otherwise that one. Return whether one was stopped: not while a process forked ahead can
    be stopped instead.
    """
    wanted = claim_of_queued(cycle, function)
    if ahead.victim(cycle, function, wanted) is not None:
        return False
    excessive = _excessive_for(cycle, function, wanted)
    if excessive is None:
        return False
    found = idle_for_capacity(cycle, function, wanted)
    if found.worker is None:
        kill_excessive(cycle, excessive)
    else:
        idle.evict(cycle, found.worker)
    return True


def is_leaving(worker: Worker) -> bool:
    """Whether the worker will end soon, whatever it runs."""
    return worker.stopping or (worker.drain is not None and (not worker.runs or worker.drain.until is not None))


def is_far_beyond(worker: Worker) -> bool:
    """Whether the worker takes far more than its need."""
    need = worker.point.memory_bytes + MEMBER_BYTES * (len(worker.bound) - 1)
    return worker.measured_bytes > need * SLACK + SLACK_BYTES


def next_to_stop(workers: Iterable[Worker]) -> Worker | None:
    """Return the worker that is stopped next; None: none exceeds its need."""
    beyond = [worker for worker in workers if not worker.stopping and idle.excess(worker) > 0]
    far = [worker for worker in beyond if is_far_beyond(worker)]
    beyond = far or beyond
    together: Counter[TenantId] = Counter()
    for worker in beyond:
        together[worker.tenant] += idle.excess(worker)
    return max(beyond, key=lambda worker: (not far and worker.is_idle, _stop_rank(worker, together)), default=None)


def kill_excessive(cycle: Cycle, worker: Worker) -> None:
    """Kill a worker that takes more than its need. Its requests are refused if it takes far more, or if it is
    still starting, because a retry would take as much; otherwise they are retried as after any death.
    """
    why, had = _reason(worker), [each.function for each in worker.bound.values()]
    cycle.current, worker.stopped_for, starts_for = worker.function, why, worker.starts_for
    for function in had:
        if not function.removed:
            cycle.explain(function, "stop", why)
    if worker.is_idle or not (starts_for is not None or is_far_beyond(worker)):
        stop(cycle, worker, kill=True)
        return
    at_work = [function for each in (*worker.runs.values(), *worker.binds.values()) for function in each.functions]
    refused = [
        id_ for run in list(worker.runs) for id_ in end_run(cycle, worker, run).requests if id_ in cycle.state.requests
    ]
    stop(cycle, worker, kill=True)
    for id_ in refused:
        refuse(cycle, id_, "NoSpaceError", why, cycle.config.retry_after_min_s)
    if starts_for is not None and not starts_for.has_usable_worker:
        refuse_waiting(cycle, starts_for, "NoSpaceError", why, cycle.config.retry_after_min_s)
    for function in {each.spec.id: each for each in at_work or had}.values():
        # A function that was unloaded and is loaded again is not at fault: another worker will have it.
        if not (function.removed or was_unloaded(worker, function)):
            functions.fail(cycle, function, "NoSpaceError", why)


def _set_memory(cycle: Cycle, worker: Worker, taken: int) -> None:
    """Record the memory of a worker. A stopped one frees it only when its process has ended."""
    before, family, bound = worker.nbytes, worker.family, len(worker.bound) - len(worker.binds)
    worker.measured_bytes = max(taken, worker.measured_bytes) if worker.stopping else taken
    if bound and not worker.stopping:
        family.bind_bytes = smoothed(family.bind_bytes, idle.excess(worker) / bound)
    # The measurement includes the memory of completed binds, and excludes that of replaced functions. Of binds in
    # progress it may include nothing yet.
    worker.coming_bytes = len(worker.binds) * int(family.bind_bytes)
    count_bytes(cycle, worker)
    if worker.nbytes < before:
        # What did not fit beside it may fit now.
        families.mark(cycle, family)


def _reason(worker: Worker) -> str:
    """Why a worker is stopped, and what can be done."""
    return (
        f"a worker of function {worker.function} took {worker.measured_bytes / MIB:.1f} MiB and was stopped: it was "
        f"expected to need {worker.point.memory_bytes / MIB:.1f} MiB, and the memory of all workers ran short "
        "(--memory-bytes, --memory-free-min-bytes). Reduce its memory, set memory_mib so that allocations fail "
        "earlier, or give the node more"
    )


def _stop_rank(worker: Worker, together: Counter[TenantId]) -> tuple[int, TenantId, bool, int, int]:
    return together[worker.tenant], worker.tenant, worker.is_idle, idle.excess(worker), worker.id

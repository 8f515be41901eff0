"""Orders idle workers and functions for eviction (policies/worker_eviction.py).

An idle worker, and an idle function that is bound in a worker with others, are entries of a cache: they stay until
others need their memory or worker capacity, a keep-alive ends (retention.py), or a scaler releases the worker.
"""

from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import NamedTuple

from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.operations import stop
from overwinter.scheduler.policies.worker_eviction import RULES, Idle
from overwinter.scheduler.policy_failures import call_policy
from overwinter.scheduler.state import Binding, Function, Worker
from overwinter.scheduler.tenant import Tenant

UNUSED_S = 60.0
"""When the machine is short of memory, a function that is unused for this long is unbound before an idle worker is
stopped.
"""


class UnusedBinding(NamedTuple):
    """An idle function that is bound with others, and the bytes that unbinding it frees."""

    worker: Worker
    binding: Binding
    nbytes: int


def value(cycle: Cycle, worker: Worker) -> float:
    """The value of keeping a worker that becomes idle."""
    family = worker.family
    start_s = family.latency.wake_s if family.start_s is None else family.start_s
    cost_s = start_s + family.bind_s * (len(worker.bound) - 1)
    # The uses of a family are divided among its workers.
    idle = Idle(cycle.now, cycle.eviction_clock, family.uses / len(family.workers), cost_s, worker.nbytes)
    return call_policy(cycle.state, _any_of(worker), 0.0, RULES[cycle.policy.worker_eviction], idle)


def least_valuable(tenant: Tenant) -> Worker | None:
    """Return a tenant's least valuable idle worker for which no request waits; of equals the first in `spare`."""
    return min(tenant.spare.values(), key=attrgetter("value"), default=None)


def in_order(tenants: Iterable[Tenant]) -> list[Worker]:
    """Return the idle workers of these tenants, the least valuable first."""
    idle = (worker for tenant in tenants for worker in tenant.spare.values())
    return sorted(idle, key=attrgetter("value", "since", "id"))


def evict(cycle: Cycle, worker: Worker, kill: bool = False) -> None:
    """Stop an idle worker, because others need its memory or capacity."""
    cycle.eviction_clock = max(cycle.eviction_clock, worker.value)
    why = f"others need its memory or capacity, and it was idle for {cycle.now - worker.since:.1f} s"
    cycle.explain(_any_of(worker), "evict-worker", why)
    stop(cycle, worker, kill)


def excess(worker: Worker) -> int:
    """The measured memory of a worker beyond the need of one function; it includes that of further bound functions."""
    return max(0, worker.measured_bytes - worker.point.memory_bytes)


def _any_of(worker: Worker) -> Function:
    """Return any function of the worker."""
    return next(iter(worker.bound.values())).function


def unused_bindings(cycle: Cycle) -> list[UnusedBinding]:
    """Return the functions that are bound with others and unused for UNUSED_S, the least recently used first."""
    found = [unused for worker in cycle.state.workers.values() for unused in _unused_in(cycle, worker)]
    return sorted(found, key=lambda each: (each.binding.function.used_at, each.worker.id))


def _unused_in(cycle: Cycle, worker: Worker) -> Iterator[UnusedBinding]:
    """Yield each function of a worker that is unused for UNUSED_S and whose unbinding frees memory: the function's part
    of the worker's excess memory, and the blocks that only it holds, if it is bound in no other worker and not pinned.
    """
    if not worker.is_serving or len(worker.bound) < 2:
        return
    part = excess(worker) // len(worker.bound)
    for binding in worker.bound.values():
        function = binding.function
        is_unused = function.used_at + UNUSED_S <= cycle.now and not (function.queue or function.wants_wake)
        if not is_unused or binding.draining or worker.works_for(function.spec.id):
            continue
        alone = len(function.workers) == 1 and not function.spec.settings.pinned
        nbytes = part + (cycle.state.held_blocks(function).exclusive(function.spec.id) if alone else 0)
        if nbytes:
            yield UnusedBinding(worker, binding, nbytes)

"""Invariants of the queues that hold after every event, for tests and checked simulations."""

from overwinter.core.ids import FunctionId
from overwinter.scheduler import ahead, device_invariants, order, victims
from overwinter.scheduler.admission import has_capacity
from overwinter.scheduler.binding import claim_of_queued, could_fit, free_workers, worker_to_bind_in
from overwinter.scheduler.blocks import missing_bytes
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.limits import why_never_fits
from overwinter.scheduler.retention import EVICTION_PAUSE_S
from overwinter.scheduler.state import Function, State
from overwinter.scheduler.wants import cores_in_use, wants_capacity


def check(cycle: Cycle) -> None:
    """Raise AssertionError if the queues contradict the tables, or a function waits without a reason."""
    _check_queues(cycle)
    _check_cores(cycle)
    _check_capacity(cycle)
    _check_bytes(cycle)
    for function in cycle.state.functions.values():
        if not _is_offered_slot(cycle, function):
            _check_progress(cycle, function)


def _check_queues(cycle: Cycle) -> None:
    """Each function waits in at most one queue, for its want, and for a reason."""
    state = cycle.state
    queues: dict[FunctionId, list[str]] = {}
    for tenant in state.tenants.values():
        is_listed = tenant.id in state.waiting_for_capacity
        assert (tenant.first_waiting is not None) == is_listed, f"the queue of tenant {tenant.id} is wrong"
        for id_ in tenant.first_workers:
            assert not state.functions[id_].has_usable_worker, f"{id_} waits for its first worker but has one"
        for id_ in tenant.more_workers:
            assert state.functions[id_].has_usable_worker, f"{id_} waits for one more worker but has none"
        for id_ in (*tenant.first_workers, *tenant.more_workers):
            queues.setdefault(id_, []).append("capacity")
    for id_ in state.core_queue.timely.keys() | state.core_queue.late.keys():
        queues.setdefault(id_, []).append("cores")
    for id_ in state.waiting_for_bytes:
        queues.setdefault(id_, []).append("bytes")
    queues |= device_invariants.waiting(cycle)
    assert queues == {id_: [each.waits_in] for id_, each in state.functions.items() if each.waits_in}, (
        "a queue is wrong"
    )
    assert all(each.waits_in == "capacity" for each in state.functions.values() if each.lacks_memory), (
        "memory for a bind is awaited in another queue"
    )
    for id_ in queues:
        function = state.functions[id_]
        assert function.queue or function.wants_wake, f"{id_} waits in a queue without a want"
        assert not function.unloaded, f"{id_} waits in a queue but is unloaded"
        # A function whose blocks were lost loads them again, and may run meanwhile in a worker that has it. If another
        # function took its slot there, the first function leaves the queue at its turn.
        runs_on = function.waits_in == "cores" and any(each.is_serving for each in function.workers.values())
        assert function.loading is None or runs_on, f"{id_} waits in a queue during its load"
        assert id_ != state.releasing, f"{id_} waits in a queue while it is drained for its bytes"
        assert function.waits_in == "cores" or function.loaded == (function.waits_in in ("capacity", "devices")), (
            f"{id_} waits in the wrong queue, {function.waits_in}"
        )


def _check_cores(cycle: Cycle) -> None:
    """While functions wait for cores, fewer are free than the first of them needs. Runs do not exceed the cores, except
    one urgent run and one of each tenant.
    """
    state, cores = cycle.state, cycle.resources.cores
    if state.core_queue.for_workers and cores_in_use(cycle) < cycle.cores:
        assert cycle.timers.at("cores") is not None, "functions were not asked for a further worker, but a core is free"
    waiting = [state.functions[id_] for id_ in (*state.core_queue.timely, *state.core_queue.late)]
    of_tenants = {id_: tenant for tenant, own in state.core_queue.tenants.items() for id_ in own}
    assert of_tenants == {each.spec.id: each.spec.tenant for each in waiting}, "wrong tenants wait for cores"
    served = {operation.function.spec.tenant for operation in state.holding_cores.values()}
    assert state.core_queue.tenants.keys() <= served, "a tenant without a core waits for one"
    if waiting:
        assert cycle.orders_cores, "a function waits for cores, which are unlimited"
        first = _first_for_cores(state)
        assert first is None or not cores.fits(order.needs(first)), "the first function that waits for cores could run"
    if cores.capacity is not None:
        held = [
            worker.point.run_cores
            for worker in state.workers.values()
            for run in worker.runs
            if _holds_cores(cycle, run)
        ]
        beyond = 1 + sum(sorted(held)[-len(served) :]) if served else 0
        assert sum(held) <= cores.capacity + beyond, "the runs exceed the cores"


def _first_for_cores(state: State) -> Function | None:
    """The first of the queue for cores as it is; `order.first_for_cores` would first move those that are late now."""
    queue, timely = state.core_queue, min(state.core_queue.timely.values(), default=None)
    if queue.late and (timely is None or order.is_turn_of_late(queue.assigned)):
        return state.functions[next(iter(queue.late))]
    return None if timely is None else state.functions[timely[-1]]


def _holds_cores(cycle: Cycle, run: int) -> bool:
    return ("run", run) in cycle.state.holding_cores


def _check_capacity(cycle: Cycle) -> None:
    """The first in the queue waits because there is no worker capacity or no core. Without capacity, enough workers end
    already, or no process forked ahead could be stopped for it, and no worker either, unless its want has changed.
    """
    function = order.first_for_capacity(cycle)
    if function is None:
        return
    id_ = function.spec.id
    if has_capacity(cycle, function):
        waits = order.waits_for_cores(cycle, function) and not cycle.resources.cores.fits(1)
        assert waits, f"{id_} waits although there is capacity"
        return
    wanted = claim_of_queued(cycle, function)
    assert could_fit(cycle, function), f"{id_} waits for capacity, but would not fit even alone"
    future = victims.FutureClaims(cycle)
    if not future.has_capacity(function, wanted):
        assert ahead.victim(cycle, function, wanted) is None, f"{id_} could use the capacity of a process forked ahead"
        stale = function.has_usable_worker and not wants_capacity(cycle, function)
        assert stale or not future.victim(function, wanted).worker, f"{id_} waits although a worker could be stopped"


def _check_bytes(cycle: Cycle) -> None:
    function, host = order.first_for_bytes(cycle), cycle.resources.host
    if function is None:
        return
    id_ = function.spec.id
    assert host.capacity is not None, f"{id_} waits for host bytes, which are unlimited"
    assert why_never_fits(function, host.capacity, victims.pinned_bytes(cycle, function)) is None
    assert not host.fits(missing_bytes(cycle, function)), f"{id_} waits although the host store has space"
    # With many unused functions, a step evicts some, and the next one follows soon.
    at = cycle.timers.at("bytes")
    if at is None or at > cycle.now + EVICTION_PAUSE_S:
        assert victims.for_bytes(cycle) is None, f"{id_} waits although unused blocks could be evicted"


def _is_offered_slot(cycle: Cycle, function: Function) -> bool:
    """Whether a worker of its family has a free slot that the step that follows at once offers to more functions."""
    with_slot = (worker.id for worker in function.family.workers.values() if worker.has_slot)
    return any((at := cycle.timers.at(id_)) is not None and at <= cycle.now for id_ in with_slot)


def _check_progress(cycle: Cycle, function: Function) -> None:
    """Each function with work is in a queue, or an operation or timer will lead back to it."""
    id_ = function.spec.id
    if not (function.queue or function.wants_wake) or function.waits_in is not None or function.batch_at is not None:
        return
    if function.pool is not None:
        waits = cycle.now < function.backoff_until or id_ == cycle.state.releasing
        assert function.loading is not None or waits, f"{id_} wants a device but waits for no event"
        return
    free = [worker.id for worker in function.workers_with_slot()]
    assert not (function.queue and free), f"requests of {id_} wait although workers {free} are free"
    comes = function.loading is not None or any(not worker.is_idle for worker in function.usable_workers())
    waits = cycle.now < function.backoff_until or id_ == cycle.state.releasing
    worker = worker_to_bind_in(cycle, function, free_workers(function))
    if worker is not None and not function.on_trial and not waits:
        assert function.is_starting or function.loading is not None, (
            f"{id_} waits although worker {worker.id} could bind it"
        )
    assert comes or waits, f"{id_} wants a worker but waits for no event"

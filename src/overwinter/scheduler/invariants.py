"""Invariants that hold after every event, for tests and checked simulations. The scheduler itself does not
check them.
"""

from collections import Counter
from collections.abc import Mapping
from math import inf

from overwinter.core.ids import Address, FunctionId, RequestId, StoreName
from overwinter.scheduler import ahead, device_invariants, families, order, victims
from overwinter.scheduler.admission import has_capacity
from overwinter.scheduler.binding import claim_of_queued, could_fit, free_workers, worker_to_bind_in
from overwinter.scheduler.blocks import missing_bytes
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.device_invariants import check_exclusive
from overwinter.scheduler.ledger import Claim, Owner
from overwinter.scheduler.limits import why_never_fits
from overwinter.scheduler.policies import keepalive
from overwinter.scheduler.resources import bind_owner, request_owner, run_owner, start_owner, store_owner, worker_owner
from overwinter.scheduler.retention import EVICTION_PAUSE_S
from overwinter.scheduler.state import Function, State, Worker
from overwinter.scheduler.wants import wants_capacity


def check(cycle: Cycle) -> None:
    """Raise AssertionError if the tables contradict each other, or a function waits without a reason."""
    state = cycle.state
    assert not cycle.changed, "the want of a changed function was not computed"
    _check_requests(state)
    _check_workers(cycle)
    _check_ahead(cycle)
    _check_ledger(cycle)
    _check_stores(cycle)
    _check_queues(cycle)
    _check_cores(cycle)
    _check_capacity(cycle)
    _check_bytes(cycle)
    device_invariants.check(cycle)
    for function in state.functions.values():
        _check_progress(cycle, function)
        _check_timers(cycle, function)


# Requests, workers and functions


def _check_requests(state: State) -> None:
    queued: list[RequestId] = []
    for id_, function in state.functions.items():
        queued += function.queue
        assert all(state.requests[request].holder == id_ for request in function.queue)
        assert not function.unloaded or not function.queue, f"requests wait for {id_}, which is unloaded"
        levels = [state.requests[request].level for request in function.queue]
        assert levels == sorted(levels), f"the queue of {id_} is out of order"
    running = [id_ for worker in state.workers.values() for id_ in worker.requests()]
    operations = (device.operation for device in state.pool.devices.values())
    running += [id_ for operation in operations if operation is not None for id_ in operation.requests]
    assert len(set(queued)) == len(queued), "a request is queued twice"
    assert len(set(running)) == len(running), "a request runs twice"
    assert not set(queued) & set(running), "a request is queued and runs"
    assert set(state.requests) <= set(queued) | set(running), "a request is neither queued nor running"


def _check_workers(cycle: Cycle) -> None:
    state = cycle.state
    for id_, function in state.functions.items():
        assert all(state.workers[worker] is each for worker, each in function.workers.items())
        having = {worker.id for worker in state.workers.values() if id_ in worker.bound}
        had = {each for each in having if state.workers[each].bound[id_].function is function}
        assert had == set(function.workers), f"{id_} is bound in other workers than recorded"
    for worker in state.workers.values():
        in_progress = len(worker.runs) + len(worker.binds)
        assert in_progress <= worker.point.concurrency, f"worker {worker.id} runs more than it can"
        assert not worker.is_idle or worker.drain is None, f"worker {worker.id} drains without work"
        assert worker.stopping or worker.bound, f"worker {worker.id} has no function and is not stopped"
        assert worker.stopping or worker.runs or not worker.is_orphaned, f"worker {worker.id} is of no use"
        runs = Counter(each.spec.id for run in worker.runs.values() for each in run.functions)
        assert runs == {id_: each.runs for id_, each in worker.bound.items() if each.runs}, "wrong counts of runs"
        assert worker.binds.keys() <= worker.bound.keys(), f"worker {worker.id} binds a function that is not recorded"
        keep_alive_s = keepalive.longest_s(worker, cycle.policy)
        assert worker.keep_alive_s in (None, keep_alive_s), f"worker {worker.id} has the keep-alive of other functions"
        for id_, binding in worker.bound.items():
            assert binding.function.spec.tenant == worker.tenant, f"{id_} is in a worker of another tenant"
            assert not binding.draining or worker.stopping or worker.works_for(id_), f"{id_} should be unbound"
            assert binding.draining or worker.drain or worker.stopping or binding.function.family is worker.family, (
                f"{id_} is in a worker of another family"
            )
    _check_families(cycle)
    _check_versions(state)
    _check_tenants(cycle)


def _check_families(cycle: Cycle) -> None:
    state, members = cycle.state, list[FunctionId]()
    for family in state.families.values():
        members += family.members
        assert all(each.family is family for each in family.members.values()), (
            f"a member of {family.id} names another family"
        )
        settings = [each.spec.settings for each in family.members.values()]
        assert family.keep_alive_members == sum(each.keep_alive_s is not None for each in settings)
        slos_ms = Counter(each.slo_ms for each in settings if each.slo_ms is not None)
        assert (family.slos_ms, family.slo_ms) == (slos_ms, min(slos_ms, default=None)), f"wrong SLOs of {family.id}"
        assert family.max_workers == sum(each.max_workers for each in settings), f"max_workers of {family.id} is wrong"
        waiting = {id_ for id_, each in family.members.items() if each.queue}
        assert set(family.waiting) == waiting, f"the waiting members of {family.id} are wrong"
        able = {id_ for id_ in waiting if cycle.now >= family.members[id_].backoff_until}
        wanting = {id_ for id_ in able if family.members[id_].waits_in not in ("capacity", "bytes")}
        # A member whose backoff is over is recorded when its timer is handled.
        due = {id_ for id_ in wanting if (at := cycle.timers.at(id_)) is not None and at <= cycle.now}
        known = set(family.wanting_idle_worker)
        assert wanting - due <= known <= wanting, f"wrong members of {family.id} want an idle worker"
        for id_, trunk in family.trunks.items():
            own_waiting = {each for each in waiting if family.members[each].trunk == id_}
            assert set(trunk.waiting) == own_waiting, f"the waiting members of trunk {id_} are wrong"
        tenants = {each.spec.tenant for each in family.members.values()}
        assert len(tenants) == 1, f"family {family.id} has the tenants {tenants}"
        own = {worker.id for worker in state.workers.values() if worker.family is family}
        assert own == set(family.workers), f"the workers of family {family.id} are wrong"
    assert sorted(members) == sorted(state.functions), "a function has no family, or several"


def _check_versions(state: State) -> None:
    for name, versions in state.versions.items():
        existing = sorted(each.spec.version for each in state.functions.values() if each.spec.name == name)
        assert versions.numbers, f"{name} is recorded without a version"
        assert versions.numbers == sorted(set(versions.numbers)), f"versions of {name} are out of order"
        assert set(versions.numbers) <= set(existing), f"a removed version of {name} is listed"
        assert {share.version for share in versions.shares} <= set(versions.numbers), (
            f"{name} has a share for a removed version"
        )


def _check_tenants(cycle: Cycle) -> None:
    state = cycle.state
    for id_, tenant in state.tenants.items():
        own = [worker for worker in state.workers.values() if worker.tenant == id_]
        functions = {each.spec.id for each in state.functions.values() if each.spec.tenant == id_}
        assert functions == set(tenant.functions), f"the functions of tenant {id_} are wrong"
        kept = [each for each in map(state.functions.__getitem__, functions) if each.loaded or each.loading is not None]
        held = Counter((each.spec.store, address) for each in kept for address in each.sizes)
        assert tenant.held == held, f"the blocks of tenant {id_} are wrong"
        own_ahead = any(each.tenant == id_ for each in state.ahead.values())
        assert functions or own or own_ahead or cycle.resources.requests.of(id_), f"tenant {id_} is not needed"
        assert set(tenant.spare) == {worker.id for worker in own if _is_spare(worker)}, (
            f"the spare workers of {id_} are wrong"
        )
        draining = {worker.id for worker in own if not worker.stopping and worker.drain and worker.drain.until is None}
        assert set(tenant.draining_without_limit) == draining, f"the draining workers of tenant {id_} are wrong"
        starting = {worker.id: worker.since for worker in own if worker.start is not None}
        assert list(tenant.starting) == sorted(starting, key=starting.__getitem__), f"the starts of {id_} are wrong"
        serving = {worker.id for worker in own if worker.is_serving}
        assert serving <= {id_ for _, id_ in tenant.time_slice_ends}, f"a worker of tenant {id_} has no time slice"


def _is_spare(worker: Worker) -> bool:
    return worker.is_idle and not families.is_wanted(worker)


def _check_ahead(cycle: Cycle) -> None:
    """Each process forked ahead belongs to a tenant, is no worker, has a timer, and their number is bounded."""
    state = cycle.state
    assert len(state.ahead) <= (cycle.config.workers_ahead or 0), "too many processes are forked ahead"
    for id_, each in state.ahead.items():
        assert each.id == id_, f"process {id_} is called {each.id}"
        assert id_ not in state.workers, f"worker {id_} is also recorded as forked ahead"
        assert each.tenant in state.tenants, f"process {id_} has no tenant"
        assert each.stopping or state.tenants[each.tenant].functions, f"process {id_} has a tenant without functions"
        key = id_ if each.start is not None or each.stopping else ahead.KEY
        assert cycle.timers.at(key) is not None, f"process {id_} has no timer"


def _check_ledger(cycle: Cycle) -> None:
    """The amounts taken are the sums of the current claims, and within the capacity."""
    state, resources = cycle.state, cycle.resources
    cycle.ledger.check()
    claims: dict[Owner, Claim] = {}
    for worker in state.workers.values():
        claims[worker_owner(worker.id)] = {
            **resources.of_worker(worker.point, worker.nbytes),
            resources.reserved: 0 if worker.stopping else worker.point.cores,
        }
        if worker.start is not None:
            claims[start_owner(worker.id)] = _of_operation(cycle, start_owner(worker.id), 1)
        for run in worker.runs:
            claims[run_owner(run)] = _of_operation(cycle, run_owner(run), worker.point.run_cores)
        for bind in worker.binds.values():
            assert bind.id is not None
            claims[bind_owner(bind.id)] = _of_operation(cycle, bind_owner(bind.id), 1)
    for each in state.ahead.values():
        claims[worker_owner(each.id)] = ahead.claim(cycle)
        if each.start is not None:
            claims[start_owner(each.id)] = _of_operation(cycle, start_owner(each.id), 1)
    claims |= device_invariants.claims(cycle)
    claims |= {request_owner(id_): {resources.requests: 1} for id_ in state.requests}
    claims |= {store_owner(name): {resources.host: store.nbytes} for name, store in state.stores.items()}
    assert _amounts(cycle.ledger.claims()) == _amounts(claims), "the claims in the ledger do not match the operations"
    stopping = sum(worker.nbytes for worker in state.workers.values() if worker.stopping) + ahead.stopping_bytes(cycle)
    # The estimates of binds may have grown since these began.
    coming = sum(worker.coming_bytes for worker in state.workers.values() if not worker.stopping)
    assert resources.memory.fits(0, resources.memory.taken - stopping - coming), "workers use more memory than allowed"
    # The host stores too: where this check is used, their capacity never shrinks below what is taken.
    for resource in (resources.workers, resources.requests, resources.host, resources.runs, resources.reserved):
        is_alone = resource.alone and sum(1 for claim in claims.values() if claim.get(resource)) == 1
        assert is_alone or resource.fits(0), f"too many {resource.name} are taken"


def _of_operation(cycle: Cycle, owner: tuple[str, int], cores: int) -> Claim:
    return cycle.resources.of_cores(cores, owner in cycle.state.holding_cores)


def _amounts(claims: Mapping[Owner, Claim]) -> dict[Owner, Claim]:
    """Return the claims without amounts of 0."""
    found: dict[Owner, Claim] = {}
    for owner, claim in claims.items():
        amounts = claim if all(claim.values()) else {each: amount for each, amount in claim.items() if amount}
        if amounts:
            found[owner] = amounts
    return found


def _check_stores(cycle: Cycle) -> None:
    state = cycle.state
    wanted: dict[StoreName, Counter[Address]] = {}
    pinned: dict[StoreName, dict[Address, int]] = {}
    for function in state.functions.values():
        assert not (function.loaded and function.loading is not None), (
            f"the blocks of {function.spec.id} are loaded twice"
        )
        if function.loaded or function.loading is not None:
            wanted.setdefault(function.spec.store, Counter()).update(function.sizes.keys())
            if function.spec.settings.pinned:
                pinned.setdefault(function.spec.store, {}).update(function.sizes)
    for name, blocks in state.pinned.items():
        assert blocks.sizes == pinned.get(name, {}), f"the pinned blocks of store {name!r} are wrong"
        assert blocks.nbytes == sum(blocks.sizes.values()), f"the pinned bytes of store {name!r} are wrong"
    assert pinned.keys() <= state.pinned.keys(), "pinned blocks are not counted"
    for name, store in state.stores.items():
        assert +store.holders == wanted.get(name, Counter()), f"the number of holders of a block in {name!r} is wrong"
        assert store.nbytes == sum(store.sizes.values()), f"the bytes of store {name!r} are wrong"
        assert set(store.sizes) == set(+store.holders), f"store {name!r} counts a block without a holder"
        holding = [each for each in state.functions.values() if each.loaded or each.loading is not None]
        check_exclusive(store, {each.spec.id: each.sizes for each in holding if each.spec.store == name})
    unused = {
        id_
        for id_, function in state.functions.items()
        if function.loaded
        and not (function.is_used or function.queue or function.wants_wake or function.spec.settings.pinned)
    }
    assert set(state.evictable) == unused, "the table of unused functions is wrong"


# Queues


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


def _check_timers(cycle: Cycle, function: Function) -> None:
    """Every request is answered or refused by its deadline: a timer is set for that time or an earlier one."""
    at = cycle.timers.at(function.spec.id)
    times: list[float] = [request.deadline for request in cycle.state.open_requests(function)]
    check_at = function.family.check_at if function.family.first_member is function else None
    times += [each for each in (function.batch_at, check_at) if each is not None]
    if function.backoff_until > cycle.now:
        times.append(function.backoff_until)
    assert not times or (at is not None and at <= min(times)), f"{function.spec.id} has no timer in time"
    for worker in function.workers.values():
        # A handler that waits for its program is checked when it has the answer.
        waits = min((each.hangs_at for each in (*worker.runs.values(), *worker.binds.values())), default=0.0) == inf
        is_checked = cycle.timers.at(worker.id) is not None or worker.is_idle or worker.stopping
        assert is_checked or waits, f"worker {worker.id} has no timer"

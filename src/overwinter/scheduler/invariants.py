"""Invariants that hold after every event, for tests and checked simulations. The scheduler itself does not
check them.
"""

from collections import Counter
from collections.abc import Mapping
from math import inf

from overwinter.core.ids import Address, FunctionId, RequestId, StoreName
from overwinter.scheduler import ahead, device_invariants, families, queue_invariants
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.device_invariants import check_exclusive
from overwinter.scheduler.ledger import Claim, Owner
from overwinter.scheduler.policies import keepalive
from overwinter.scheduler.resources import bind_owner, request_owner, run_owner, start_owner, store_owner, worker_owner
from overwinter.scheduler.state import Function, State, Worker


def check(cycle: Cycle) -> None:
    """Raise AssertionError if the tables contradict each other, or a function waits without a reason."""
    state = cycle.state
    assert not cycle.changed, "the want of a changed function was not computed"
    _check_requests(state)
    _check_workers(cycle)
    _check_ahead(cycle)
    _check_ledger(cycle)
    _check_stores(cycle)
    queue_invariants.check(cycle)
    device_invariants.check(cycle)
    for function in state.functions.values():
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
    # A call of a program by a handler is accepted at the limit too, because it is a part of an accepted request.
    calls = sum(each.caller is not None for each in state.requests.values())
    assert resources.requests.fits(0, resources.requests.taken - calls), "too many requests are open"
    # The host stores too: where this check is used, their capacity never shrinks below what is taken.
    for resource in (resources.workers, resources.host, resources.runs, resources.reserved):
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

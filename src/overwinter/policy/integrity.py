"""Do the tables of a mind agree with each other, and is nobody forgotten? For tests and checked simulations."""

from collections import Counter

from overwinter.core.ids import Address, RequestId, Seconds, StoreName
from overwinter.policy import cores, reclaiming
from overwinter.policy.mind import Mind
from overwinter.policy.state import Function, State


def check_integrity(mind: Mind, now: Seconds) -> None:
    """AssertionError if, after a step at `now`, the tables contradict each other or something waits for nothing."""
    state = mind.state
    _check_functions(state)
    _check_bodies(state)
    _check_stores(state)
    _check_lines(state)
    _check_room(mind)
    _check_bytes(mind, now)
    _check_cores(mind, now)
    for function in state.functions.values():
        _check_somebody_comes(state, function, now)


def _check_functions(state: State) -> None:
    queued: list[RequestId] = []
    for name, function in state.functions.items():
        queued += function.queue
        ready = state.is_ready(function)
        assert all(state.bodies[worker].function == name for worker in function.bodies), f"{name} counts another's body"
        assert not ready or function.state in ("awake", "unloaded"), f"{name} has a ready body while {function.state}"
        assert function.state != "awake" or ready, f"{name} is awake without a ready body"
        assert all(state.requests[request].function == name for request in function.queue)
        assert function.state != "asleep" or not state.has_body(function), f"{name} is asleep and has a body"
        assert (function.blocks == "coming") == (function.staging is not None), (
            f"{name} awaits blocks that nothing brings"
        )
        assert function.state != "unloaded" or not function.queue, f"requests wait for {name}, which is unloaded"
        levels = [state.requests[request].level for request in function.queue]
        assert levels == sorted(levels), f"the queue of {name} is out of order"
    counted = [worker for function in state.functions.values() for worker in function.bodies]
    assert len(set(counted)) == len(counted), "a body is counted twice"
    running = [id_ for body in state.bodies.values() for run in body.runs.values() for id_ in run]
    assert len(set(queued)) == len(queued), "a request is queued twice"
    assert len(set(running)) == len(running), "a request runs twice"
    assert not set(queued) & set(running), "a request is queued and runs"
    assert set(state.requests) <= set(queued) | set(running), "a request is neither queued nor running"


def _check_bodies(state: State) -> None:
    for body in state.bodies.values():
        assert body.state != "idle" or not body.runs, f"body {body.id} is idle with runs under way"
        assert body.state != "busy" or body.runs, f"body {body.id} is busy with nothing"
        assert len(body.runs) <= body.point.concurrency, f"body {body.id} runs more than it can"
    alive = list(state.bodies.values())
    working = {body.id for body in alive if body.state in ("starting", "busy")}
    assert set(state.working) == working, "the table of working bodies is wrong"
    assert set(state.idle) == {body.id for body in alive if body.state == "idle"}, "the table of idle bodies is wrong"
    assert +state.counts == Counter(body.state for body in alive), "the counts of bodies are wrong"
    assert state.leaving == sum(body.leaves for body in alive), "the count of leaving bodies is wrong"
    assert state.reserved_cores == sum(body.point.cores for body in alive if body.state != "stopping")
    assert state.body_bytes == sum(body.nbytes for body in alive)
    for id_, tenant in state.tenants.items():
        own = [body for body in alive if body.tenant == id_]
        stay = [body for body in own if not body.goes]
        functions = sum(function.spec.tenant == id_ for function in state.functions.values())
        assert functions or own or tenant.requests, f"tenant {id_} has nothing and is counted"
        for line, part in ((state.wants_room, tenant.wants_room), (state.wants_more, tenant.wants_more)):
            its = [name for name in line if state.functions[name].spec.tenant == id_]
            assert its == list(part), f"the lines of tenant {id_} are wrong"
        requests = sum(request.tenant == id_ for request in state.requests.values())
        assert tenant.requests == requests, f"the requests of tenant {id_} are miscounted"
        counted = (tenant.functions, tenant.bodies, tenant.staying, tenant.nbytes)
        assert counted == (functions, len(own), len(stay), sum(body.nbytes for body in stay)), id_
    assert sum(tenant.bodies for tenant in state.tenants.values()) == len(alive), "a tenant with bodies is forgotten"
    assert state.running_cores == sum(body.point.run_cores * len(body.runs) for body in alive)


def _check_stores(state: State) -> None:
    wanted: dict[StoreName, Counter[Address]] = {}
    for function in state.functions.values():
        if function.blocks != "absent":
            wanted.setdefault(function.spec.store, Counter()).update(function.sizes.keys())
    for name, store in state.stores.items():
        assert +store.sharers == wanted.get(name, Counter()), f"the count of sharers of a block in {name!r} is wrong"
        assert store.nbytes == sum(store.sizes.values()), f"the bytes of store {name!r} are wrong"
        assert set(store.sizes) == set(+store.sharers), f"store {name!r} counts a block that nobody holds"
    kept = {name for name, function in state.functions.items() if function.blocks != "absent"}
    assert set(state.kept) == kept, "the list of functions that are kept is wrong"


def _check_lines(state: State) -> None:
    """Who waits for what: each in one line, and for a reason."""
    apart = (state.wants_room, state.wants_more, state.wants_bytes)
    assert len({id_ for line in apart for id_ in line}) == sum(map(len, apart)), "a function waits in two lines"
    assert not set(state.wants_core) & set(state.late), "a function waits twice for a core"
    for id_ in (*state.wants_room, *state.wants_more, *state.wants_bytes, *state.wants_core, *state.late):
        function = state.functions[id_]
        wants = function.queue or function.on_trial or function.announce
        assert wants, f"{id_} waits in line and wants nothing"
        assert function.state != "unloaded", f"{id_} waits in line and is unloaded"
        assert function.blocks != "coming", f"{id_} waits in line while its blocks come"
        assert id_ != state.yields or id_ in {*state.wants_core, *state.late}, f"{id_} waits in line and gives way"
    for id_ in state.wants_bytes:
        assert state.functions[id_].blocks == "absent", f"{id_} waits for bytes and has them"
    for id_ in (*state.wants_room, *state.wants_more):
        assert state.functions[id_].blocks == "present", f"{id_} waits for room without its blocks"
    for id_ in state.wants_room:
        assert not state.has_body(state.functions[id_]), f"{id_} waits among those without a body and has one"
    for id_ in state.wants_more:
        assert state.has_body(state.functions[id_]), f"{id_} waits among those with a body and has none"


def _check_room(mind: Mind) -> None:
    """The first in line for room waits because there is none, and somebody leaves for it or has his turn."""
    state = mind.state
    first = mind.first_in_line()
    if first is None or first in state.wants_core or first in state.late:
        return
    assert not mind.has_room_for(state.functions[first]), f"{first} waits beside room enough"
    idle = mind.idle_for(state.functions[first])
    leaves = any(body.leaves or body.goes for body in state.bodies.values())
    assert idle is None or leaves, f"{first} waits beside an idle body"


def _check_bytes(mind: Mind, now: Seconds) -> None:
    state, limit = mind.state, mind.state.host_limit
    first = next(iter(state.wants_bytes), None)
    if first is None or limit is None:
        assert first is None, "a function waits for bytes that are not bounded"
        return
    function = state.functions[first]
    short = state.host_bytes() + state.residents(function).missing(function.sizes) - limit
    assert short > 0, f"{first} waits beside room enough in the host store"
    victim = reclaiming.next_victim(state, "lru", now, function)
    assert victim is None, f"{first} waits beside blocks that nobody needs"


def _check_cores(mind: Mind, now: Seconds) -> None:
    state = mind.state
    waiting = [state.functions[id_] for id_ in (*state.wants_core, *state.late)]
    if waiting:
        most = max(cores.needs(state, function) for function in waiting)
        assert not cores.is_free(state, mind.cores, most, now), "a core is free while somebody waits for one"


def _check_somebody_comes(state: State, function: Function, now: Seconds) -> None:
    """Whoever has something to do is in a line, or something that ends by itself will come back to it."""
    id_ = function.spec.id
    if not (function.queue or function.on_trial or function.announce):
        return
    if id_ in {*state.wants_core, *state.late} or function.batch_at is not None:
        return
    bodies = [state.bodies[worker] for worker in function.bodies]
    free = [body for body in bodies if body.has_slot]
    assert not (function.queue and free), f"requests of {id_} wait beside body {free}"
    waits = id_ in {*state.wants_room, *state.wants_more, *state.wants_bytes} or id_ == state.yields
    comes = function.blocks == "coming" or any(body.state != "idle" for body in bodies)
    rests = function.state == "resting" or function.rest_until > now
    assert waits or comes or rests, f"{id_} wants a body and waits for nothing"

"""Do the tables of a mind agree with each other? For tests and for simulations that are checked."""

from collections import Counter

from overwinter.core.ids import Address, RequestId, StoreName
from overwinter.policy.state import State


def check_integrity(state: State) -> None:
    """AssertionError if the tables contradict each other."""
    queued: list[RequestId] = []
    for name, function in state.functions.items():
        queued += function.queue
        ready = state.is_ready(function)
        assert all(state.bodies[worker].function == name for worker in function.bodies), f"{name} counts another's body"
        assert not ready or function.state in ("awake", "unloaded"), f"{name} has a ready body while {function.state}"
        assert function.state != "awake" or ready, f"{name} is awake without a ready body"
        assert all(state.requests[request].function == name for request in function.queue)
        levels = [state.requests[request].level for request in function.queue]
        assert levels == sorted(levels), f"the queue of {name} is out of order"
    running = [id_ for body in state.bodies.values() for run in body.runs.values() for id_ in run]
    assert len(set(queued)) == len(queued), "a request is queued twice"
    assert len(set(running)) == len(running), "a request runs twice"
    assert not set(queued) & set(running), "a request is queued and runs"
    assert set(state.requests) <= set(queued) | set(running), "a request is neither queued nor running"
    _check_bodies(state)
    _check_stores(state)


def _check_bodies(state: State) -> None:
    for body in state.bodies.values():
        assert body.state != "idle" or not body.runs, f"body {body.id} is idle with runs under way"
        assert body.state != "busy" or body.runs, f"body {body.id} is busy with nothing"
        assert len(body.runs) <= body.point.concurrency, f"body {body.id} runs more than it can"
        owner = state.functions.get(body.function)
        assert owner is None or body.id in owner.bodies, f"body {body.id} is not counted by {body.function}"
    alive = list(state.bodies.values())
    working = {body.id for body in alive if body.state in ("starting", "busy")}
    assert set(state.working) == working, "the table of working bodies is wrong"
    assert set(state.idle) == {body.id for body in alive if body.state == "idle"}, "the table of idle bodies is wrong"
    assert +state.counts == Counter(body.state for body in alive), "the counts of bodies are wrong"
    assert state.leaving == sum(body.leaves for body in alive), "the count of leaving bodies is wrong"
    assert state.reserved_cores == sum(body.point.cores for body in alive if body.state != "stopping")
    assert state.body_bytes == sum(body.point.memory_bytes for body in alive)
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

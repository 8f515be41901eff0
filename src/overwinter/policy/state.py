"""What the mind knows: functions, bodies, requests. Only the mind writes it."""

from collections import Counter, deque
from collections.abc import Iterable

import msgspec

from overwinter.core.actions import Start
from overwinter.core.function import FunctionSpec
from overwinter.core.ids import Address, FunctionId, FunctionName, RequestId, RunId, Seconds, WorkerId
from overwinter.policy.lifecycles import BlocksState, BodyState, FunctionState


class Request(msgspec.Struct):
    """One request between its arrival and its answer."""

    id: RequestId
    function: FunctionId
    arrived: Seconds
    deadline: Seconds
    start: Start = "warm"
    failures: int = 0
    """Times a body died under it, or could not start for it."""


class Body(msgspec.Struct):
    """One worker process that runs a whole program."""

    id: WorkerId
    function: FunctionId
    state: BodyState = "starting"
    run: RunId | None = None
    batch: tuple[RequestId, ...] = ()
    since: Seconds = Seconds(0.0)
    """When it last became what it is."""


class Function(msgspec.Struct):
    """One version of a function and all that happens around it."""

    spec: FunctionSpec
    on_trial: bool
    state: FunctionState = "asleep"
    blocks: BlocksState = "absent"
    announce: bool = False
    """Somebody waits to hear how the next wake goes."""
    queue: deque[RequestId] = msgspec.field(default_factory=deque)
    bodies: list[WorkerId] = msgspec.field(default_factory=list)
    failures: int = 0
    """Deaths in a row; the backoff grows with them."""
    rest_until: Seconds = Seconds(0.0)
    run_s: float | None = None
    """Smoothed seconds of a run."""


class State(msgspec.Struct):
    """The tables of the mind."""

    functions: dict[FunctionId, Function] = msgspec.field(default_factory=dict)
    versions: dict[FunctionName, list[int]] = msgspec.field(default_factory=dict)
    """Versions that have proved themselves, ascending; the last answers for the name."""
    bodies: dict[WorkerId, Body] = msgspec.field(default_factory=dict)
    requests: dict[RequestId, Request] = msgspec.field(default_factory=dict)
    sharers: Counter[Address] = msgspec.field(default_factory=Counter)
    """How many functions hold a block of the host store, or wait for it."""
    prepared: set[Address] = msgspec.field(default_factory=set)
    """Programs that the zygote holds compiled."""
    wants_room: deque[FunctionId] = msgspec.field(default_factory=deque)
    """Functions that wait for another body to go."""

    def open_requests(self, function: Function) -> list[Request]:
        """The function's requests that have no answer yet, waiting or running."""
        running = [request for worker in function.bodies for request in self.bodies[worker].batch]
        return [self.requests[request] for request in (*function.queue, *running) if request in self.requests]

    def is_ready(self, function: Function) -> bool:
        """Whether a body of the function could run a request."""
        return any(self.bodies[worker].state in ("idle", "busy") for worker in function.bodies)

    def idle_bodies(self, function: Function) -> list[Body]:
        """The function's bodies that wait for work."""
        return [body for worker in function.bodies if (body := self.bodies[worker]).state == "idle"]

    def has_starting(self, function: Function) -> bool:
        """Whether a body of the function is on its way: wakes are single flights."""
        return any(self.bodies[worker].state == "starting" for worker in function.bodies)


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
    running = [request for body in state.bodies.values() for request in body.batch]
    assert len(set(queued)) == len(queued), "a request is queued twice"
    assert len(set(running)) == len(running), "a request runs twice"
    assert not set(queued) & set(running), "a request is queued and runs"
    assert set(state.requests) <= set(queued) | set(running), "a request is neither queued nor running"
    for body in state.bodies.values():
        assert (body.state == "busy") <= bool(body.run is not None), f"body {body.id} is busy with nothing"
        owner = state.functions.get(body.function)
        assert owner is None or body.id in owner.bodies, f"body {body.id} is not counted by {body.function}"
    _check_sharers(state.sharers, state.functions.values())


def _check_sharers(sharers: Counter[Address], functions: Iterable[Function]) -> None:
    wanted: Counter[Address] = Counter()
    for function in functions:
        if function.blocks != "absent":
            wanted.update({blob.address for blob in function.spec.blobs})
    assert +sharers == wanted, "the count of sharers of a block is wrong"

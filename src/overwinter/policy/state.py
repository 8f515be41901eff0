"""What the mind knows: functions, bodies, requests, blocks. Only the mind writes it."""

from collections import Counter, deque
from collections.abc import Mapping

import msgspec

from overwinter.core.actions import Start
from overwinter.core.function import FunctionSpec
from overwinter.core.ids import (
    Address,
    FunctionId,
    FunctionName,
    OperationId,
    RequestId,
    RunId,
    Seconds,
    StoreName,
    TenantId,
    WorkerId,
)
from overwinter.core.profile import Point
from overwinter.policy.lifecycles import BlocksState, BodyState, FunctionState
from overwinter.policy.speeds import Speeds


class Request(msgspec.Struct):
    """One request between its arrival and its answer."""

    id: RequestId
    function: FunctionId
    arrived: Seconds
    deadline: Seconds
    level: int
    """Lower ones go first."""
    start: Start = "warm"
    failures: int = 0
    """Times a body died under it, or could not start for it."""
    tenant: TenantId = TenantId("")


class Body(msgspec.Struct):
    """One worker process that runs a whole program."""

    id: WorkerId
    function: FunctionId
    point: Point
    timeout_s: float
    """A run that takes longer hangs."""
    tenant: TenantId = TenantId("")
    state: BodyState = "starting"
    runs: dict[RunId, tuple[RequestId, ...]] = msgspec.field(default_factory=dict)
    begun: dict[RunId, Seconds] = msgspec.field(default_factory=dict)
    retires: bool = False
    """Gets no more work and goes when it has done what it has."""
    until: Seconds | None = None
    """When it goes even if it has not."""
    since: Seconds = Seconds(0.0)
    """When it last became what it is."""
    ready_at: Seconds = Seconds(0.0)
    """When it could first run something."""
    taken: int = 0
    """Bytes that it takes, as last measured."""
    stopped_for: str = ""
    """Why it was stopped in the middle of what it ran, for those who asked for that."""

    @property
    def nbytes(self) -> int:
        """The memory that it counts for: what it was to need, or what it takes where that is more."""
        return max(self.point.memory_bytes, self.taken)

    def in_hand(self) -> tuple[RequestId, ...]:
        """The requests that it runs."""
        return tuple(id_ for run in self.runs.values() for id_ in run)

    @property
    def leaves(self) -> bool:
        """Whether it will be gone soon."""
        return self.retires or self.state == "stopping"

    @property
    def goes(self) -> bool:
        """Whether it will be gone soon whatever it runs."""
        return self.state == "stopping" or self.until is not None

    @property
    def is_serving(self) -> bool:
        """Whether it takes work, now or when it has a slot."""
        return self.state in ("idle", "busy") and not self.retires

    @property
    def has_slot(self) -> bool:
        """Whether it can be handed one more run."""
        return self.is_serving and len(self.runs) < self.point.concurrency


class Function(msgspec.Struct):
    """One version of a function and all that happens around it."""

    spec: FunctionSpec
    on_trial: bool
    speeds: Speeds
    sizes: Mapping[Address, int]
    """Its blocks, each once."""
    state: FunctionState = "asleep"
    blocks: BlocksState = "absent"
    staging: OperationId | None = None
    """What brings its blocks, while they come."""
    awaits: Point | None = None
    """What it would start, if it waits in line for room."""
    announce: bool = False
    """Somebody waits to hear how the next wake goes."""
    queue: deque[RequestId] = msgspec.field(default_factory=deque)
    bodies: list[WorkerId] = msgspec.field(default_factory=list)
    failures: int = 0
    """Deaths in a row; the backoff grows with them."""
    rest_until: Seconds = Seconds(0.0)
    lost: bool = False
    """Its blocks had vanished from memory, and it was tried once more; nothing of it has run since."""
    restage: bool = False
    """Its blocks did not fit, others were let go, and it is tried once more."""
    used: Seconds = Seconds(0.0)
    """When it last was given something to run."""
    every_s: float = 0.0
    """Smoothed time between two uses."""
    batch_at: Seconds | None = None
    """When what waits must go, full batch or not."""
    tick_at: Seconds | None = None
    """When the number of its bodies is looked at again."""
    arrivals: int = 0
    """Since the last tick."""
    rates: list[float] = msgspec.field(default_factory=list)
    """Requests per second of the last periods, newest last."""
    foretold: float | None = None
    gaps: list[float] = msgspec.field(default_factory=list)
    """How long its idle bodies waited for work, the last times."""
    best_effort: bool = False
    """No configuration keeps its promise."""
    turns: int = 0
    """Runs that its requests went into."""
    fault: str = ""
    """Why it is out of service, though nobody unloaded it."""
    turn_at: Seconds | None = None
    """When a body of it first could use the blocks that it has in the host store; None: none has yet."""


class Tenant(msgspec.Struct):
    """What one tenant has of the node."""

    functions: int = 0
    bodies: int = 0
    """Alive."""
    staying: int = 0
    """Of these, those that are not sure to be gone soon."""
    nbytes: int = 0
    """Memory that those that stay count for."""
    requests: int = 0
    """Without an answer."""
    wants_room: dict[FunctionId, None] = msgspec.field(default_factory=dict)
    wants_more: dict[FunctionId, None] = msgspec.field(default_factory=dict)
    """Its own functions of the two lines for room."""

    @property
    def first(self) -> FunctionId | None:
        """Its function that comes first."""
        return next(iter(self.wants_room or self.wants_more), None)


class Residents(msgspec.Struct):
    """The blocks that one host store holds, or will hold, for the functions kept there."""

    sharers: Counter[Address] = msgspec.field(default_factory=Counter)
    """How many functions hold a block, or wait for it."""
    sizes: dict[Address, int] = msgspec.field(default_factory=dict)
    nbytes: int = 0

    def missing(self, sizes: Mapping[Address, int]) -> int:
        """Bytes of these that the store neither has nor awaits."""
        return sum(nbytes for address, nbytes in sizes.items() if address not in self.sizes)

    def exclusive(self, sizes: Mapping[Address, int]) -> int:
        """Bytes of these that leave if the one function that holds them goes."""
        return sum(nbytes for address, nbytes in sizes.items() if self.sharers[address] == 1)

    def hold(self, sizes: Mapping[Address, int]) -> None:
        """One more function is kept with these."""
        self.nbytes += self.missing(sizes)
        self.sizes.update(sizes)
        self.sharers.update(sizes.keys())

    def release(self, sizes: Mapping[Address, int]) -> None:
        """One function fewer is kept with these; `unshared` tells what may go."""
        self.sharers.subtract(sizes.keys())

    def unshared(self, addresses: set[Address]) -> tuple[Address, ...]:
        """Forget those of these that nobody holds, and tell which."""
        free = sorted(address for address in addresses if self.sharers[address] <= 0)
        for address in free:
            del self.sharers[address]
            self.nbytes -= self.sizes.pop(address, 0)
        return tuple(free)


class State(msgspec.Struct):
    """The tables of the mind."""

    functions: dict[FunctionId, Function] = msgspec.field(default_factory=dict)
    versions: dict[FunctionName, list[int]] = msgspec.field(default_factory=dict)
    """Versions that have proved themselves, ascending; the last answers for the name."""
    tenants: dict[TenantId, Tenant] = msgspec.field(default_factory=dict)
    """Those that have functions or workers here."""
    bodies: dict[WorkerId, Body] = msgspec.field(default_factory=dict)
    idle: dict[WorkerId, Body] = msgspec.field(default_factory=dict)
    """Those with nothing to do, the one idle longest first."""
    working: dict[WorkerId, Body] = msgspec.field(default_factory=dict)
    """Those that start or run something."""
    counts: Counter[BodyState] = msgspec.field(default_factory=Counter)
    """Bodies by what they are."""
    leaving: int = 0
    """Bodies that will be gone soon."""
    running_cores: int = 0
    """That all runs under way may use."""
    reserved_cores: int = 0
    """Of all bodies that are not leaving."""
    body_bytes: int = 0
    """Memory that all bodies count for."""
    requests: dict[RequestId, Request] = msgspec.field(default_factory=dict)
    stores: dict[StoreName, Residents] = msgspec.field(default_factory=dict)
    kept: dict[FunctionId, None] = msgspec.field(default_factory=dict)
    """Functions whose blocks are in a host store, the one used longest ago first."""
    prepared: dict[TenantId, dict[Address, None]] = msgspec.field(default_factory=dict)
    """Programs that each tenant's zygote holds compiled, the one used longest ago first."""
    proven: Counter[tuple[TenantId, Address]] = msgspec.field(default_factory=Counter)
    """How many functions of each tenant's programs have passed their trial."""
    wants_room: dict[FunctionId, None] = msgspec.field(default_factory=dict)
    """Functions without a body that wait for others' to go, the longest waiting first."""
    wants_more: dict[FunctionId, None] = msgspec.field(default_factory=dict)
    """Functions with bodies that wait for room for one more."""
    wants_core: dict[FunctionId, None] = msgspec.field(default_factory=dict)
    """Functions whose requests wait for a core and may be in time, the longest waiting first."""
    late: dict[FunctionId, None] = msgspec.field(default_factory=dict)
    """Functions whose requests wait for a core and cannot be in time."""
    host_limit: int | None = None
    """Most bytes of all host stores together, as last told; None: no bound."""
    wants_bytes: dict[FunctionId, None] = msgspec.field(default_factory=dict)
    """Functions that wait for room in a host store."""
    faults: dict[FunctionId, str] = msgspec.field(default_factory=dict)
    """Functions on which a policy failed in this step, and how."""
    yields: FunctionId | None = None
    """Gets no more bodies: when those that it has are gone, its blocks may go, for others wait for the room."""

    def tenant(self, id_: TenantId) -> Tenant:
        """What a tenant has, which may be nothing yet."""
        tenant = self.tenants.get(id_)
        if tenant is None:
            tenant = self.tenants[id_] = Tenant()
        return tenant

    def forget_tenant(self, id_: TenantId) -> None:
        """A tenant that has nothing any more is none."""
        tenant = self.tenants.get(id_)
        if tenant is not None and not (tenant.functions or tenant.bodies or tenant.requests):
            del self.tenants[id_]

    def residents(self, function: Function) -> Residents:
        """The store in which a function's blocks lie."""
        store = function.spec.store
        residents = self.stores.get(store)
        if residents is None:
            residents = self.stores[store] = Residents()
        return residents

    def host_bytes(self) -> int:
        """Bytes in all host stores, those on their way included."""
        return sum(store.nbytes for store in list(self.stores.values()))

    def owner(self, body: Body) -> Function | None:
        """The function that a body runs, unless it was removed: one deployed anew under its name is another."""
        function = self.functions.get(body.function)
        return function if function is not None and body.id in function.bodies else None

    def open_requests(self, function: Function) -> list[Request]:
        """The function's requests that have no answer yet, waiting or running."""
        running = [id_ for worker in function.bodies for run in self.bodies[worker].runs.values() for id_ in run]
        return [self.requests[request] for request in (*function.queue, *running) if request in self.requests]

    def is_ready(self, function: Function) -> bool:
        """Whether a body of the function could run a request."""
        return any(self.bodies[worker].state in ("idle", "busy") for worker in function.bodies)

    def slots(self, function: Function) -> list[Body]:
        """The function's bodies that can be handed a run."""
        return [body for worker in function.bodies if (body := self.bodies[worker]).has_slot]

    def has_body(self, function: Function) -> bool:
        """Whether the function has a body that is not about to go."""
        return any(self.bodies[worker].state != "stopping" for worker in function.bodies)

    def has_starting(self, function: Function) -> bool:
        """Whether a body of the function is on its way."""
        return any(self.bodies[worker].state == "starting" for worker in function.bodies)

"""What the scheduler knows: functions, workers, requests, blocks. Data and pure queries; nothing here decides."""

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Literal

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
from overwinter.scheduler.latency import LatencyModel

Line = Literal["cores", "places", "bytes"]
"""For what functions wait: cores, places for workers (a slot of the node, private memory), bytes of a host store."""


class Request(msgspec.Struct):
    """One request between its arrival and its answer."""

    id: RequestId
    function: FunctionId
    tenant: TenantId
    arrived: Seconds
    deadline: Seconds
    level: int
    """Lower ones go first."""
    start: Start = "warm"
    failures: int = 0
    """Times that a worker died under it, or could not start for it."""


class Operation(msgspec.Struct):
    """A run, or the start of a worker, from its beginning until an event says that it ended."""

    began: Seconds
    ends: float
    """When it should end."""
    overdue_at: float
    """When it is taken to keep its cores no more, so that nothing that hangs keeps others out."""
    requests: tuple[RequestId, ...] = ()


class Drain(msgspec.Struct, frozen=True):
    """A worker is given no more work and is stopped when it has done what it has."""

    why: str
    until: Seconds | None = None
    """When it is stopped even if it has not."""


class Worker(msgspec.Struct):
    """One process that runs programs, from the order to fork it until its exit."""

    id: WorkerId
    function: FunctionId
    tenant: TenantId
    point: Point
    """Its configuration."""
    timeout_s: float
    """A run that takes longer hangs."""
    since: Seconds
    """When it last began to start, run, idle or stop."""
    owner: "Function | None"
    """Whose requests it runs; None: the function was removed."""
    start: Operation | None = None
    """Under way until it is ready."""
    stopping: bool = False
    """Told to stop; its exit answers."""
    runs: dict[RunId, Operation] = msgspec.field(default_factory=dict)
    drain: Drain | None = None
    ready_at: Seconds = Seconds(0.0)
    taken: int = 0
    """Bytes that it takes, as last measured."""
    stopped_for: str = ""
    """Why it was stopped in the middle of what it ran, for those who asked for that."""

    @property
    def nbytes(self) -> int:
        """The memory that it counts for: what it was to need, or what it takes where that is more."""
        return max(self.point.memory_bytes, self.taken)

    @property
    def is_ready(self) -> bool:
        """Whether it can run a request, or could if it had a slot."""
        return self.start is None and not self.stopping

    @property
    def is_idle(self) -> bool:
        """Whether it is ready and runs nothing."""
        return not self.runs and self.start is None and not self.stopping

    @property
    def is_serving(self) -> bool:
        """Whether it takes work, now or when it has a slot."""
        return self.start is None and not self.stopping and self.drain is None

    @property
    def has_slot(self) -> bool:
        """Whether it can be handed one more run."""
        return self.is_serving and len(self.runs) < self.point.concurrency

    @property
    def is_leaving(self) -> bool:
        """Whether it will be gone soon, whatever it runs."""
        return self.stopping or (self.drain is not None and (not self.runs or self.drain.until is not None))

    def requests(self) -> Iterator[RequestId]:
        """The requests that it runs."""
        for run in self.runs.values():
            yield from run.requests


class Function(msgspec.Struct):
    """One version of a function and all that happens around it."""

    spec: FunctionSpec
    on_trial: bool
    latency: LatencyModel
    sizes: Mapping[Address, int]
    """Its blocks, each once."""
    used: Seconds
    """When it last was given something to run."""
    queue: deque[RequestId] = msgspec.field(default_factory=deque)
    workers: dict[WorkerId, Worker] = msgspec.field(default_factory=dict)
    loading: OperationId | None = None
    """What brings its blocks, while they come."""
    loaded: bool = False
    """Whether its blocks are in the host store."""
    load_again: bool = False
    """Its blocks did not fit, others were evicted, and it is tried once more."""
    announce: bool = False
    """Somebody waits to hear how the next wake goes."""
    unloaded: bool = False
    fault: str = ""
    """Why it is out of service, though nobody unloaded it."""
    failures: int = 0
    """Deaths in a row; the backoff grows with them."""
    backoff_until: Seconds = Seconds(0.0)
    lost: bool = False
    """Its blocks had vanished from memory, and it was tried once more; nothing of it has run since."""
    every_s: float = 0.0
    """Smoothed time between two uses."""
    gaps: list[float] = msgspec.field(default_factory=list)
    """Times between uses, newest last."""
    runs: int = 0
    """Begun so far."""
    batch_at: Seconds | None = None
    """When what waits must go, full batch or not."""
    line: Line | None = None
    """In which line it stands; at most one, for it has one want at a time."""
    starts: Point | None = None
    """What it would start, if it waits for a place for a worker."""
    slice_from: Seconds | None = None
    """When a worker of it could first use the blocks that it has in the host store; None: none could yet."""
    arrivals: int = 0
    """Since the last look at the rate."""
    rates: list[float] = msgspec.field(default_factory=list)
    """Requests per second of the last periods, newest last."""
    look_at: Seconds | None = None
    """When the number of its workers is looked at again."""
    forecast: float | None = None
    """Requests per second, by somebody who knows."""
    best_effort: bool = False
    """No configuration keeps its SLO."""

    @property
    def wants_wake(self) -> bool:
        """Whether somebody waits for it to be awake, without a request."""
        return self.on_trial or self.announce

    @property
    def is_ready(self) -> bool:
        """Whether a worker of it could run a request."""
        return any(worker.is_ready for worker in list(self.workers.values()))

    @property
    def is_starting(self) -> bool:
        """Whether a worker of it is on its way."""
        return any(worker.start is not None and not worker.stopping for worker in list(self.workers.values()))

    @property
    def has_worker(self) -> bool:
        """Whether it has a worker that was not told to stop."""
        return any(not worker.stopping for worker in self.workers.values())

    @property
    def has_slot(self) -> bool:
        """Whether a worker of it can be handed a run."""
        return any(worker.has_slot for worker in self.workers.values())

    def slots(self) -> list[Worker]:
        """Its workers that can be handed a run."""
        return [worker for worker in self.workers.values() if worker.has_slot]


class Tenant(msgspec.Struct):
    """What one tenant has of the node, beside what the ledger says."""

    id: TenantId
    functions: dict[FunctionId, None] = msgspec.field(default_factory=dict)
    spare: dict[WorkerId, Worker] = msgspec.field(default_factory=dict)
    """Its idle workers for which no request waits, the one spare longest first."""
    draining: dict[WorkerId, Worker] = msgspec.field(default_factory=dict)
    """Its workers that drain without a limit of time."""
    slices: list[tuple[float, WorkerId]] = msgspec.field(default_factory=list)
    """A heap: when the time slices of its workers that serve end; those of workers that are gone stay for a while."""
    first_workers: dict[FunctionId, None] = msgspec.field(default_factory=dict)
    """Its functions that wait for a place for their first worker, the longest waiting first."""
    more_workers: dict[FunctionId, None] = msgspec.field(default_factory=dict)
    """Those that have one, and wait for a place for one more."""

    @property
    def waits(self) -> FunctionId | None:
        """Its function that comes first."""
        return next(iter(self.first_workers or self.more_workers), None)


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


class CoreLine(msgspec.Struct):
    """Functions whose requests wait for a core. order.py keeps it."""

    due: list[tuple[int, float, int, FunctionId]] = msgspec.field(default_factory=list)
    """A heap of (level, due, number, function); an entry counts while it is in `hopeful`."""
    hopeful: dict[FunctionId, tuple[int, float, int, FunctionId]] = msgspec.field(default_factory=dict)
    """Those whose first request can be in time. Of those due at once the longest waiting has the least number."""
    late: dict[FunctionId, None] = msgspec.field(default_factory=dict)
    """Those of which some request cannot, the longest waiting first."""
    number: int = 0
    """Functions that joined so far."""
    given: int = 0
    """Cores given out so far."""

    @property
    def waits(self) -> bool:
        """Whether anybody waits."""
        return bool(self.hopeful) or bool(self.late)


class State(msgspec.Struct):
    """The tables of the scheduler."""

    functions: dict[FunctionId, Function] = msgspec.field(default_factory=dict)
    versions: dict[FunctionName, list[int]] = msgspec.field(default_factory=dict)
    """Versions that have proved themselves, ascending; the last answers for the name."""
    tenants: dict[TenantId, Tenant] = msgspec.field(default_factory=dict)
    """Those that have functions, workers or requests here."""
    workers: dict[WorkerId, Worker] = msgspec.field(default_factory=dict)
    requests: dict[RequestId, Request] = msgspec.field(default_factory=dict)
    stores: dict[StoreName, Residents] = msgspec.field(default_factory=dict)
    evictable: dict[FunctionId, Function] = msgspec.field(default_factory=dict)
    """Functions whose blocks are in a host store and which nobody uses, the one left longest ago first."""
    prepared: dict[TenantId, dict[Address, None]] = msgspec.field(default_factory=dict)
    """Programs that each tenant's zygote holds compiled, the one used longest ago first."""
    proven: Counter[tuple[TenantId, Address]] = msgspec.field(default_factory=Counter)
    """How many functions of each tenant's programs have passed their trial."""
    cores: CoreLine = msgspec.field(default_factory=CoreLine)
    """Who waits for a core."""
    waiting: dict[TenantId, Tenant] = msgspec.field(default_factory=dict)
    """Tenants of which somebody waits for a place for a worker."""
    bytes: dict[FunctionId, None] = msgspec.field(default_factory=dict)
    """Functions that wait for room in a host store, the longest waiting first."""
    giving_back: FunctionId | None = None
    """The function that drains so that its blocks can be evicted for those that wait."""
    faults: dict[FunctionId, str] = msgspec.field(default_factory=dict)
    """Functions on which a policy failed in this step, and how."""

    holding: dict[tuple[str, int], Operation] = msgspec.field(default_factory=dict)
    """The operations that keep cores, by their owner in the ledger."""

    def tenant(self, id_: TenantId) -> Tenant:
        """What a tenant has, which may be nothing yet."""
        tenant = self.tenants.get(id_)
        if tenant is None:
            tenant = self.tenants[id_] = Tenant(id_)
        return tenant

    def residents(self, function: Function) -> Residents:
        """The store in which a function's blocks lie."""
        store = function.spec.store
        residents = self.stores.get(store)
        if residents is None:
            residents = self.stores[store] = Residents()
        return residents

    def open_requests(self, function: Function) -> Iterator[Request]:
        """The function's requests that have no answer yet, waiting or running."""
        for id_ in function.queue:
            yield self.requests[id_]
        for worker in function.workers.values():
            for id_ in worker.requests():
                if id_ in self.requests:
                    yield self.requests[id_]

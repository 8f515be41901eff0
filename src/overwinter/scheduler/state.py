"""The tables of the scheduler: functions, workers, requests, blocks. Data and pure queries, no decisions."""

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from overwinter.core.function import FunctionSpec
from overwinter.core.ids import (
    Address,
    FamilyId,
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
from overwinter.core.versions import Versions
from overwinter.scheduler.coreline import CoreLine
from overwinter.scheduler.forked import ForkedAhead, Need
from overwinter.scheduler.latency import LatencyModel
from overwinter.scheduler.operation import Operation
from overwinter.scheduler.request import Request
from overwinter.scheduler.residents import Residents
from overwinter.scheduler.trunks import Trunks

BIND_S = 0.002
"""What a bind takes while nothing better is known."""

Line = Literal["cores", "places", "bytes"]
"""For what functions wait: cores, places for workers (a slot of the node, private memory), bytes of a host store."""


class Drain(msgspec.Struct, frozen=True):
    """A worker gets no more work and is stopped when its operations have ended."""

    why: str
    until: Seconds | None = None
    """When it is stopped even if it has not."""


class Binding(msgspec.Struct, eq=False):
    """A function in a worker, from the order to bind it there, or to fork the worker for it, until it is unbound."""

    function: "Function"
    runs: int = 0
    """Under way."""
    leaving: bool = False
    """It is given no more work there, and unbound when it runs nothing."""
    until: Seconds | None = None
    """When what it runs there is refused, if it leaves."""


class Worker(msgspec.Struct):
    """One process that runs programs of a family, from the order to fork it until its exit."""

    id: WorkerId
    function: FunctionId
    """The one that it was forked for."""
    family: "Family"
    """Whose functions it can bind."""
    tenant: TenantId
    point: Point
    """Its configuration."""
    since: Seconds
    """When it last began to start, run, bind, idle or stop."""
    bound: dict[FunctionId, Binding]
    """Which functions it has, those that are being bound among them."""
    binds: dict[FunctionId, Operation] = msgspec.field(default_factory=dict)
    refuses: set[FunctionId] = msgspec.field(default_factory=set)
    """Functions that it could not bind."""
    start: Operation | None = None
    """Under way until it is ready."""
    stopping: bool = False
    """Told to stop; its exit answers."""
    runs: dict[RunId, Operation] = msgspec.field(default_factory=dict)
    drain: Drain | None = None
    ready_at: Seconds = Seconds(0.0)
    taken: int = 0
    """Bytes that it takes, as last measured."""
    coming: int = 0
    """Bytes that its binds are expected to add to that: those under way, and those since it was measured."""
    value: float = 0.0
    """What it is worth to keep it, if it is idle."""
    keeps_s: float | None = None
    """The longest that one of those that it has may stay without work; None: they are others than when it was asked."""
    stopped_for: str = ""
    """Why it was stopped in the middle of what it ran, for those who asked for that."""

    @property
    def nbytes(self) -> int:
        """The memory that the worker counts for: its need, or its estimated memory if that is larger."""
        return max(self.point.memory_bytes, self.expected)

    @property
    def expected(self) -> int:
        """The estimated memory of the worker now, in bytes."""
        return self.taken + self.coming

    @property
    def is_ready(self) -> bool:
        """Whether it can run a request, or could if it had a slot."""
        return self.start is None and not self.stopping

    @property
    def is_idle(self) -> bool:
        """Whether it is ready and runs nothing."""
        return not self.runs and not self.binds and self.start is None and not self.stopping

    @property
    def is_serving(self) -> bool:
        """Whether it accepts work, now or when it has a free slot."""
        return self.start is None and not self.stopping and self.drain is None

    @property
    def has_slot(self) -> bool:
        """Whether it can get one more run."""
        # Asked of every worker of a family at every request: as `is_serving`, and `slots`.
        if self.start is not None or self.stopping or self.drain is not None:
            return False
        return len(self.runs) + len(self.binds) < self.point.concurrency

    @property
    def slots(self) -> int:
        """How many more runs or binds it could do at once."""
        return self.point.concurrency - len(self.runs) - len(self.binds)

    @property
    def is_forsaken(self) -> bool:
        """Whether every function that it has was removed."""
        return all(binding.function.removed for binding in self.bound.values())

    @property
    def starts_for(self) -> "Function | None":
        """The function that its process is forked for, until it is ready."""
        return None if self.start is None else self.start.function

    def serves(self, id_: FunctionId) -> bool:
        """Whether the function is bound here and may run."""
        binding = self.bound.get(id_)
        return binding is not None and not binding.leaving and id_ not in self.binds

    def works_for(self, id_: FunctionId) -> bool:
        """Whether something of the function is under way here."""
        return self.start is not None or self.bound[id_].runs > 0 or id_ in self.binds

    def requests(self) -> Iterator[RequestId]:
        """The requests that it runs."""
        for run in self.runs.values():
            yield from run.requests


class Function(msgspec.Struct, eq=False):
    """One version of a function and all that happens around it."""

    spec: FunctionSpec
    family: "Family"
    on_trial: bool
    sizes: Mapping[Address, int]
    """Its blocks, each once."""
    used: Seconds
    """When it last was given something to run."""
    after: WorkerId = WorkerId(0)
    """Workers up to this one are older than the function, and may have no room for its blocks."""
    removed: bool = False
    queue: deque[RequestId] = msgspec.field(default_factory=deque)
    workers: dict[WorkerId, Worker] = msgspec.field(default_factory=dict)
    """Those that have it, or are to have it."""
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
    killed_at: int | None = None
    """How many runs of it had begun when a worker last died, or hung, of one or of a bind."""
    trunk: FunctionId = FunctionId("")
    """The member of its family whose blocks it mostly has, perhaps itself: those that name the same may share runs."""
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
    lacks_room: bool = False
    """It waits in that line for private memory to be bound, and for no worker."""
    slice_from: Seconds | None = None
    """When a worker of it could first use the blocks that it has in the host store; None: none could yet."""
    forecast: float | None = None
    """Requests per second, by somebody who knows."""

    @property
    def latency(self) -> LatencyModel:
        """The latency model of its runs."""
        return self.family.latency

    @property
    def own(self) -> float:
        """The part of its runs that is not shared."""
        return self.family.trunks[self.trunk].own

    @property
    def wants_wake(self) -> bool:
        """Whether a caller waits for it to be awake, without a request."""
        return self.on_trial or self.announce

    @property
    def is_ready(self) -> bool:
        """Whether a worker that has it could run a request."""
        id_ = self.spec.id
        for worker in self.workers.values():
            if worker.start is None and not worker.stopping and id_ not in worker.binds:
                return True
        return False

    @property
    def is_starting(self) -> bool:
        """Whether a worker is forked for it, or binds it."""
        id_ = self.spec.id
        for worker in self.workers.values():
            if (worker.start is not None or id_ in worker.binds) and not worker.stopping:
                return True
        return False

    @property
    def has_worker(self) -> bool:
        """Whether a worker that is not being stopped has bound it, or can bind it."""
        return any(not worker.stopping for worker in self.usable())

    @property
    def has_slot(self) -> bool:
        """Whether a worker that has bound it can get a run."""
        id_ = self.spec.id
        return any(worker.has_slot and worker.serves(id_) for worker in self.workers.values())

    def slots(self) -> list[Worker]:
        """The workers that have bound it and can get a run."""
        id_ = self.spec.id
        return [worker for worker in self.workers.values() if worker.has_slot and worker.serves(id_)]

    def usable(self) -> list[Worker]:
        """The workers of its family that have bound it, or can: not those forked before it was deployed, which have no
        address space for its blocks, nor those in which a bind failed.
        """
        id_, after = self.spec.id, self.after
        return [
            each
            for each in self.family.workers.values()
            if each.id in self.workers or (each.id > after and id_ not in each.bound and id_ not in each.refuses)
        ]


class Family(msgspec.Struct, eq=False):
    """Functions that share workers: they differ in weights, assets and settings. Most have one member."""

    id: FamilyId
    latency: LatencyModel
    members: dict[FunctionId, Function] = msgspec.field(default_factory=dict)
    workers: dict[WorkerId, Worker] = msgspec.field(default_factory=dict)
    waiting: dict[FunctionId, None] = msgspec.field(default_factory=dict)
    """Members of which requests wait."""
    wanting: dict[FunctionId, None] = msgspec.field(default_factory=dict)
    """Those of them that an idle worker of it could run: who waits for a place, or for bytes, can use none."""
    waking: dict[FunctionId, None] = msgspec.field(default_factory=dict)
    """Members that are to be awake, without a request."""
    slo_ms: float | None = None
    """The shortest of its members'."""
    max_workers: int = 0
    """As many as its members may have together."""
    trunks: Trunks = msgspec.field(default_factory=Trunks)
    bind_s: float = BIND_S
    """Smoothed seconds of a bind."""
    bind_bytes: float = 0.0
    """Smoothed private bytes that a bind adds to what a worker takes; 0 while none was measured."""
    start_s: float | None = None
    """Smoothed seconds from a fork until its worker is ready; None: none has been seen."""
    used: Seconds = Seconds(0.0)
    """When one of its members last was given something to run."""
    uses: float = 0.0
    """How often that was the case, the last times most."""
    arrivals: int = 0
    """Since the last look at the rate."""
    rates: list[float] = msgspec.field(default_factory=list)
    """Requests per second of the last periods, newest last."""
    look_at: Seconds | None = None
    """When the number of its workers is looked at again."""
    best_effort: bool = False
    """No configuration keeps its SLO."""

    @property
    def lead(self) -> Function:
        """The member whose timer is used for the family: the one that came first."""
        return next(iter(self.members.values()))


class Tenant(msgspec.Struct):
    """A tenant's workers and queues, in addition to its claims in the ledger."""

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
    need: Need = msgspec.field(default_factory=Need)
    """Of processes forked ahead."""

    @property
    def waits(self) -> FunctionId | None:
        """Its function that comes first."""
        return next(iter(self.first_workers or self.more_workers), None)


class State(msgspec.Struct):
    """The tables of the scheduler."""

    functions: dict[FunctionId, Function] = msgspec.field(default_factory=dict)
    versions: dict[FunctionName, Versions] = msgspec.field(default_factory=dict)
    """Those that have proved themselves, and which of them answer for the name."""
    families: dict[FamilyId, Family] = msgspec.field(default_factory=dict)
    tenants: dict[TenantId, Tenant] = msgspec.field(default_factory=dict)
    """Those that have functions, workers or requests here."""
    workers: dict[WorkerId, Worker] = msgspec.field(default_factory=dict)
    ahead: dict[WorkerId, ForkedAhead] = msgspec.field(default_factory=dict)
    """Processes that wait for a start to take them over, the oldest first."""
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
        """The record of a tenant, which may be empty."""
        tenant = self.tenants.get(id_)
        if tenant is None:
            tenant = self.tenants[id_] = Tenant(id_)
        return tenant

    def residents(self, function: Function) -> Residents:
        """The store of a function's blocks."""
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
            for run in worker.runs.values():
                yield from (self.requests[id_] for id_ in run.of(function) if id_ in self.requests)

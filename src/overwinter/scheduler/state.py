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
from overwinter.scheduler.core_queue import CoreQueue
from overwinter.scheduler.forked import ForkedAhead
from overwinter.scheduler.held_blocks import HeldBlocks
from overwinter.scheduler.latency import LatencyModel
from overwinter.scheduler.operation import Operation
from overwinter.scheduler.policies.worker_or_device import Estimates
from overwinter.scheduler.pool import Pool, PoolRecord
from overwinter.scheduler.request import Request
from overwinter.scheduler.tenant import Tenant
from overwinter.scheduler.trunks import Trunks

BIND_S = 0.002
"""The assumed time of a bind before one was measured."""

QueueName = Literal["cores", "capacity", "bytes", "devices"]
"""The queues: for cores, for worker capacity (including private memory), for bytes of a host store, for devices."""


class Drain(msgspec.Struct, frozen=True):
    """A worker gets no more work and is stopped when its operations have ended."""

    why: str
    until: Seconds | None = None
    """When the worker is stopped even if its operations have not ended; None: no limit."""


class Binding(msgspec.Struct, eq=False):
    """A function in a worker, from the order to bind it or to fork the worker for it, until it is unbound."""

    function: "Function"
    runs: int = 0
    """The runs in progress."""
    draining: bool = False
    """Whether it gets no more work in this worker, and is unbound when its runs have ended."""
    until: Seconds | None = None
    """If draining: when its running requests are refused; the worker is killed a drain timeout later. None: never."""
    unloaded: bool = False
    """Whether the function was unloaded since it was bound, even if it is loaded again by now."""


class Worker(msgspec.Struct):
    """One process that runs programs of a family, from the order to fork it until its exit."""

    id: WorkerId
    function: FunctionId
    """The function for which it was forked."""
    family: "Family"
    """The family whose functions it can bind."""
    tenant: TenantId
    point: Point
    """Its configuration."""
    since: Seconds
    """When it last began to start, work, idle or stop."""
    bound: dict[FunctionId, Binding]
    """The bound functions, including those that are being bound."""
    binds: dict[FunctionId, Operation] = msgspec.field(default_factory=dict)
    failed_binds: set[FunctionId] = msgspec.field(default_factory=set)
    """The functions that it could not bind."""
    start: Operation | None = None
    """The start operation; None when it is ready."""
    stopping: bool = False
    """Whether it is stopping; its exit is awaited."""
    runs: dict[RunId, Operation] = msgspec.field(default_factory=dict)
    drain: Drain | None = None
    ready_at: Seconds = Seconds(0.0)
    measured_bytes: int = 0
    """The bytes of private memory, as last measured."""
    coming_bytes: int = 0
    """The bytes that binds are expected to add: those in progress, and those since the measurement."""
    value: float = 0.0
    """The value of keeping it while it is idle."""
    keep_alive_s: float | None = None
    """The longest keep-alive of its functions; None: they have changed since it was computed."""
    stopped_for: str = ""
    """Why it was stopped during runs, for the callers of those runs."""

    @property
    def nbytes(self) -> int:
        """The memory for which the worker counts: its need, or its estimated memory if that is larger."""
        return max(self.point.memory_bytes, self.measured_bytes + self.coming_bytes)

    @property
    def expected_bytes(self) -> int:
        """The estimated memory of the worker now, in bytes."""
        return self.measured_bytes + self.coming_bytes

    @property
    def is_ready(self) -> bool:
        """Whether its start has ended and it is not stopping; it may be draining."""
        return self.start is None and not self.stopping

    @property
    def is_idle(self) -> bool:
        """Whether it is ready and has no operation in progress."""
        return not self.runs and not self.binds and self.start is None and not self.stopping

    @property
    def is_serving(self) -> bool:
        """Whether it accepts work, now or when it has a free slot."""
        return self.start is None and not self.stopping and self.drain is None

    @property
    def has_slot(self) -> bool:
        """Whether it can accept one more run now."""
        # Called for every worker of a family at every request, so it does not call `is_serving` and `free_slots`.
        if self.start is not None or self.stopping or self.drain is not None:
            return False
        return len(self.runs) + len(self.binds) < self.point.concurrency

    @property
    def free_slots(self) -> int:
        """The further runs or binds that its concurrency allows, even if it accepts no work."""
        return self.point.concurrency - len(self.runs) - len(self.binds)

    @property
    def is_orphaned(self) -> bool:
        """Whether all its functions were removed."""
        return all(binding.function.removed for binding in self.bound.values())

    @property
    def starts_for(self) -> "Function | None":
        """The function for which it starts; None: its start has ended."""
        return None if self.start is None else self.start.function

    def serves(self, id_: FunctionId) -> bool:
        """Whether the function is bound here and may run."""
        binding = self.bound.get(id_)
        return binding is not None and not binding.draining and id_ not in self.binds

    def works_for(self, id_: FunctionId) -> bool:
        """Whether an operation of the function is in progress in it."""
        return self.start is not None or self.bound[id_].runs > 0 or id_ in self.binds

    def requests(self) -> Iterator[RequestId]:
        """The requests that it runs."""
        for run in self.runs.values():
            yield from run.requests


class Function(msgspec.Struct, eq=False):
    """One version of a function, with its queue, its workers and its history."""

    spec: FunctionSpec
    family: "Family"
    on_trial: bool
    sizes: Mapping[Address, int]
    """Its blocks, each once."""
    used_at: Seconds
    """When its last run began; before the first one, when it was deployed."""
    last_worker_before: WorkerId = WorkerId(0)
    """Workers up to this one were forked before it was deployed, possibly without address space for its blocks."""
    removed: bool = False
    queue: deque[RequestId] = msgspec.field(default_factory=deque)
    workers: dict[WorkerId, Worker] = msgspec.field(default_factory=dict)
    """The workers that have it, or that bind or start for it."""
    loading: OperationId | None = None
    """The load of its blocks in progress."""
    loaded: bool = False
    """Whether its blocks are in the host store."""
    load_again: bool = False
    """Whether its blocks did not fit, others were evicted, and the load is tried once more."""
    awaited: bool = False
    """Whether a caller waits for the result of the next wake."""
    unloaded: bool = False
    fault: str = ""
    """Why it is out of service, although its owner did not unload it."""
    failures: int = 0
    """Its failures (functions.fail, executors.py) since its last good run; the backoff grows with them."""
    runs_at_death: int | None = None
    """The number of its runs when a worker last died or hung, or a device broke, in a run or a bind of it."""
    trunk: FunctionId = FunctionId("")
    """The first function of the trunk to which it belongs. Functions of the same trunk may share runs."""
    backoff_until: Seconds = Seconds(0.0)
    lost_blocks: bool = False
    """Whether blocks were missing, until a start, bind or device run succeeds, or a process ends for another reason."""
    use_interval_s: float = 0.0
    """The smoothed time between two uses."""
    gaps: list[float] = msgspec.field(default_factory=list)
    """The times between uses, the latest last."""
    runs: int = 0
    """The number of runs begun."""
    batch_at: Seconds | None = None
    """When waiting requests are sent even if the batch is not full."""
    waits_in: QueueName | None = None
    """The queue in which it waits; at most one, because it has one want at a time."""
    point_to_start: Point | None = None
    """The configuration that it would start, if it waits for capacity for a worker."""
    lacks_memory: bool = False
    """Whether, in the queue for capacity, it waits for private memory for a bind, and not for a worker."""
    blocks_usable_from: Seconds | None = None
    """When a worker or a device could first use its blocks since their last load; None: none could yet."""
    forecast: float | None = None
    """The forecast rate in requests per second."""
    pool: PoolRecord | None = None
    """What is known of it on devices; None: it runs in workers."""
    estimates: Estimates | None = None
    """With `device = "any"`: those of the last comparison of workers and devices for a request."""

    @property
    def latency(self) -> LatencyModel:
        """The latency model of its runs."""
        return self.family.latency

    @property
    def separate_part(self) -> float:
        """The part of its runs that is not shared."""
        return self.family.trunks[self.trunk].separate_part

    @property
    def is_used(self) -> bool:
        """Whether a worker has it, or a device runs it."""
        return bool(self.workers) or (self.pool is not None and self.pool.running > 0)

    @property
    def kept_since(self) -> float:
        """When the keep-alive of its blocks began: at its last use, or at a later load ahead of requests."""
        return self.used_at if self.pool is None else max(self.used_at, self.pool.loaded_ahead_at)

    @property
    def wants_wake(self) -> bool:
        """Whether a caller waits for it to be awake, without a request."""
        return self.on_trial or self.awaited

    @property
    def is_ready(self) -> bool:
        """Whether a worker that has it accepts its requests. A function of the pool needs only its loaded blocks."""
        if self.pool is not None:
            return self.loaded
        id_ = self.spec.id
        for worker in self.workers.values():
            if worker.is_serving and id_ not in worker.binds and not worker.bound[id_].draining:
                return True
        return False

    @property
    def is_starting(self) -> bool:
        """Whether a worker of its family is forked for it, or binds it."""
        for worker in self.workers.values():
            is_coming = (worker.start is not None or self.spec.id in worker.binds) and not worker.stopping
            if is_coming and worker.family is self.family:
                return True
        return False

    @property
    def has_usable_worker(self) -> bool:
        """Whether a worker that is not being stopped has bound it, or can bind it."""
        return any(not worker.stopping for worker in self.usable_workers())

    @property
    def has_slot(self) -> bool:
        """Whether a worker that has bound it can get a run."""
        id_ = self.spec.id
        return any(worker.has_slot and worker.serves(id_) for worker in self.workers.values())

    def workers_with_slot(self) -> list[Worker]:
        """The workers that have bound it and can get a run."""
        id_ = self.spec.id
        return [worker for worker in self.workers.values() if worker.has_slot and worker.serves(id_)]

    def usable_workers(self) -> list[Worker]:
        """The workers of its family that have bound it, or can: not those forked before it was deployed, which may have
        no address space for its blocks, nor those in which a bind failed. Draining and stopping workers are included.
        """
        return [each for each in self.family.workers.values() if each.id in self.workers or self.can_bind_in(each)]

    def can_bind_in(self, worker: Worker) -> bool:
        """Whether a worker of its family has not bound it, and can."""
        id_ = self.spec.id
        return worker.id > self.last_worker_before and id_ not in worker.bound and id_ not in worker.failed_binds


class Family(msgspec.Struct, eq=False):
    """Functions that share workers: they differ in weights, assets and settings. Most families have one member."""

    id: FamilyId
    latency: LatencyModel
    members: dict[FunctionId, Function] = msgspec.field(default_factory=dict)
    workers: dict[WorkerId, Worker] = msgspec.field(default_factory=dict)
    waiting: dict[FunctionId, None] = msgspec.field(default_factory=dict)
    """The members with waiting requests."""
    wanting_idle_worker: dict[FunctionId, None] = msgspec.field(default_factory=dict)
    """Those of `waiting` that any idle worker could run: they wait for no capacity, no bytes, no end of a backoff."""
    waking: dict[FunctionId, None] = msgspec.field(default_factory=dict)
    """The members that are to be woken without a request."""
    slo_ms: float | None = None
    """The shortest SLO of its members."""
    slos_ms: Counter[float] = msgspec.field(default_factory=Counter)
    """How many members have each SLO."""
    keep_alive_members: int = 0
    """The number of members with a keep-alive of their own."""
    max_workers: int = 0
    """The most workers that its members may have together."""
    trunks: Trunks = msgspec.field(default_factory=Trunks)
    bind_s: float = BIND_S
    """The smoothed seconds of a bind."""
    bind_bytes: float = 0.0
    """The smoothed private bytes per bound function that its workers take beyond their needs; 0: not measured yet."""
    start_s: float | None = None
    """The smoothed seconds that a worker takes to be ready; None: none was measured."""
    used_at: Seconds = Seconds(0.0)
    """When the last run of a member began."""
    uses: float = 0.0
    """The decayed count of its members' uses."""
    arrivals: int = 0
    """The arrivals since the last check of the rate."""
    rates: list[float] = msgspec.field(default_factory=list)
    """The rates of the last periods in requests per second, the latest last."""
    check_at: Seconds | None = None
    """The time of the next check of the number of its workers."""
    slo_infeasible: bool = False
    """Whether no configuration meets its SLO."""

    @property
    def first_member(self) -> Function:
        """The first member, whose timer is used for the family."""
        return next(iter(self.members.values()))


class State(msgspec.Struct):
    """The tables of the scheduler."""

    functions: dict[FunctionId, Function] = msgspec.field(default_factory=dict)
    versions: dict[FunctionName, Versions] = msgspec.field(default_factory=dict)
    """The versions that passed their trial, and the traffic among them."""
    families: dict[FamilyId, Family] = msgspec.field(default_factory=dict)
    tenants: dict[TenantId, Tenant] = msgspec.field(default_factory=dict)
    """The tenants that have functions, workers or requests."""
    workers: dict[WorkerId, Worker] = msgspec.field(default_factory=dict)
    ahead: dict[WorkerId, ForkedAhead] = msgspec.field(default_factory=dict)
    """The processes that were forked ahead, the oldest first."""
    requests: dict[RequestId, Request] = msgspec.field(default_factory=dict)
    stores: dict[StoreName, HeldBlocks] = msgspec.field(default_factory=dict)
    pinned: dict[StoreName, HeldBlocks] = msgspec.field(default_factory=dict)
    """The blocks of pinned functions in each host store."""
    evictable: dict[FunctionId, Function] = msgspec.field(default_factory=dict)
    """The unused functions whose blocks are in a host store and not pinned, the longest unused first."""
    prepared: dict[TenantId, dict[Address, None]] = msgspec.field(default_factory=dict)
    """The programs that each tenant's zygote was asked to compile, the least recently used first."""
    proven: Counter[tuple[TenantId, Address]] = msgspec.field(default_factory=Counter)
    """The number of functions in workers that passed their trial, by tenant and program."""
    core_queue: CoreQueue = msgspec.field(default_factory=CoreQueue)
    """The functions that wait for a core."""
    waiting_for_capacity: dict[TenantId, Tenant] = msgspec.field(default_factory=dict)
    """The tenants with a function that waits for worker capacity."""
    waiting_for_bytes: dict[FunctionId, None] = msgspec.field(default_factory=dict)
    """The functions that wait for a host store, the longest waiting first."""
    pool: Pool = msgspec.field(default_factory=Pool)
    """The devices and their executors."""
    releasing: FunctionId | None = None
    """The function that drains so that its blocks can be evicted for waiting functions."""
    faults: dict[FunctionId, str] = msgspec.field(default_factory=dict)
    """The functions to take out of service, with the reason."""
    holding_cores: dict[tuple[str, int], Operation] = msgspec.field(default_factory=dict)
    """The operations that hold cores, by their owner in the ledger."""

    def tenant(self, id_: TenantId) -> Tenant:
        """The record of a tenant, which may be empty."""
        tenant = self.tenants.get(id_)
        if tenant is None:
            tenant = self.tenants[id_] = Tenant(id_)
        return tenant

    def held_blocks(self, function: Function) -> HeldBlocks:
        """The blocks that the host store of a function holds or is loading."""
        held = self.stores.get(function.spec.store)
        return self.stores.setdefault(function.spec.store, HeldBlocks()) if held is None else held

    def open_requests(self, function: Function) -> Iterator[Request]:
        """The open requests of the function, waiting or running."""
        for id_ in function.queue:
            yield self.requests[id_]
        for worker in function.workers.values():
            for run in worker.runs.values():
                yield from (self.requests[id_] for id_ in run.of(function) if id_ in self.requests)
        for operation in self.pool.runs_of(function):
            yield from (self.requests[id_] for id_ in operation.of(function) if id_ in self.requests)

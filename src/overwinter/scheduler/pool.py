"""The tables of the pool: devices, their executors, and the functions that run there. Data, and no decisions."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Literal

import msgspec

from overwinter.core.devices import DeviceConfig
from overwinter.core.ids import (
    Address,
    DeviceId,
    FunctionId,
    OperationId,
    RunId,
    Seconds,
    TenantId,
    WorkerId,
    described,
)
from overwinter.scheduler.function_queue import FunctionQueue
from overwinter.scheduler.held_blocks import HeldBlocks
from overwinter.scheduler.operation import Operation
from overwinter.scheduler.policies.device_queueing import EVERYONE, Boundary, Outcomes

if TYPE_CHECKING:
    from overwinter.scheduler.state import Function

OUT_FAILURES = 3
"""The consecutive failures after which a device is out of service until its backoff is over."""
START_S = 1.0
"""The assumed time of the start of an executor before one was measured."""
SMOOTHING = 0.2
UNPLACED_SWAPS = 64
"""After this many runs that brought blocks, a device is tried again with as many bytes as found no places before: by
then other blocks are there.
"""
WAITED = 1.1
"""If a run took less than this many times the time of its transfer, it waited for the transfer."""

DeviceOwner = tuple[TenantId | None, FunctionId | None]
"""Whose functions an executor runs: those of a tenant, one function, or any."""
DeviceState = Literal["empty", "starting", "idle", "busy", "stopping", "backoff", "out"]
"""`empty`: it has no executor. `out`: its executors keep failing, and it is tried again later."""


class Preparation(msgspec.Struct, frozen=True, eq=False):
    """The preparation of a function on a device before a request, until the executor has ended it."""

    function: "Function"
    operation: OperationId
    hangs_at: float
    delays_since: float = inf
    """When a run was ordered that waits for the end of the preparation; inf: none was."""


class Executor(msgspec.Struct, eq=False):
    """The process that runs programs on a device, from the order to fork it until its exit."""

    id: WorkerId
    owner: DeviceOwner
    since: Seconds
    """When it last began to start, idle, run or stop."""
    ready_at: Seconds | None = None
    """When it was ready; None: it starts."""
    stopping: bool = False
    """Whether it is stopping; its exit is awaited."""
    run: RunId | None = None
    operation: Operation | None = None
    """The run in progress; without requests if it only brings blocks."""
    preparing: Preparation | None = None
    """What it prepares. A run may be ordered meanwhile."""
    may_prepare: bool = True
    """Whether there may be a function to prepare."""
    was_interrupted: bool = False
    """Whether its last preparation ended early, for a run or an unbind."""
    handed_over: dict[FunctionId, Address | None] = msgspec.field(default_factory=dict)
    """The functions that were handed over to it and not unbound since, and the program of each that ran or is prepared.
    """

    @property
    def is_idle(self) -> bool:
        """Whether it could run requests now."""
        return self.ready_at is not None and not self.stopping and self.operation is None


class Resident(msgspec.Struct, eq=False):
    """A function whose blocks are on a device, or are brought there by the run in progress."""

    function: "Function"
    sizes: Mapping[Address, int]
    used_at: Seconds
    """When its last run there began."""
    draining: bool = False
    """Whether it is removed from the device when its run has ended, because its blocks have left the host store."""


class Unplaced(msgspec.Struct):
    """The last run whose blocks found no places on a device, although enough bytes were free."""

    missing_bytes: int
    total_bytes: int
    """The bytes on the device, if they had been placed."""
    swaps: int = 0
    """The runs that have brought blocks there since."""


class Device(msgspec.Struct, eq=False):
    """One device with its executor and its blocks."""

    config: DeviceConfig
    executor: Executor | None = None
    residents: dict[FunctionId, Resident] = msgspec.field(default_factory=dict)
    """The least recently used first."""
    blocks: HeldBlocks = msgspec.field(default_factory=HeldBlocks)
    missing: "dict[PoolRecord, int]" = msgspec.field(default_factory=dict)
    """The missing bytes of functions, as far as they were computed since the blocks changed."""
    unplaced: Unplaced | None = None
    """None: there was none lately."""
    swap_s: float = 0.0
    """The expected time of the transfer for the last run."""
    swaps_until: float = 0.0
    """When that transfer from the host is expected to end."""
    swaps_heavy: bool = False
    """Whether the execution waits for it."""
    next_owner: DeviceOwner | None = None
    """For whom the executor was stopped, until the next one starts."""
    lost_by: DeviceOwner | None = None
    """Whose executor failed there, if none has started since."""
    failures: int = 0
    """The consecutive failures of its executors; several in runs of one function count once, and so do those of one
    tenant if others use the pool too. The backoff grows with them.
    """
    backoff_until: Seconds = Seconds(0.0)
    fault: str = ""
    """The last failure; empty after a success."""
    blamed: dict[FunctionId, TenantId] = msgspec.field(default_factory=dict)
    """The functions in whose runs its executors failed since the last success there, with their tenants."""

    @property
    def owner(self) -> DeviceOwner | None:
        """Whose functions it runs, or will run; None: it is free for anyone."""
        if self.executor is None or self.executor.stopping:
            return self.next_owner
        return self.executor.owner

    @property
    def coming_owner(self) -> DeviceOwner | None:
        """Whose executor it will have soon, if one is being started or replaced."""
        executor = self.executor
        if executor is None or executor.stopping:
            return self.next_owner
        return executor.owner if executor.ready_at is None else None

    @property
    def operation(self) -> Operation | None:
        """The run in progress."""
        return None if self.executor is None else self.executor.operation

    def missing_bytes(self, function: "PoolRecord") -> int:
        """The bytes of a function that are not on the device."""
        found = self.missing.get(function)
        if found is None:
            found = self.missing[function] = self.blocks.missing(function.sizes)
        return found

    def capacity(self, missing: int) -> int:
        """The most bytes that may lie there once `missing` more are brought: fewer than `unplaced.total_bytes` if the
        unplaced run missed at most as many.
        """
        if self.unplaced is None or missing < self.unplaced.missing_bytes:
            return self.config.memory_bytes
        return min(self.config.memory_bytes, self.unplaced.total_bytes - 1)

    def short_bytes(self, missing: int) -> int:
        """The bytes that must be evicted before this many can be brought."""
        return max(0, self.blocks.nbytes + missing - self.capacity(missing))

    def is_free(self, now: Seconds) -> bool:
        """Whether a run, or the start of an executor, could begin now."""
        if self.executor is None:
            return now >= self.backoff_until
        return self.executor.is_idle

    def may_start(self, now: Seconds) -> bool:
        """Whether an executor could start now, for any owner."""
        return self.executor is None and self.next_owner is None and self.is_free(now)

    def is_out(self, now: Seconds) -> bool:
        """Whether it is out of service."""
        return self.executor is None and self.failures >= OUT_FAILURES and now < self.backoff_until

    def expected_owner(self, now: Seconds) -> DeviceOwner | None:
        """The owner, or the one whose executor failed there and starts again when the backoff is over."""
        return self.lost_by if self.owner is None and not self.is_out(now) else self.owner

    def state(self, now: Seconds) -> DeviceState:
        """The state of the device."""
        executor = self.executor
        if executor is None:
            return "out" if self.is_out(now) else "backoff" if now < self.backoff_until else "empty"
        if executor.stopping:
            return "stopping"
        if executor.ready_at is None:
            return "starting"
        return "idle" if executor.operation is None else "busy"


class LastBinding(msgspec.Struct, frozen=True):
    """The last binding of a function to a device, with its reasons."""

    device: DeviceId
    missing_bytes: int
    swap_wait_s: float
    """The expected time for which the execution waits for blocks."""
    peer: DeviceId | None
    free: Sequence[tuple[DeviceId, int, float]]
    """The free devices that were compared, with the missing bytes and the `swap_wait_s` of each."""
    evicted: Sequence[FunctionId]

    def text(self, own: Collection[FunctionId]) -> str:
        """The reasons in words; of the evicted functions only these `own` ones are named."""
        text = f"{self.device}: all its blocks were there"
        if self.missing_bytes:
            wait_ms = 1e3 * self.swap_wait_s
            missing = f"{self.device}: {self.missing_bytes:,} bytes were missing there"
            text = f"{missing}, and the run waits {wait_ms:.1f} ms for them"
        if self.peer is not None:
            text += f"; {self.peer} provides what it has"
        others = [f"{name} ({missing} missing, {1e3 * swap_wait_s:.1f} ms)" for name, missing, swap_wait_s in self.free]
        text += f"; free: {', '.join(others)}"
        evicted = [described(id_) for id_ in self.evicted if id_ in own]
        if len(evicted) < len(self.evicted):
            evicted.append(f"{len(self.evicted) - len(evicted)} of other tenants")
        return text + (f"; evicted {', '.join(evicted)}" if evicted else "")


class RunTimes(msgspec.Struct):
    """The measured times of a function's runs on devices, without shared ones, by the number of requests."""

    _resident: dict[int, float] = msgspec.field(default_factory=dict)
    """The smoothed seconds of runs whose blocks were all on the device."""
    _swapped: dict[int, float] = msgspec.field(default_factory=dict)
    """The smoothed seconds of other runs: of the whole run if it took clearly longer than its transfer, otherwise of
    the part after the transfer.
    """

    def observe(self, count: int, seconds: float, swap_s: float) -> None:
        """Record a run; `swap_s`: the expected time of its transfer."""
        # If a run took about as long as its transfer, it waited for the transfer.
        own = seconds if seconds > WAITED * swap_s else max(0.0, seconds - swap_s)
        known = self._swapped if swap_s else self._resident
        before = known.get(count, own)
        known[count] = before + SMOOTHING * (own - before)

    @property
    def is_known(self) -> bool:
        """Whether there was such a run."""
        return bool(self._resident or self._swapped)

    def measured_s(self, count: int) -> float | None:
        """The seconds of runs of exactly this many requests without a transfer; None: there was none."""
        return self._resident.get(count)

    def expected_s(self, count: int, profiled: float | None = None) -> float:
        """Expected seconds of the execution of this many requests: by the runs without a transfer; if there was none,
        by the profile; without a profile, by the runs with a transfer; 0: unknown.
        """
        known = self._resident or (self._swapped if profiled is None else {})
        if not known:
            return profiled or 0.0
        nearest = min(known, key=lambda each: (abs(each - count), each))
        # The time of a larger batch grows at most in proportion to its size; a smaller one takes at most as long.
        return known[nearest] * max(1.0, count / nearest)


class PoolRecord(msgspec.Struct, eq=False):
    """The record of a function of the pool: what is known of it on devices."""

    sizes: Mapping[Address, int]
    """The bytes on a device of each block of its weights."""
    nbytes: int
    no_device_reason: str = ""
    """Why no device can run it; empty: one can."""
    running: int = 0
    """Its runs in progress."""
    times: RunTimes = msgspec.field(default_factory=RunTimes)
    outcomes: Outcomes = msgspec.field(default_factory=Outcomes)
    fixed_device: DeviceId | None = None
    """The device to which it is bound, under the policies that bind before the first run."""
    departures_at_misfit: int | None = None
    """The `departures` of the pool when it last fitted on no device beside the functions that are bound there."""
    loaded_ahead_at: float = -inf
    """When a load of its blocks last began before a request reached it."""
    preparation_failed: bool = False
    """Whether an executor died or hung while it prepared the function or prefetched its blocks: neither is done again.
    """
    unplaced: dict[DeviceId, bool] = msgspec.field(default_factory=dict)
    """The devices on which its blocks did not fit, because the free memory was not contiguous; True: nothing was left
    there that could be evicted.
    """
    last_binding: LastBinding | None = None


def pool_record(function: "Function") -> PoolRecord:
    """Return the record of a function of the pool."""
    assert function.pool is not None, f"{function.spec.id} is not a function of the pool"
    return function.pool


class Pool(msgspec.Struct):
    """The devices of a node."""

    devices: dict[DeviceId, Device] = msgspec.field(default_factory=dict)
    executors: dict[WorkerId, Device] = msgspec.field(default_factory=dict)
    """The devices with an executor, by its id."""
    waiting: FunctionQueue = msgspec.field(default_factory=FunctionQueue)
    """The functions that wait for a device."""
    waiting_for_workers: FunctionQueue = msgspec.field(default_factory=FunctionQueue)
    """The functions with `device = "any"` whose requests wait for a worker."""
    start_s: float = START_S
    """The smoothed seconds from a fork until the executor is ready."""
    last_used: "dict[TenantId, dict[FunctionId, Function]]" = msgspec.field(default_factory=dict)
    """The functions of each tenant, the least recently used or deployed first."""
    unprepared_until: dict[TenantId, Seconds] = msgspec.field(default_factory=dict)
    """Until when no function of a tenant is prepared (device_ahead.py)."""
    bindings: int = 0
    """How often a device was chosen for waiting requests."""
    virtual_time: float = 0.0
    """The start tag of the last run that began (device_order.py)."""
    finish_tags: dict[TenantId, float] = msgspec.field(default_factory=dict)
    """The finish tag of the last run of each tenant, at least if it exceeds the virtual time. A tenant that removes its
    functions keeps it.
    """
    next_long_binding: int = 0
    """From this number of bindings on, the next run is for a request that has waited for a long time, if there is one.
    """
    with_answers: "dict[FunctionId, Function]" = msgspec.field(default_factory=dict)
    """The functions with answers within the window (policies/device_queueing.py)."""
    rate_changed: dict[FunctionId, None] = msgspec.field(default_factory=dict)
    """The functions that had an arrival, a new forecast or a further device since their rate was compared with what
    their devices can do.
    """
    departures: int = 0
    """How many functions have left the device to which they were bound, or were unloaded or removed."""
    required: dict[FunctionId, float] = msgspec.field(default_factory=dict)
    """The required requests (RRC, policies/device_queueing.py) of each function in `with_answers` that needs some."""
    alpha: float = 1.0
    """Functions have high priority, those with the smallest RRC first, up to this part of the sum of the positive
    RRCs.
    """
    ratio: float | None = None
    """The share of the functions in `with_answers` that complied with their SLO at the end of the last period."""
    boundary: Boundary = EVERYONE
    """The last function with high priority."""
    is_boundary_stale: bool = False
    """Whether `boundary` must be computed again."""

    def record_use(self, function: "Function") -> None:
        """A function was deployed, or a run of it begins."""
        functions = self.last_used.setdefault(function.spec.tenant, {})
        functions.pop(function.spec.id, None)
        functions[function.spec.id] = function

    def look_for_preparations(self) -> None:
        """There may be a function again that idle devices can prepare."""
        for device in self.executors.values():
            if device.executor is not None:
                device.executor.may_prepare = True

    def forget(self, function: "Function") -> None:
        """A function was removed."""
        functions = self.last_used[function.spec.tenant]
        del functions[function.spec.id]
        if not functions:
            del self.last_used[function.spec.tenant]

    def runs_of(self, function: "Function") -> Iterator[Operation]:
        """A function's runs that are in progress on devices."""
        if function.pool is not None and function.pool.running:
            for device in self.devices.values():
                if device.operation is not None and function in device.operation.functions:
                    yield device.operation

    def holders(self, function: "Function") -> Iterator[Device]:
        """The devices with a function."""
        id_ = function.spec.id
        for device in self.devices.values():
            resident = device.residents.get(id_)
            if resident is not None and resident.function is function:
                yield device

"""Immutable snapshots of the scheduler's tables, for readers in other threads.

The tables belong to the loop's thread and change with every event. A snapshot is taken on that thread. With many
functions it is taken in steps, between which events are handled: each function and each worker is described at one
moment, and all of them within the duration of the snapshot.
"""

from collections.abc import Generator, Mapping, Sequence
from itertools import islice

import msgspec

from overwinter.core.devices import DeviceKind
from overwinter.core.function import FunctionSpec
from overwinter.core.ids import (
    DeviceId,
    FunctionId,
    Seconds,
    StoreName,
    TenantId,
    WorkerId,
    is_part,
    program_id,
    whole_id,
    whole_names,
)
from overwinter.scheduler import counterpart
from overwinter.scheduler.lifecycles import AWAKE_FIRST, FunctionState, WorkerState, function_state, worker_state
from overwinter.scheduler.pool import Device, DeviceState
from overwinter.scheduler.resources import Resources
from overwinter.scheduler.state import Family, Function, State, Worker

LISTED_MAX = 100
"""The most functions that one description lists; a family, or a worker, may have thousands."""
COPIED_PER_STEP = 64
"""The functions or workers that are copied in one step, which takes about 0.3 ms."""


class FamilyWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker, and its bound functions."""

    worker: WorkerId
    family: FunctionId
    state: WorkerState
    bound: tuple[FunctionId, ...]
    """The first LISTED_MAX in the order of their binds, including functions that are being bound or unbound."""
    bound_count: int
    """The number of all of them."""


class FunctionSnapshot(msgspec.Struct, frozen=True, gc=False):
    """One version of a function."""

    spec: FunctionSpec
    state: FunctionState
    on_trial: bool
    slo_infeasible: bool
    """Whether no configuration meets the SLO of its family."""
    family: FunctionId
    members: int
    """The members of its family."""
    workers: tuple[WorkerId, ...]
    queued: int
    fault: str
    """Why it cannot be served, though its owner did not unload it: it is out of service, or no device can run it."""
    devices: tuple[DeviceId, ...] = ()
    """The devices on which it or a part of it is resident."""
    parts: tuple[FunctionId, ...] = ()
    """Itself, its program if that is another function on the pool, and the later slices of the program."""


class FamilySnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Functions that share workers."""

    name: FunctionId
    members: tuple[FunctionId, ...]
    """The first LISTED_MAX in the order in which they joined; the first one gives the family its name."""
    member_count: int
    """The number of all of them."""
    workers: tuple[FamilyWorker, ...]


class ResidentSnapshot(msgspec.Struct, frozen=True):
    """A function on a device."""

    function: FunctionId
    nbytes: int
    exclusive_bytes: int
    """The bytes of blocks that no other function there has."""


class DeviceSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One device of the pool."""

    name: DeviceId
    kind: DeviceKind
    state: DeviceState
    executor: WorkerId | None
    tenant: TenantId | None
    """The only tenant that it serves now; None: any, or none yet."""
    residents: tuple[ResidentSnapshot, ...]
    """The least recently used first."""
    taken_bytes: int
    total_bytes: int
    running: FunctionId | None
    failures: int
    """The consecutive failures of its executors that count (`Device.failures`)."""
    backoff_s: float
    """The remaining backoff after a failure, in seconds."""
    fault: str
    """The last failure; empty after a success."""


class Snapshot(msgspec.Struct, frozen=True):
    """The state of a node's scheduler."""

    functions: Sequence[FunctionSnapshot]
    workers: Sequence[FamilyWorker]
    families: int
    waiting: Mapping[str, int]
    """The number of functions that wait for a core, for capacity for a worker, for a host store, or for a device."""
    stores: Mapping[StoreName, int]
    """The bytes of each host store."""
    cores_running: int
    cores_reserved: int
    host_bytes: int
    host_budget: int | None
    devices: Sequence[DeviceSnapshot] = ()


def snapshot(
    state: State, resources: Resources, now: Seconds, tenant: TenantId | None = None
) -> Generator[None, None, Snapshot]:
    """Take a snapshot in steps, on the event loop; with `tenant`, without the functions of others."""
    functions: list[FunctionSnapshot] = []
    own = [each for each in state.functions.values() if tenant in (None, each.spec.tenant)]
    for number, function in enumerate(own, 1):
        if not (function.removed or is_part(function.spec.name)):
            functions.append(function_snapshot(state, function, now))
        if number % COPIED_PER_STEP == 0:
            yield
    workers: list[FamilyWorker] = []
    for number, worker in enumerate(list(state.workers.values()), 1):
        if worker.id in state.workers:
            workers.append(family_worker(worker))
        if number % COPIED_PER_STEP == 0:
            yield
    return Snapshot(
        functions=functions,
        workers=workers,
        families=sum(not all(map(is_part, family.members)) for family in state.families.values()),
        waiting={
            "core": len(state.core_queue.timely.keys() | state.core_queue.late.keys()),
            "worker": sum(
                len(each.first_workers) + len(each.more_workers) for each in state.waiting_for_capacity.values()
            ),
            "store": len(state.waiting_for_bytes),
            **({"device": len(state.pool.waiting)} if state.pool.devices else {}),
        },
        stores={name: blocks.nbytes for name, blocks in state.stores.items()},
        cores_running=resources.load.taken,
        cores_reserved=resources.reserved.taken,
        host_bytes=resources.host.taken,
        host_budget=resources.host.capacity,
        devices=device_snapshots(state, now),
    )


def device_snapshots(state: State, now: Seconds) -> tuple[DeviceSnapshot, ...]:
    """Describe the devices."""
    return tuple(_device_snapshot(device, now) for device in state.pool.devices.values())


def _device_snapshot(device: Device, now: Seconds) -> DeviceSnapshot:
    executor, residents, operation = device.executor, device.residents.items(), device.operation
    return DeviceSnapshot(
        name=device.config.name,
        kind=device.config.kind,
        state=device.state(now),
        executor=None if executor is None else executor.id,
        tenant=None if executor is None else executor.owner[0],
        residents=tuple(
            ResidentSnapshot(id_, sum(each.sizes.values()), device.blocks.exclusive(id_)) for id_, each in residents
        ),
        taken_bytes=device.blocks.nbytes,
        total_bytes=device.config.memory_bytes,
        running=None if operation is None else operation.function.spec.id,
        failures=device.failures,
        backoff_s=max(0.0, device.backoff_until - now) if executor is None else 0.0,
        fault=device.fault,
    )


def family_name(family: Family) -> FunctionId:
    """Return the name of a family: its first member; without members, its id."""
    return next(map(whole_id, family.members), FunctionId(family.id))


def family_members(family: Family) -> tuple[FunctionId, ...]:
    """Return the first members of a family, each as the function that its users know."""
    return tuple(map(whole_id, islice(family.members, LISTED_MAX)))


def family_worker(worker: Worker) -> FamilyWorker:
    """Describe one worker."""
    return FamilyWorker(
        worker=worker.id,
        family=family_name(worker.family),
        state=worker_state(worker),
        bound=tuple(islice(worker.bound, LISTED_MAX)),
        bound_count=len(worker.bound),
    )


def family_snapshot(function: Function) -> FamilySnapshot:
    """The function's family."""
    family = function.family
    workers = tuple(family_worker(worker) for worker in workers_of(function))
    return FamilySnapshot(
        name=family_name(family), members=family_members(family), member_count=len(family.members), workers=workers
    )


def workers_of(function: Function) -> list[Worker]:
    """The workers of a function's family, and those of a former family that it is leaving."""
    return list((function.family.workers | function.workers).values())


def function_snapshot(state: State, function: Function, now: Seconds) -> FunctionSnapshot:
    """One version of a function, with its parts that run on the pool."""
    family, on_pool = function.family, parts_on_pool(state, function)
    others = [each for each in on_pool if each is not function]
    faults = (each.fault or record.no_device_reason for each in on_pool if (record := each.pool) is not None)
    fault = next(filter(None, faults), "")
    holding = {device.config.name: None for each in on_pool for device in state.pool.holders(each)}
    if counterpart.of(state, function) is None and function.spec.settings.device == "any":
        # Its workers suffice: they can run its program.
        known, fault = function_state(function, now), function.fault
    elif others and function.spec.settings.device == "any":
        # Either part suffices.
        known = min(_state(others, others[0], now), function_state(function, now), key=AWAKE_FIRST.index)
        fault = function.fault and fault
    else:
        known = _state(others, function, now)
        fault = function.fault or fault
    return FunctionSnapshot(
        function.spec,
        known,
        function.on_trial,
        family.slo_infeasible,
        family_name(family),
        len(family.members),
        tuple(function.workers),
        counterpart.queued(state, function) if function.pool is None else sum(len(each.queue) for each in on_pool),
        whole_names(fault),
        tuple(holding),
        (function.spec.id, *(each.spec.id for each in others)),
    )


def _state(parts: Sequence[Function], first: Function, now: Seconds) -> FunctionState:
    """Return the state of the first part of a function; `unloaded` if one of `parts` is unloaded."""
    return "unloaded" if any(each.unloaded for each in parts) else function_state(first, now)


def parts_on_pool(state: State, function: Function) -> list[Function]:
    """Return what of a function runs on the pool, in this order: the function, or its program, then the later slices of
    the program.
    """
    part = function if function.pool is not None else program_of(state, function)
    return [] if part is None else list(counterpart.with_later(state, part))


def program_of(state: State, function: Function) -> Function | None:
    """Return the program of a function that runs in workers, if it runs on the pool as another function."""
    return state.functions.get(program_id(function.spec.id)) if function.spec.has_pool_program else None

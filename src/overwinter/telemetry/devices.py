"""Describes the devices of the pool: their executors, the functions there, and what ran since the node started."""

from collections.abc import Mapping, Sequence

import msgspec

from overwinter.core.devices import DeviceConfig, DeviceKind
from overwinter.core.ids import DeviceId, FunctionId, Seconds, TenantId, WorkerId, slice_number, whole_id
from overwinter.scheduler.pool import DeviceState
from overwinter.scheduler.snapshot import DeviceSnapshot
from overwinter.telemetry.pool import DeviceRun, TrackedDevice
from overwinter.telemetry.sources import Sources
from overwinter.telemetry.statistics import FunctionStatistics, Statistics
from overwinter.telemetry.tally import DeviceCounts


class ResidentFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A function with blocks on a device."""

    function: FunctionId
    slice: int | None
    """The number of the slice, from 2, if the program is cut into slices; None: the first slice, or a whole program."""
    tenant: TenantId | None
    """None: the statistics, which are of a slightly different moment, do not have it on the device."""
    nbytes: int
    """The bytes of its weights, shared ones included."""
    exclusive_bytes: int | None
    """The part of these that no other function there has; None for a tenant."""


class CurrentRun(msgspec.Struct, frozen=True, kw_only=True):
    """The run in progress on a device."""

    function: FunctionId
    tenant: TenantId | None
    requests: int
    missing_bytes: int
    """The bytes that it had to bring."""
    seconds: float
    """How long it has been in progress."""


class Links(msgspec.Struct, frozen=True, kw_only=True):
    """The links over which blocks reach a device, as configured."""

    bytes_per_s: float
    latency_s: float
    switch: str
    """Devices with the same switch share its bandwidth; empty: none."""
    switch_bytes_per_s: float
    peers: Mapping[DeviceId, float]
    """The links from other devices."""
    group_bytes: int
    """The bytes of one transfer, but for the first ones, which are smaller."""


class DeviceHistory(msgspec.Struct, frozen=True, kw_only=True):
    """What happened on a device since the node started."""

    runs: int
    run_s: float
    hits: int
    """The runs whose blocks were all there."""
    misses: int
    """The runs that brought missing bytes."""
    hit_ratio: float | None
    """None: nothing ran."""
    moved_bytes: int
    """The bytes that were transferred for runs, or before a request needed them."""
    peer_bytes: int
    """The part of the moved bytes that came from other devices."""
    executors: int
    """The started executors."""
    crashes: int
    """The executors that died, whose device failed, or that were killed because a start or run did not end in time."""


class DeviceActivity(msgspec.Struct, frozen=True, kw_only=True):
    """One device. A tenant sees only devices that serve it, and there only its own functions; what depends on other
    tenants is None.
    """

    name: DeviceId
    kind: DeviceKind
    state: DeviceState | None
    executor: WorkerId | None
    tenant: TenantId | None
    """The tenant that its executor serves; None: all tenants, or no executor."""
    taken_bytes: int | None
    """The bytes of all blocks there, each counted once."""
    total_bytes: int
    shared_bytes: int | None
    """The part of the taken bytes that several functions there have."""
    functions: Sequence[ResidentFunction]
    """The functions with blocks there, the largest first."""
    run: CurrentRun | None
    """The run in progress."""
    failures: int | None
    """The consecutive failures of its executors."""
    fault: str | None
    """The last failure; empty after a success."""
    backoff_s: float | None
    """The time until it is tried again after a failure; 0: it may be used."""
    links: Links
    history: DeviceHistory | None


def devices_activity(sources: Sources, known: Sequence[DeviceSnapshot], now: Seconds) -> list[DeviceActivity]:
    """Describe all devices, for the administrator."""
    configs = {each.name: each for each in sources.config.devices}
    return [_device(sources.statistics, each, configs[each.name], now) for each in known]


def _device(statistics: Statistics, known: DeviceSnapshot, config: DeviceConfig, now: Seconds) -> DeviceActivity:
    seen = statistics.pool.devices.get(known.name)
    tenants = {} if seen is None else {id_: tally.tenant for id_, tally in list(seen.residents.items())}
    functions = [
        ResidentFunction(
            function=whole_id(each.function),
            slice=slice_number(each.function),
            tenant=tenants.get(each.function),
            nbytes=each.nbytes,
            exclusive_bytes=each.exclusive_bytes,
        )
        for each in sorted(known.residents, key=lambda each: (-each.nbytes, each.function))
    ]
    executor = None if known.executor is None else statistics.pool.executors.get(known.executor)
    # Read once: this may run in a thread, and the run may end meanwhile.
    run = None if executor is None else executor.run
    return DeviceActivity(
        name=known.name,
        kind=known.kind,
        state=known.state,
        executor=known.executor,
        tenant=known.tenant,
        taken_bytes=known.taken_bytes,
        total_bytes=known.total_bytes,
        shared_bytes=known.taken_bytes - sum(each.exclusive_bytes for each in known.residents),
        functions=functions,
        run=None if run is None else _run(run, now),
        failures=known.failures,
        fault=known.fault,
        backoff_s=known.backoff_s,
        links=_links(config),
        history=_history(seen),
    )


def _run(run: DeviceRun[FunctionStatistics], now: Seconds) -> CurrentRun:
    return CurrentRun(
        function=whole_id(run.function),
        tenant=run.parts[0].tally.tenant,
        requests=len(run.requests),
        missing_bytes=run.missing_bytes,
        seconds=max(0.0, now - run.begun),
    )


def _links(config: DeviceConfig) -> Links:
    return Links(
        bytes_per_s=config.bytes_per_s,
        latency_s=config.latency_s,
        switch=config.switch,
        switch_bytes_per_s=config.switch_bytes_per_s or config.bytes_per_s,
        peers=config.peers,
        group_bytes=config.group_bytes,
    )


def _history(seen: TrackedDevice[FunctionStatistics] | None) -> DeviceHistory:
    counts = DeviceCounts() if seen is None else seen.counts
    return DeviceHistory(
        runs=counts.runs,
        run_s=counts.run_s,
        hits=counts.hits,
        misses=counts.misses,
        hit_ratio=counts.hit_ratio,
        moved_bytes=counts.moved_bytes,
        peer_bytes=counts.peer_bytes,
        executors=0 if seen is None else seen.starts,
        crashes=0 if seen is None else seen.crashes,
    )


def of_tenant(devices: Sequence[DeviceActivity], tenant: TenantId) -> list[DeviceActivity]:
    """Return what a tenant may know: the devices that serve it, and its own functions there."""
    own = []
    for each in devices:
        functions = [
            msgspec.structs.replace(one, exclusive_bytes=None) for one in each.functions if one.tenant == tenant
        ]
        is_its = each.tenant == tenant
        if not functions and not is_its:
            continue
        run = each.run if each.run is not None and each.run.tenant == tenant else None
        known = msgspec.structs.replace(each, functions=functions, run=run, state=each.state if is_its else None)
        hidden = dict.fromkeys(("taken_bytes", "shared_bytes", "failures", "fault", "backoff_s", "history"))
        own.append(msgspec.structs.replace(known, **hidden))
    return own

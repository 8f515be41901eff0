"""Describes the current activity of each function and of the node, which `overwinter top` shows."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from overwinter.core.ids import DeviceId, FunctionId, FunctionName, Seconds, StoreName, TenantId, WorkerId
from overwinter.scheduler.snapshot import FamilyWorker, FunctionSnapshot, Snapshot
from overwinter.telemetry.devices import DeviceActivity, devices_activity
from overwinter.telemetry.sources import Sources
from overwinter.telemetry.statistics import ANSWERS_KEPT, Answer, FunctionStatistics

WINDOW_S = 60.0
"""Rates and latencies are computed from the answers of this many recent seconds."""


class FunctionActivity(msgspec.Struct, frozen=True, kw_only=True):
    """One function, all its versions together."""

    name: FunctionName
    tenant: TenantId
    state: str
    """The state of the default version, or of the last one while none has passed its trial."""
    family: FunctionId
    """The first of the functions with which it may share workers; itself if it shares with none."""
    members: int
    """The number of functions in the family."""
    workers: Sequence[WorkerId]
    """The workers that have bound it; functions of a family share them."""
    device: str
    """Where its program runs: `cpu`, in workers; `pool`, on any device; or `any`, in either."""
    devices: Sequence[DeviceId]
    """The devices with its blocks."""
    running: int
    """The requests in workers and on devices."""
    queued: int
    shared: float | None
    """The share of the requests that ran together with those of other functions; None: nothing ran."""
    rate: float
    """The recent answers per second."""
    p50_ms: float | None
    """The recent median latency; None: there was no answer."""
    p99_ms: float | None
    attainment: float | None
    """Of the requests that were answered or refused since the node started, the share that met the SLO; None: no SLO,
    or no such request.
    """
    slo_ms: float | None
    host_bytes: int
    """The bytes that its versions hold in the host store, shared ones included; each block counts once in a store."""
    exclusive_bytes: int | None
    """The part of these that no other function holds; None for a tenant, because it would reveal the blocks of other
    tenants.
    """
    private_bytes: int
    """Its part of its workers' private memory, which is divided equally among the functions in a worker."""
    wakes: int
    requests: int
    refused: int


class NodeActivity(msgspec.Struct, frozen=True, kw_only=True):
    """The node and its functions, the most active first."""

    cores: int
    cores_running: int | None
    """The cores of the runs, binds and starts in progress; None for a tenant."""
    worker_states: Mapping[str, int]
    """The number of workers in each state."""
    versions_deployed: int
    running: int
    queued: int
    host_bytes: int
    host_budget: int | None
    """The limit of all host stores together; None: unlimited, or not shown to a tenant."""
    private_bytes: int
    private_budget: int | None
    """The limit of private memory; None for a tenant."""
    functions: Sequence[FunctionActivity]
    workers: Sequence[FamilyWorker]
    """The functions that each worker has bound."""
    devices: Sequence[DeviceActivity] = ()
    """The devices of the pool."""


def activity(sources: Sources, known: Snapshot, now: Seconds) -> NodeActivity:
    """The current activity. Slow with a thousand functions: call it in a thread."""
    seen = sources.statistics
    private, running = seen.private_bytes(), seen.running()
    versions: dict[FunctionName, list[FunctionSnapshot]] = {}
    for function in known.functions:
        versions.setdefault(function.spec.name, []).append(function)
    functions = [
        _function(sources, tally, versions[tally.name], private, running, now)
        for tally in list(seen.tallies.values())
        if tally.name in versions
    ]
    functions.sort(
        key=lambda each: (-each.running - each.queued, -each.rate, -len(each.workers), -each.requests, each.name)
    )
    return NodeActivity(
        cores=sources.config.cores or 1,
        cores_running=known.cores_running,
        worker_states=dict(Counter[str](worker.state for worker in known.workers)),
        versions_deployed=len(known.functions),
        running=running.total(),
        queued=sum(each.queued for each in functions),
        host_bytes=known.host_bytes,
        host_budget=known.host_budget,
        private_bytes=private.total(),
        private_budget=sources.config.memory_bytes,
        functions=functions,
        workers=known.workers,
        devices=devices_activity(sources, known.devices, now),
    )


def _function(
    sources: Sources,
    tally: FunctionStatistics,
    versions: Sequence[FunctionSnapshot],
    private: Counter[FunctionId],
    running: Counter[str],
    now: Seconds,
) -> FunctionActivity:
    answering = next((each for each in versions if each.spec.id == tally.default), versions[-1])
    ids = [function.spec.id for function in versions]
    parts: defaultdict[StoreName, list[FunctionId]] = defaultdict(list)
    for function in versions:
        parts[function.spec.store] += function.parts
    stores = sources.statistics.stores
    held = [(stores[name].held(*each), stores[name].exclusive(*each)) for name, each in parts.items() if name in stores]
    workers = tuple(dict.fromkeys(id_ for function in versions for id_ in function.workers))
    rate, p50, p99 = recent_latency(list(tally.recent), now)
    return FunctionActivity(
        name=tally.name,
        tenant=answering.spec.tenant,
        state=answering.state,
        family=answering.family,
        members=answering.members,
        workers=workers,
        device=answering.spec.settings.device,
        devices=tuple(dict.fromkeys(name for function in versions for name in function.devices)),
        running=running[tally.name],
        queued=sum(function.queued for function in versions),
        shared=tally.shared_run_requests / tally.run_requests if tally.run_requests else None,
        rate=rate,
        p50_ms=None if p50 is None else p50 * 1000,
        p99_ms=None if p99 is None else p99 * 1000,
        attainment=tally.attainment,
        slo_ms=answering.spec.settings.slo_ms,
        host_bytes=sum(nbytes for nbytes, _ in held),
        exclusive_bytes=sum(nbytes for _, nbytes in held),
        private_bytes=sum(private[id_] for id_ in ids),
        wakes=tally.wakes.total(),
        requests=tally.requests,
        refused=tally.refused.total(),
    )


def recent_latency(answers: Sequence[Answer], now: Seconds) -> tuple[float, float | None, float | None]:
    """Return the answers per second, and the median and the 99th percentile of their latency, within the window."""
    recent = [(at, seconds) for at, seconds in answers if at > now - WINDOW_S]
    if not recent:
        return 0.0, None, None
    # With so many answers, older ones of the window may have been dropped: use the time that the remaining ones cover.
    # The last may be later than `now`, because the node answers requests while a thread computes this.
    span = max(now, recent[-1][0]) - recent[0][0] if len(recent) == ANSWERS_KEPT else WINDOW_S
    ordered = sorted(seconds for _, seconds in recent)
    p50, p99 = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.99))
    return len(recent) / max(span, 1e-3), p50, p99

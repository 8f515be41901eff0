"""Explains the state of a function: where its blocks are, its profile, its workers, and the decisions with their
reasons.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

import msgspec

from overwinter.core.function import FunctionSpec, Settings
from overwinter.core.ids import (
    Address,
    DeviceId,
    FunctionId,
    FunctionName,
    Seconds,
    StoreName,
    TenantId,
    WorkerId,
    is_part,
    whole_id,
)
from overwinter.core.profile import Point
from overwinter.scheduler.details import BindingDetail, FunctionDetail, PoolDetail, WorkerDetail
from overwinter.store.residency import Place, distinct, missing_bytes
from overwinter.store.shared_blocks import SharedBlocks
from overwinter.telemetry.in_progress import LiveWorker
from overwinter.telemetry.sources import Sources
from overwinter.telemetry.statistics import DecisionRecord, FunctionStatistics


class TierBytes(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes of a function on one tier."""

    tier: str
    """disk, host, private (the workers' memory), or the name of a device."""
    store: StoreName = StoreName("")
    """The name of a host store; empty for the shared one."""
    resident: int
    missing: int
    """The bytes of its blocks that are not there."""
    exclusive: int
    """The bytes that no other version of any function of its tenant holds; other tenants do not count, so that nothing
    of them is revealed.
    """
    shared: int
    """The bytes that such versions hold too."""
    sharers: int
    """The number of such versions, and of parts of them, that hold some of its blocks."""


class ProfileFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The measured performance on this machine of the function, or of its program if only that is measured."""

    points: Sequence[Point]
    """The measured configurations that its settings, the policy and the memory for workers allow."""
    weight_bytes: int
    macs: int
    wake_s: float | None
    slowdown: float
    """The observed latency divided by that of the profile."""
    age_s: float | None
    """The seconds since it was measured, or its profile was read or corrected."""


class SharedFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The ended shared runs of the function, of all its versions together."""

    runs: int
    all_runs: int
    """All its runs, including separate ones."""
    requests: int
    """Its own requests in shared runs."""
    all_requests: int
    charged_s: float
    """Its part of the seconds of cores, or of a device, that shared runs took, by its share of the requests in each."""
    whole_s: float
    """All seconds of cores, or of a device, that those runs took."""
    separate_part: float
    """The scheduler's estimate of the part of a run that sharing does not save, from 0 to 1."""
    time_ratio: float | None
    """The time of a shared run divided by that of separate runs; if 1 or more, few runs are shared. None: unknown."""
    shared_with: Mapping[FunctionName, int]
    """How many of the last shared runs it shared with each function, the most frequent first."""


class BoundFacts(BindingDetail, frozen=True, kw_only=True):
    """A function that a worker has bound, and its memory."""

    private_bytes: int | None
    """Its part of the worker's private memory; None: not yet known."""


class WorkerFacts(WorkerDetail, frozen=True, kw_only=True):
    """A worker of the function's family, or of one that the function is leaving, with the memory of the worker."""

    pid: int | None
    private_bytes: int | None
    """The measured private memory; None: not yet measured."""
    pss_bytes: int | None
    """The private memory and the worker's part of shared memory (PSS)."""
    bound: Sequence[BoundFacts]


class PoolFacts(PoolDetail, frozen=True, kw_only=True):
    """What is known of a function of the pool, and its runs since the node started, of all versions together."""

    runs: Mapping[DeviceId, int]
    """The ended runs on each device."""
    hit_ratio: float | None
    """The share of these whose blocks were all there; None: there was none."""
    moved_bytes: int | None
    """The bytes that were transferred to devices for these; None in an answer to a tenant."""


class HistoryEntry(msgspec.Struct, frozen=True):
    """A decision or a refusal, and its time in seconds since 1970."""

    at: float
    what: str
    why: str


class FunctionFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that every description of one version of a function contains."""

    name: FunctionName
    version: int
    tenant: TenantId
    traffic: int
    """The percentage of the requests without a version that it gets."""
    promoted: bool
    """Whether a promotion or a split determined `traffic`; otherwise the newest version gets all."""
    settings: Settings
    family: FunctionId
    """Its family, named after the first member; itself if it shares workers with none."""


class Explanation(FunctionFacts, frozen=True, kw_only=True):
    """The full explanation of the state of one version of a function."""

    state: str
    """asleep, waking, awake, backoff or unloaded; `on_trial` says whether it is on trial."""
    on_trial: bool
    slo_infeasible: bool
    """Whether no configuration meets the SLO of its family."""
    attainment: float | None
    """The attainment of all versions since the node started."""
    queued: int
    rate: float
    """The requests per second of its family in the last period."""
    expected_rate: float
    """The requests per second of its family that are expected in the next period."""
    run_s: float | None
    """The smoothed seconds of its family's runs in workers; None: there was none."""
    failures: int
    """The consecutive failures of loads, starts, workers and runs on devices: its own, or those of one of its parts on
    the pool, whichever backs off longest.
    """
    backoff_s: float
    """The remaining backoff, during which the function or that part is not woken."""
    tiers: Sequence[TierBytes]
    profile: ProfileFacts | None
    members: Sequence[FunctionId]
    """The first members of its family."""
    member_count: int
    """The number of all of them."""
    shared: SharedFacts
    workers: Sequence[WorkerFacts]
    """The workers of its family, including those in which it is not bound, and those of a former family that it is
    leaving.
    """
    answered: int
    """The answered requests for this version since the node started."""
    refused: int
    decisions: Sequence[HistoryEntry]
    """The last decisions about all versions, the newest last."""
    refusals: Sequence[HistoryEntry]
    pool: PoolFacts | None = None
    """Its devices, if it may run on the pool."""
    last_choice: str = ""
    """With `device = "any"`: where its last request went, and why there."""


def explanation(sources: Sources, known: FunctionDetail, pids: Mapping[WorkerId, int], times: "Times") -> Explanation:
    """Return the explanation, except the bytes (`tiers_of`)."""
    spec, function, versions = known.spec, known.function, known.versions
    tally, own = sources.statistics.tallies[spec.name], sources.statistics.versions[spec.id]
    return Explanation(
        name=spec.name,
        version=spec.version,
        tenant=spec.tenant,
        traffic=versions.percent(spec.version),
        promoted=bool(versions.shares),
        state=function.state,
        on_trial=function.on_trial,
        settings=spec.settings,
        slo_infeasible=function.slo_infeasible,
        attainment=tally.attainment,
        queued=function.queued,
        rate=known.rate,
        expected_rate=known.expected_rate,
        run_s=known.run_s,
        failures=known.failures,
        backoff_s=known.backoff_s,
        tiers=(),
        profile=_profile(known, tally, times.now),
        family=function.family,
        members=known.members,
        member_count=known.member_count,
        shared=_shared(known, tally),
        workers=[_worker(sources, worker, pids.get(worker.worker)) for worker in known.workers],
        answered=sum(own.durations.counts),
        refused=own.refused.total(),
        decisions=times.history(list(tally.decisions)),
        refusals=times.history(list(tally.refusals)),
        pool=None if known.pool is None else _pool(known.pool, tally),
        last_choice=known.last_choice,
    )


class Times(msgspec.Struct, frozen=True):
    """The same moment on the node's monotonic clock, and in seconds since 1970."""

    now: Seconds
    wall: float

    def history(self, records: Iterable[DecisionRecord]) -> list[HistoryEntry]:
        """Convert the times of decisions to seconds since 1970."""
        return [HistoryEntry(self.wall - (self.now - each.at), each.what, each.why) for each in records]


def tiers_of(
    sources: Sources, parts: Sequence[FunctionSpec], functions: Sequence[FunctionId], places: tuple[Place, Place]
) -> list[TierBytes]:
    """Return where a function's blocks are. `parts`: the functions on the pool into which it is divided, if any, and
    last the function itself; `functions`: all of its tenant, with their parts; `places`: its repository and its host
    store. It reads the disk: call it in a thread.
    """
    seen, function = sources.statistics, parts[-1]
    others = [id_ for id_ in functions if id_ != function.id and not (is_part(id_) and whole_id(id_) == function.id)]
    empty: SharedBlocks[FunctionId] = SharedBlocks()
    blobs = [blob for part in parts for blob in part.blobs]
    whole = sum(distinct(blobs).values())
    tiers = []
    for tier, blocks, place in zip(
        ("disk", "host"), (seen.disk, seen.stores.get(function.store, empty)), places, strict=True
    ):
        missing, own = missing_bytes(blobs, place), _held(blocks, parts)
        holding = [addresses for id_ in others if (addresses := blocks.addresses(id_))]
        exclusive = sum(own[each] for each in _without(own, holding))
        tiers.append(
            TierBytes(
                tier=tier,
                store=function.store if tier == "host" else StoreName(""),
                resident=whole - missing,
                missing=missing,
                exclusive=exclusive,
                shared=sum(own.values()) - exclusive,
                sharers=sum(not own.keys().isdisjoint(addresses) for addresses in holding),
            )
        )
    tiers += _devices(sources, [part for part in parts if part.on_pool], others)
    private = seen.private_bytes()[function.id]
    return [*tiers, TierBytes(tier="private", resident=private, missing=0, exclusive=private, shared=0, sharers=0)]


def _without(addresses: Iterable[Address], holding: Iterable[Set[Address]]) -> set[Address]:
    """Return those of the addresses that none of these functions holds. One step for each function: a union of all
    their blocks would hold the GIL for long.
    """
    left = set(addresses)
    for each in holding:
        left -= each
    return left


def _held(blocks: SharedBlocks[FunctionId], parts: Sequence[FunctionSpec]) -> dict[Address, int]:
    """Return the blocks that a place holds for these parts of a function."""
    return distinct([blob for part in parts if blocks.held(part.id) for blob in part.blobs])


def _pool(known: PoolDetail, tally: FunctionStatistics) -> PoolFacts:
    counts = tally.on_devices
    return PoolFacts(
        **msgspec.structs.asdict(known),
        runs={name: each.runs for name, each in list(tally.by_device.items())},
        hit_ratio=counts.hit_ratio,
        moved_bytes=counts.moved_bytes,
    )


def _devices(sources: Sources, parts: Sequence[FunctionSpec], others: Sequence[FunctionId]) -> Iterator[TierBytes]:
    """Yield a tier for each device that has some weights of a function's parts."""
    weights = {part.id: part.weights for part in parts}
    sizes = {address: nbytes for each in weights.values() for address, nbytes in each.items()}
    for name, device in list(sources.statistics.pool.devices.items()):
        holding = [addresses for id_ in others if (addresses := device.blocks.addresses(id_))]
        own = set[Address]().union(*(each for id_, each in weights.items() if device.blocks.held(id_)))
        held = own | (sizes.keys() - _without(sizes, holding))
        if held:
            sharers = [addresses for addresses in holding if not held.isdisjoint(addresses)]
            shared = sum(sizes[each] for each in held - _without(held, sharers))
            resident = sum(sizes[each] for each in held)
            yield TierBytes(
                tier=name,
                resident=resident,
                missing=sum(sizes.values()) - resident,
                exclusive=resident - shared,
                shared=shared,
                sharers=len(sharers),
            )


def _profile(known: FunctionDetail, tally: FunctionStatistics, now: Seconds) -> ProfileFacts | None:
    profile = known.profile
    if profile is None:
        return None
    return ProfileFacts(
        points=known.points,
        weight_bytes=profile.weight_bytes,
        macs=profile.macs,
        wake_s=profile.wake_s,
        slowdown=known.slowdown,
        age_s=None if tally.profiled is None else now - tally.profiled,
    )


def _shared(known: FunctionDetail, tally: FunctionStatistics) -> SharedFacts:
    return SharedFacts(
        runs=tally.shared_runs,
        all_runs=tally.runs,
        requests=tally.shared_run_requests,
        all_requests=tally.run_requests,
        charged_s=tally.shared_charged_s,
        whole_s=tally.shared_whole_s,
        separate_part=known.separate_part,
        time_ratio=known.shared_time_ratio,
        shared_with=dict(Counter(name for names in tally.shared_with for name in names).most_common()),
    )


def _worker(sources: Sources, worker: WorkerDetail, pid: int | None) -> WorkerFacts:
    measured = sources.accounts.workers.get(worker.worker)
    live = sources.statistics.workers.get(worker.worker)
    known = msgspec.structs.asdict(worker) | {"bound": [_bound(binding, live) for binding in worker.bound]}
    return WorkerFacts(
        **known,
        pid=pid,
        private_bytes=None if measured is None else measured.memory.private,
        pss_bytes=None if measured is None else measured.memory.pss,
    )


def _bound(binding: BindingDetail, live: LiveWorker[FunctionStatistics] | None) -> BoundFacts:
    private_bytes = live.part_bytes if live is not None and binding.function in live.bound else None
    return BoundFacts(**msgspec.structs.asdict(binding), private_bytes=private_bytes)

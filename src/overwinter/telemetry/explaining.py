"""Explains the state of a function: where its blocks are, its profile, its workers, and the decisions with their
reasons.
"""

from collections import Counter
from collections.abc import Iterable, KeysView, Mapping, Sequence
from typing import Literal

import msgspec

from overwinter.core.function import FunctionSpec, Settings
from overwinter.core.ids import Address, FunctionId, FunctionName, Seconds, StoreName, TenantId, WorkerId
from overwinter.core.policies import policy_named
from overwinter.core.profile import Point
from overwinter.core.versions import Versions
from overwinter.scheduler.lifecycles import function_state, worker_state
from overwinter.scheduler.policies.scaling.predictors import PREDICTORS
from overwinter.scheduler.snapshot import family_name
from overwinter.scheduler.state import Binding, Function, Worker
from overwinter.store.residency import Place, distinct, missing_bytes
from overwinter.store.shares import Shares
from overwinter.telemetry.families import workers_of
from overwinter.telemetry.sources import Sources
from overwinter.telemetry.statistics import FunctionStatistics, Told
from overwinter.telemetry.underway import LivingWorker

Sibling = tuple[FunctionId, KeysView[Address]]
"""Another function of the same tenant, and its blocks."""


class TierBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Where a function's blocks are on one tier."""

    tier: str
    """disk, host, or private: of its workers alone."""
    store: StoreName = StoreName("")
    """Of the host stores, the one meant; the shared one has no name."""
    resident: int
    missing: int
    """Of its blocks, what has to be brought."""
    exclusive: int
    """What no other function of its tenant holds: nobody learns here what other tenants have."""
    shared: int
    """What others of its tenant hold too."""
    sharers: int
    """How many other functions of its tenant hold some of it."""


class ProfileFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How fast the function is on this machine."""

    points: Sequence[Point]
    """The measured configurations that its settings allow."""
    weight_bytes: int
    macs: int
    wake_s: float | None
    pace: float
    """Latency seen in service, by the profile's."""
    age_s: float | None
    """Since it was measured, or read at the start of the node."""


class SharedFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Of a function's runs that ended, all its versions together, those that it shared with others of its family."""

    runs: int
    all_runs: int
    """Those of its requests alone included."""
    requests: int
    """Its own in them."""
    all_requests: int
    core_s: float
    """What it paid of them: of each by its part of the requests."""
    whole_core_s: float
    """What all that were in them paid together."""
    own: float
    """The part of such a run that takes as long for each function as if it ran by itself, as the scheduler expects."""
    cost: float | None
    """Time of such a run, by that of runs of each function by itself; from 1 on few are shared. None: not known."""
    beside: Mapping[FunctionName, int]
    """Of the last ones, how many it shared with whom; the most often first."""


class BoundFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A function that a worker has."""

    function: FunctionId
    doing: Literal["binding", "running", "idle", "leaving"]
    runs: int
    """Under way, those that it shares with others included."""
    requests: int
    """Its own in them."""
    private_bytes: int | None
    """Its part of the worker's private memory; None: it has none of it yet."""


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One of the workers of its family."""

    worker: WorkerId
    pid: int | None
    state: str
    since_s: float
    """Since it is in that state."""
    cores: int
    batch: int
    """Most requests of one run."""
    concurrency: int
    """Most runs at once."""
    runs: int
    """Under way."""
    requests: int
    """In them."""
    private_bytes: int | None
    """As weighed; None: not yet."""
    pss_bytes: int | None
    """The same with its part of what it shares."""
    bound: Sequence[BoundFacts]
    """What it has, in the order in which it was bound."""


class Happened(msgspec.Struct, frozen=True):
    """Something that was decided or said, and when, in seconds since 1970."""

    at: float
    what: str
    why: str


class FunctionFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What every description of one version of a function says."""

    name: FunctionName
    version: int
    tenant: TenantId
    traffic: int
    """Per cent of the requests that name no version that it gets."""
    promoted: bool
    """Whether a promotion or a split says so; else the newest version gets all."""
    settings: Settings
    family: FunctionId
    """The first of the functions with which it may share workers; itself if it shares with nobody."""


class Explanation(FunctionFacts, frozen=True, kw_only=True):
    """All that is known of why one version of a function is as it is."""

    state: str
    """asleep, waking, awake, backoff or unloaded; on trial is said of `on_trial`."""
    on_trial: bool
    best_effort: bool
    """No configuration meets its SLO."""
    attainment: float | None
    """Of all versions, since the node started."""
    queued: int
    rate: float
    """Requests per second of the last period."""
    expected_rate: float
    """Of the next, as the scheduler expects it."""
    run_s: float | None
    """Of its runs, smoothed; None: it has not run."""
    failures: int
    """Deaths in a row."""
    rests_s: float
    """For so long it is not woken, after a failure."""
    tiers: Sequence[TierBytes]
    profile: ProfileFacts | None
    members: Sequence[FunctionId]
    """All of its family."""
    shared: SharedFacts
    workers: Sequence[WorkerFacts]
    """Workers of its family, also those that do not have it."""
    answered: int
    """Requests for this version, since the node started."""
    refused: int
    decisions: Sequence[Happened]
    """Of all versions, the last ones, the newest last."""
    refusals: Sequence[Happened]


def explanation(
    sources: Sources, state: Function, versions: Versions, pids: Mapping[WorkerId, int], times: "Times"
) -> Explanation:
    """What there is to say but for its bytes (`tiers_of`). On the loop alone: it reads the scheduler's tables."""
    spec, tally = state.spec, sources.statistics.tallies[state.spec.name]
    own, rates = sources.statistics.versions[spec.id], state.family.rates
    predict = PREDICTORS.get(policy_named(sources.config.policy).rate)
    expected = state.forecast if predict is None else predict(rates)
    return Explanation(
        name=spec.name,
        version=spec.version,
        tenant=spec.tenant,
        traffic=versions.percent(spec.version),
        promoted=bool(versions.shares),
        state=function_state(state, times.now),
        on_trial=state.on_trial,
        settings=spec.settings,
        best_effort=state.family.best_effort,
        attainment=tally.attainment,
        queued=len(state.queue),
        rate=rates[-1] if rates else 0.0,
        expected_rate=expected or 0.0,
        run_s=state.latency.run_s,
        failures=state.failures,
        rests_s=max(0.0, state.backoff_until - times.now),
        tiers=(),
        profile=_profile(state, tally, times.now),
        family=family_name(state.family),
        members=list(state.family.members),
        shared=_shared(state, tally),
        workers=[_worker(sources, worker, pids.get(worker.id), times.now) for worker in workers_of(state)],
        answered=sum(own.durations.counts),
        refused=own.refused.total(),
        decisions=times.happened(list(tally.decisions)),
        refusals=times.happened(list(tally.refusals)),
    )


class Times(msgspec.Struct, frozen=True):
    """The same moment on both clocks."""

    now: Seconds
    wall: float

    def happened(self, told: Iterable[Told]) -> list[Happened]:
        """What was said, for people's calendars."""
        return [Happened(self.wall - (self.now - each.at), each.what, each.why) for each in told]


def siblings(functions: Iterable[Function], function: Function) -> list[Sibling]:
    """The other functions of its tenant with their blocks. On the loop alone."""
    others = (each for each in functions if each.spec.tenant == function.spec.tenant and each is not function)
    return [(each.spec.id, each.sizes.keys()) for each in others]


def tiers_of(
    sources: Sources, function: FunctionSpec, others: Sequence[Sibling], places: tuple[Place, Place]
) -> list[TierBytes]:
    """Where a function's blocks are. `places` are its repository and its host store. It looks at the disk: call it in a
    thread.
    """
    seen = sources.statistics
    empty: Shares[FunctionId] = Shares()
    function_sizes = distinct(function.blobs)
    tiers = []
    for tier, shares, place in zip(
        ("disk", "host"), (seen.disk, seen.stores.get(function.store, empty)), places, strict=True
    ):
        missing, held = missing_bytes(function.blobs, place), shares.held(function.id)
        holding = [sizes for id_, sizes in others if shares.held(id_)]
        exclusive = sum(function_sizes[each] for each in function_sizes.keys() - set().union(*holding)) if held else 0
        tiers.append(
            TierBytes(
                tier=tier,
                store=function.store if tier == "host" else StoreName(""),
                resident=sum(function_sizes.values()) - missing,
                missing=missing,
                exclusive=exclusive,
                shared=held - exclusive,
                sharers=sum(not function_sizes.keys().isdisjoint(sizes) for sizes in holding) if held else 0,
            )
        )
    private = seen.private_bytes()[function.id]
    return [*tiers, TierBytes(tier="private", resident=private, missing=0, exclusive=private, shared=0, sharers=0)]


def _profile(state: Function, tally: FunctionStatistics, now: Seconds) -> ProfileFacts | None:
    profile = state.spec.profile
    if profile is None:
        return None
    return ProfileFacts(
        points=state.latency.points,
        weight_bytes=profile.weight_bytes,
        macs=profile.macs,
        wake_s=profile.wake_s,
        pace=state.latency.pace,
        age_s=None if tally.profiled is None else now - tally.profiled,
    )


def _shared(state: Function, tally: FunctionStatistics) -> SharedFacts:
    return SharedFacts(
        runs=tally.shared_runs,
        all_runs=tally.runs,
        requests=tally.shared_batched,
        all_requests=tally.batched,
        core_s=tally.shared_core_s,
        whole_core_s=tally.shared_whole_core_s,
        own=state.own,
        cost=state.family.trunks[state.trunk].sharing.cost,
        beside=dict(Counter(name for names in tally.beside for name in names).most_common()),
    )


def _worker(sources: Sources, worker: Worker, pid: int | None, now: Seconds) -> WorkerFacts:
    weighed = sources.accounts.workers.get(worker.id)
    runs = worker.runs.values()
    return WorkerFacts(
        worker=worker.id,
        pid=pid,
        state=worker_state(worker),
        since_s=now - worker.since,
        cores=worker.point.cores,
        batch=worker.point.batch,
        concurrency=worker.point.concurrency,
        runs=len(runs),
        requests=sum(len(run.requests) for run in runs),
        private_bytes=None if weighed is None else weighed.memory.private,
        pss_bytes=None if weighed is None else weighed.memory.pss,
        bound=_bound(worker, sources.statistics.workers.get(worker.id)),
    )


def _bound(worker: Worker, living: LivingWorker[FunctionStatistics] | None) -> list[BoundFacts]:
    return [
        BoundFacts(
            function=id_,
            doing="binding" if worker.start is not None or id_ in worker.binds else _doing(binding),
            runs=binding.runs,
            requests=sum(len(run.of(binding.function)) for run in worker.runs.values()),
            private_bytes=living.part_bytes if living is not None and id_ in living.bound else None,
        )
        for id_, binding in worker.bound.items()
    ]


def _doing(binding: Binding) -> Literal["running", "idle", "leaving"]:
    return "leaving" if binding.leaving else "running" if binding.runs else "idle"

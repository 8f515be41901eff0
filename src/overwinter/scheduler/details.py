"""What the scheduler knows of one function, for readers that explain it. Immutable, like a snapshot."""

from collections.abc import Sequence
from itertools import islice
from typing import Literal

import msgspec

from overwinter.core.function import FunctionSpec
from overwinter.core.ids import DeviceId, FunctionId, Seconds, WorkerId, whole_names
from overwinter.core.profile import Point, Profile
from overwinter.core.versions import Versions
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.lifecycles import WorkerState, worker_state
from overwinter.scheduler.pool import pool_record
from overwinter.scheduler.sizing import expected_rate
from overwinter.scheduler.snapshot import (
    LISTED_MAX,
    FunctionSnapshot,
    family_members,
    function_snapshot,
    parts_on_pool,
    workers_of,
)
from overwinter.scheduler.state import Binding, Function, Worker
from overwinter.scheduler.swaps import run_s


class BindingDetail(msgspec.Struct, frozen=True, kw_only=True):
    """A function that is bound in a worker."""

    function: FunctionId
    doing: Literal["binding", "running", "idle", "draining"]
    runs: int
    """Its runs in progress, including shared ones."""
    requests: int
    """Its own requests in these runs."""


class WorkerDetail(msgspec.Struct, frozen=True, kw_only=True):
    """A worker of the function's family."""

    worker: WorkerId
    state: WorkerState
    since_s: float
    """The seconds since the worker last began to start, work, idle or stop."""
    cores: int
    batch: int
    """The most requests in one run."""
    concurrency: int
    """The most concurrent runs."""
    runs: int
    """The runs in progress."""
    requests: int
    """The requests in these runs."""
    bound: Sequence[BindingDetail]
    """The functions that the worker has bound, in the order of the binds: at most LISTED_MAX, the described one among
    them if it is bound.
    """
    bound_count: int
    """The number of all of them."""


class SliceDetail(msgspec.Struct, frozen=True, kw_only=True):
    """A slice of a function's program, which is cut because no device can hold all its weights."""

    nbytes: int
    """The bytes of its weights."""
    devices: Sequence[DeviceId]
    """The devices on which it is resident."""
    run_s: float
    """The expected seconds of a run of one request whose blocks are on the device; 0: unknown."""
    last_device: str
    """The device of its last run, and why that one; empty: it has not run."""


class PoolDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a function of the pool."""

    nbytes: int
    """The bytes of its weights."""
    devices: Sequence[DeviceId]
    """The devices on which it or a slice of it is resident."""
    run_s: float
    """The expected seconds of a run of one request whose blocks are on the device; 0: unknown."""
    no_device_reason: str
    """Why no device can run it; empty: one can."""
    last_device: str
    """The device of its last run, and why that one; empty: it has not run."""
    answers: int
    """The number of its latest answers, if they count for its priority (`device_order = "rrc"`); otherwise 0."""
    in_time: int
    """The number of those within the SLO."""
    required: float
    """The further requests that it must answer in time to meet its SLO (Torpor's RRC); at most 0: it meets it."""
    out_of_service: Sequence[DeviceId] = ()
    """The devices that are out of service."""
    slices: Sequence[SliceDetail] = ()
    """The slices of its program in the order in which they run; empty: it is not cut. `last_device`,
    `answers`, `in_time` and `required` are those of the first slice.
    """


class FunctionDetail(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a function, its family, and its workers."""

    spec: FunctionSpec
    function: FunctionSnapshot
    versions: Versions
    """A copy of the versions of its name."""
    members: Sequence[FunctionId]
    """The first LISTED_MAX members of its family."""
    member_count: int
    """The number of all of them."""
    rate: float
    """The requests per second of the last period, of its family."""
    expected_rate: float
    """The expected requests per second of the next period."""
    run_s: float | None
    """The smoothed seconds of its family's runs in workers; None: there was none."""
    failures: int
    """The consecutive failures of loads, starts, workers and runs on devices: its own, or those of a part on the pool
    that backs off longer.
    """
    backoff_s: float
    """The remaining backoff after these failures, in seconds."""
    profile: Profile | None
    """The profile of the part of it that is measured; None: that was not measured, or nothing of it is measured because
    only slices of its program run.
    """
    points: Sequence[Point]
    """The measured configurations that its settings, the policy and the memory allow; empty without a profile."""
    slowdown: float
    """The observed latency divided by that of the profile."""
    separate_part: float
    """The part of a run that sharing does not save, from 0 to 1."""
    shared_time_ratio: float | None
    """The time of a shared run divided by that of separate runs; None: unknown."""
    workers: Sequence[WorkerDetail]
    """The workers of its family, including those that have not bound it, and of a former family that it is leaving."""
    pool: PoolDetail | None = None
    """None: nothing of it runs on the pool."""
    last_choice: str = ""
    """With `device = "any"`: the result of the last comparison of workers and devices for a request; empty: none."""


def detail(cycle: Cycle, function: Function, versions: Versions, now: Seconds) -> FunctionDetail:
    """Return what is known of a function now. Call it on the loop's thread."""
    family, on_pool = function.family, parts_on_pool(cycle.state, function)
    measured = _measured(function, on_pool)
    backoff_s, failures = max((max(0.0, each.backoff_until - now), each.failures) for each in (function, *on_pool))
    return FunctionDetail(
        spec=function.spec,
        function=function_snapshot(cycle.state, function, now),
        versions=versions,
        members=family_members(family),
        member_count=len(family.members),
        rate=family.rates[-1] if family.rates else 0.0,
        expected_rate=expected_rate(cycle, family),
        run_s=function.latency.run_s,
        failures=failures,
        backoff_s=backoff_s,
        profile=None if measured is None else measured.spec.profile,
        points=() if measured is None else tuple(measured.latency.points),
        slowdown=(measured or function).latency.slowdown,
        separate_part=function.separate_part,
        shared_time_ratio=family.trunks[function.trunk].sharing.time_ratio,
        workers=[_worker(worker, function.spec.id, now) for worker in workers_of(function)],
        pool=_pool(cycle, on_pool, now),
        last_choice="" if function.estimates is None else function.estimates.text(),
    )


def _measured(function: Function, on_pool: Sequence[Function]) -> Function | None:
    """Return the part of a function whose profile `overwinter profile` measures, given its parts on the pool. None: it
    refuses to measure, because only slices of the program run.
    """
    if function.spec.settings.device != "pool" or not on_pool:
        return function
    return on_pool[0] if len(on_pool) == 1 else None


def _pool(cycle: Cycle, parts: Sequence[Function], now: Seconds) -> PoolDetail | None:
    if not parts:
        return None
    slices = [_slice(cycle, part) for part in parts]
    pooled, runs_s = pool_record(parts[0]), [each.run_s for each in slices]
    return PoolDetail(
        nbytes=sum({address: size for part in parts for address, size in pool_record(part).sizes.items()}.values()),
        devices=list(dict.fromkeys(name for each in slices for name in each.devices)),
        run_s=sum(runs_s) if all(runs_s) else 0.0,
        no_device_reason=whole_names(next(filter(None, (pool_record(part).no_device_reason for part in parts)), "")),
        last_device=slices[0].last_device,
        answers=pooled.outcomes.count,
        in_time=pooled.outcomes.in_time,
        required=pooled.outcomes.required,
        out_of_service=[name for name, device in cycle.state.pool.devices.items() if device.is_out(now)],
        slices=slices if len(slices) > 1 else (),
    )


def _slice(cycle: Cycle, function: Function) -> SliceDetail:
    pooled, own = pool_record(function), cycle.state.tenants[function.spec.tenant].functions
    return SliceDetail(
        nbytes=pooled.nbytes,
        devices=[device.config.name for device in cycle.state.pool.holders(function)],
        run_s=run_s(cycle, function, 1),
        last_device="" if pooled.last_binding is None else pooled.last_binding.text(own),
    )


def _worker(worker: Worker, described: FunctionId, now: Seconds) -> WorkerDetail:
    runs, listed = worker.runs.values(), list(islice(worker.bound, LISTED_MAX))
    if described in worker.bound and described not in listed:
        listed[-1] = described
    return WorkerDetail(
        worker=worker.id,
        state=worker_state(worker),
        since_s=now - worker.since,
        cores=worker.point.cores,
        batch=worker.point.batch,
        concurrency=worker.point.concurrency,
        runs=len(runs),
        requests=sum(len(run.requests) for run in runs),
        bound=[
            BindingDetail(
                function=id_,
                doing="binding" if worker.start is not None or id_ in worker.binds else _doing(binding),
                runs=binding.runs,
                requests=sum(len(run.of(binding.function)) for run in runs),
            )
            for id_, binding in ((id_, worker.bound[id_]) for id_ in listed)
        ],
        bound_count=len(worker.bound),
    )


def _doing(binding: Binding) -> Literal["running", "idle", "draining"]:
    return "draining" if binding.draining else "running" if binding.runs else "idle"

"""All that the scheduler knows of one function, for readers that explain it: immutable, like a snapshot."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from overwinter.core.function import FunctionSpec
from overwinter.core.ids import FunctionId, Seconds, WorkerId
from overwinter.core.profile import Point
from overwinter.core.versions import Versions
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.lifecycles import WorkerState, worker_state
from overwinter.scheduler.snapshot import FunctionSnapshot, function_snapshot, workers_of
from overwinter.scheduler.state import Binding, Function, Worker


class BindingDetail(msgspec.Struct, frozen=True, kw_only=True):
    """A function that a worker has."""

    function: FunctionId
    doing: Literal["binding", "running", "idle", "leaving"]
    runs: int
    """Under way, those that it shares with others included."""
    requests: int
    """Its own in them."""


class WorkerDetail(msgspec.Struct, frozen=True, kw_only=True):
    """One of the workers of its family."""

    worker: WorkerId
    state: WorkerState
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
    bound: Sequence[BindingDetail]
    """What it has, in the order in which it was bound."""


class FunctionDetail(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a function, its family, and its workers."""

    spec: FunctionSpec
    function: FunctionSnapshot
    versions: Versions
    """Of its name; a copy."""
    members: Sequence[FunctionId]
    """Of its family."""
    rate: float
    """Requests per second of the last period."""
    expected_rate: float
    """Of the next."""
    run_s: float | None
    """Of its runs, smoothed; None: it has not run."""
    failures: int
    """Deaths in a row."""
    backoff_s: float
    """For so long it is not woken, after a failure."""
    points: Sequence[Point]
    """The measured configurations that its settings allow."""
    pace: float
    """Latency seen in service, by the profile's."""
    own: float
    """The part of a shared run that takes as long for each function as if it ran by itself."""
    cost: float | None
    """Time of a shared run, by that of runs of each function by itself. None: not known."""
    workers: Sequence[WorkerDetail]
    """Workers of its family, also those that do not have it."""


def detail(cycle: Cycle, function: Function, versions: Versions, now: Seconds) -> FunctionDetail:
    """What there is to know of a function now. On the loop alone."""
    family = function.family
    expected = function.forecast if cycle.predict is None else cycle.predict(family.rates)
    return FunctionDetail(
        spec=function.spec,
        function=function_snapshot(function, now),
        versions=versions,
        members=list(family.members),
        rate=family.rates[-1] if family.rates else 0.0,
        expected_rate=expected or 0.0,
        run_s=function.latency.run_s,
        failures=function.failures,
        backoff_s=max(0.0, function.backoff_until - now),
        points=tuple(function.latency.points),
        pace=function.latency.pace,
        own=function.own,
        cost=family.trunks[function.trunk].sharing.cost,
        workers=[_worker(worker, now) for worker in workers_of(function)],
    )


def _worker(worker: Worker, now: Seconds) -> WorkerDetail:
    runs = worker.runs.values()
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
            for id_, binding in worker.bound.items()
        ],
    )


def _doing(binding: Binding) -> Literal["running", "idle", "leaving"]:
    return "leaving" if binding.leaving else "running" if binding.runs else "idle"

"""Renders the Prometheus metrics from the statistics at each scrape; docs/metrics.md lists every name.

The number of series is bounded by the deployed functions: `function` is the name of a deployed function, or empty for
requests with unknown names. Histograms with many buckets are kept for the whole node, except the duration of requests.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import get_args

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from overwinter.core.actions import Decision
from overwinter.core.config import SchedulerConfig
from overwinter.core.ids import FunctionId, Seconds, TenantId, split_id
from overwinter.scheduler.lifecycles import FunctionState, WorkerState
from overwinter.scheduler.snapshot import FunctionSnapshot, Snapshot
from overwinter.store.host import VerificationCounts, page_bytes
from overwinter.telemetry.accounts import KINDS, Accounts
from overwinter.telemetry.device_metrics import device_metrics
from overwinter.telemetry.exposition import Sample, counter, gauge, histogram
from overwinter.telemetry.pipelines import PipelineStatistics
from overwinter.telemetry.sources import Sources
from overwinter.telemetry.statistics import FunctionStatistics, Statistics, VersionStatistics

VERSION = version("overwinter")


def render(
    sources: Sources,
    known: Snapshot,
    pipelines: Sequence[PipelineStatistics],
    now: Seconds,
    tenant: TenantId | None = None,
) -> bytes:
    """All metrics in Prometheus's text format. Slow with a thousand functions: call it in a thread.

    With `tenant`, the counts by function are only those of the tenant's functions; `known` and `pipelines` must be
    those of the tenant.
    """
    statistics = sources.statistics
    every = [statistics.unknown, *list(statistics.tallies.values())]
    tallies = [each for each in every if tenant in (None, each.tenant)]
    registry = CollectorRegistry()
    registry.register(_Node(sources, known, tallies, pipelines, now))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class _Node(Collector):
    def __init__(
        self,
        sources: Sources,
        known: Snapshot,
        tallies: Sequence[FunctionStatistics],
        pipelines: Sequence[PipelineStatistics],
        now: Seconds,
    ) -> None:
        self._sources = sources
        self._known = known
        self._tallies = tallies
        self._pipelines = pipelines
        self._now = now

    def collect(self) -> Iterable[Metric]:
        sources, known, tallies, now = self._sources, self._known, self._tallies, self._now
        ids = {function.spec.id for function in known.functions}
        versions = {id_: each for id_, each in sources.statistics.versions.copy().items() if id_ in ids}
        yield gauge("build_info", "The version of Overwinter.", ["version"], [((VERSION,), 1)])
        yield from _requests(tallies, versions, known.functions)
        yield from _pipelines(self._pipelines)
        yield from _runs(sources.statistics, tallies)
        yield from _workers(sources.statistics, known, tallies)
        yield from _decisions(sources.statistics, tallies)
        yield from _functions(known)
        yield from _profiles(tallies, now)
        yield from _bytes(sources.statistics, known, tallies)
        yield from _machine(sources.config, known)
        yield from _accounts(sources.accounts)
        yield from _verification(sources.verification)
        if known.devices:
            yield from device_metrics(known.devices, sources.statistics, tallies)
        help_text = "Periodic work of the node, and steps in its telemetry, that failed; the log has the reason."
        yield counter(
            "checks_failed", help_text, ["what"], (((what,), count) for what, count in sources.faults.copy().items())
        )


def _requests(
    tallies: Sequence[FunctionStatistics],
    versions: Mapping[FunctionId, VersionStatistics],
    functions: Sequence[FunctionSnapshot],
) -> Iterator[Metric]:
    yield counter(
        "requests",
        "Completed requests; refused ones by the error's name.",
        ["function", "outcome", "error"],
        (sample for each in tallies for sample in _outcomes(each)),
    )
    yield histogram(
        "request_duration_seconds",
        "Time from a request's arrival to its answer, by the kind of start.",
        ["function", "start"],
        (((each.name, start), times) for each in tallies for start, times in list(each.durations.items())),
    )
    queued: Counter[str] = Counter()
    for function in functions:
        queued[function.spec.name] += function.queued
    yield gauge("requests_queued", "Waiting requests.", ["function"], _by_name(queued, tallies))
    with_slo = [each for each in tallies if each.slo_s is not None]
    yield gauge(
        "slo_seconds", "Latency objective.", ["function"], (((each.name,), each.slo_s or 0) for each in with_slo)
    )
    yield counter(
        "slo_requests",
        "Requests that were answered or refused while their function had an SLO.",
        ["function"],
        (((each.name,), each.slo_requests) for each in with_slo),
    )
    yield counter(
        "slo_met",
        "Requests answered within the SLO of their function.",
        ["function"],
        (((each.name,), each.in_slo) for each in with_slo),
    )
    yield from _versions(versions)
    yield counter(
        "retries",
        "Times that a program, or a slice of it, was run again for a request, for example after a worker or an "
        "executor died or hung.",
        ["function"],
        _named(tallies, "retries"),
    )


def _versions(versions: Mapping[FunctionId, VersionStatistics]) -> Iterator[Metric]:
    """Yield metrics by version, for versions that had a request and whose function has several versions."""
    counts = Counter(split_id(id_)[0] for id_ in versions)
    named = {split_id(id_): each for id_, each in versions.items() if counts[split_id(id_)[0]] > 1}
    outcomes: list[Sample] = []
    for (name, number), each in named.items():
        if answered := sum(each.durations.counts):
            outcomes.append(((name, str(number), "answered", ""), answered))
        refused = each.refused.copy()
        outcomes += [((name, str(number), "refused", error), count) for error, count in refused.items()]
    labels = ["function", "version"]
    help_text = "Requests that were answered or refused for a version; refused ones by the error's name."
    yield counter("version_requests", help_text, [*labels, "outcome", "error"], outcomes)
    yield histogram(
        "version_request_duration_seconds",
        "Time from a request's arrival to the answer of the version.",
        labels,
        (((name, str(number)), each.durations) for (name, number), each in named.items() if any(each.durations.counts)),
    )


def _outcomes(each: FunctionStatistics) -> Iterator[Sample]:
    yield (each.name, "answered", ""), each.answered
    yield (each.name, "cancelled", ""), each.cancelled
    for error, count in list(each.refused.items()):
        yield (each.name, "refused", error), count


def _pipelines(pipelines: Sequence[PipelineStatistics]) -> Iterator[Metric]:
    label = ["pipeline"]
    outcomes = [((each.name, "answered"), each.requests.answered) for each in pipelines]
    outcomes += [((each.name, "failed"), each.requests.failed) for each in pipelines]
    yield counter("pipeline_requests", "Completed requests for pipelines.", [*label, "outcome"], outcomes)
    running = (((each.name,), each.requests.running) for each in pipelines)
    yield gauge("pipeline_requests_running", "Requests in progress in pipelines.", label, running)
    durations = (((each.name,), each.durations) for each in pipelines)
    yield histogram(
        "pipeline_duration_seconds", "Time from a request's arrival to the answer of the pipeline.", label, durations
    )
    with_slo = [each for each in pipelines if each.slo_ms is not None]
    slo_s = (((each.name,), (each.slo_ms or 0.0) / 1000) for each in with_slo)
    yield gauge("pipeline_slo_seconds", "Latency objective of the pipeline.", label, slo_s)
    met = (((each.name,), each.requests.in_slo) for each in with_slo)
    yield counter("pipeline_slo_met", "Requests answered within the SLO.", label, met)


def _runs(statistics: Statistics, tallies: Sequence[FunctionStatistics]) -> Iterator[Metric]:
    help_text = "Time from a request's arrival until it was sent to a worker or a device."
    yield histogram("queue_wait_seconds", help_text, [], [((), statistics.waits)])
    yield histogram("run_duration_seconds", "Time of runs.", [], [((), statistics.run_times)])
    yield histogram("batch_size", "Requests in a run.", [], [((), statistics.batches)])
    running = _by_name(statistics.running(), tallies)
    yield gauge("requests_running", "Requests in workers and on devices.", ["function"], running)
    yield counter("runs", "Ended runs.", ["function"], _named(tallies, "runs"))
    yield counter("run_requests", "Requests in ended runs.", ["function"], _named(tallies, "run_requests"))
    help_text = "Runs that several functions shared; a shared run counts once for each."
    yield counter("shared_runs", help_text, ["function"], _named(tallies, "shared_runs"))
    help_text = "Requests in shared runs, by their function."
    yield counter("shared_run_requests", help_text, ["function"], _named(tallies, "shared_run_requests"))
    yield counter(
        "run_seconds",
        "Time of ended runs; a shared run counts in full for each function.",
        ["function"],
        _named(tallies, "run_s"),
    )
    yield counter(
        "run_core_seconds",
        "Core seconds of ended runs and binds; those of a shared run are divided among the functions in proportion "
        "to their requests.",
        ["function"],
        _named(tallies, "core_s"),
    )
    help_text = "Time from arrivals until the requests were sent to a worker or a device."
    yield counter("wait_seconds", help_text, ["function"], _named(tallies, "wait_s"))


def _workers(statistics: Statistics, known: Snapshot, tallies: Sequence[FunctionStatistics]) -> Iterator[Metric]:
    states = Counter(worker.state for worker in known.workers)
    counts = [((name,), states[name]) for name in get_args(WorkerState)]
    yield gauge("workers", "Worker processes, by state.", ["state"], counts)
    alive = (((each.name,), float(each.workers)) for each in tallies if each.workers)
    yield gauge(
        "function_workers",
        "Existing worker processes, by the function for which they were forked.",
        ["function"],
        alive,
    )
    live = list(statistics.workers.values())
    bound = Counter[str](name for process in live for name in {tally.name for tally in list(process.bound.values())})
    yield gauge("function_bound", "Workers in which a function is bound.", ["function"], _by_name(bound, tallies))
    help_text = "Binds of a function in a worker of its family, including failed ones."
    yield counter("binds", help_text, ["function"], _named(tallies, "binds"))
    yield counter("bind_seconds", "Time of binds.", ["function"], _named(tallies, "bind_s"))
    yield counter(
        "wakes",
        "Started workers, by where the weights were.",
        ["function", "start"],
        (((each.name, start), count) for each in tallies for start, count in list(each.wakes.items())),
    )
    yield counter(
        "wake_seconds",
        "Time of wakes, from their start until the worker was ready.",
        ["function", "start"],
        (((each.name, start), each.wake_s[start]) for each in tallies for start in list(each.woken)),
    )
    yield histogram(
        "wake_duration_seconds",
        "Time from the start of a wake until the worker was ready.",
        ["start"],
        (((start,), times) for start, times in statistics.wake_times.items()),
    )
    yield counter(
        "worker_crashes",
        "Workers that died, or that the node ended because they broke a limit or a rule.",
        ["function"],
        _named(tallies, "crashes"),
    )
    yield counter("zygote_losses", "Zygotes that died or were stopped.", [], [((), statistics.zygotes_lost)])


def _decisions(statistics: Statistics, tallies: Sequence[FunctionStatistics]) -> Iterator[Metric]:
    counts = (((what,), statistics.decision_counts[what]) for what in get_args(Decision))
    yield counter("decisions", "Decisions of the scheduler that `explain` shows.", ["decision"], counts)
    yield counter(
        "evictions",
        "Evictions of a function's blocks from a host store.",
        ["function"],
        _named(tallies, "evictions"),
    )
    yield counter(
        "memory_pressure", "Times that the machine ran short of memory.", [], [((), statistics.pressure_events)]
    )


def _functions(known: Snapshot) -> Iterator[Metric]:
    states = Counter(function.state for function in known.functions)
    counts = (((state,), states[state]) for state in get_args(FunctionState))
    yield gauge("functions", "Deployed versions, by their state.", ["state"], counts)
    yield gauge("families", "Families of functions, which share workers.", [], [((), known.families)])
    slo_infeasible = sum(function.slo_infeasible for function in known.functions)
    help_text = "Deployed versions whose SLO no configuration meets."
    yield gauge("functions_slo_infeasible", help_text, [], [((), slo_infeasible)])
    help_text = "Functions that wait for a core, capacity for a worker, space in a host store, or a device."
    yield gauge(
        "functions_waiting", help_text, ["wants"], (((wants,), count) for wants, count in known.waiting.items())
    )


def _profiles(tallies: Sequence[FunctionStatistics], now: Seconds) -> Iterator[Metric]:
    ages = (((each.name,), now - each.profiled) for each in tallies if each.profiled is not None)
    yield gauge(
        "profile_age_seconds",
        "Time since a function's profile was measured, corrected, or loaded at its deploy or at the node's start.",
        ["function"],
        ages,
    )


def _bytes(statistics: Statistics, known: Snapshot, tallies: Sequence[FunctionStatistics]) -> Iterator[Metric]:
    disk, stores = statistics.disk, dict(statistics.stores)
    own = statistics.private_bytes()
    samples: list[Sample] = []
    for function in known.functions:
        spec = function.spec
        named, parts = (spec.name, str(spec.version)), function.parts
        places = [("disk", disk)] + ([("host", stores[spec.store])] if spec.store in stores else [])
        for tier, blocks in places:
            exclusive = blocks.exclusive(*parts)
            samples.append(((*named, tier, "exclusive"), exclusive))
            samples.append(((*named, tier, "shared"), blocks.held(*parts) - exclusive))
        if own[spec.id]:
            samples.append(((*named, "private", "exclusive"), own[spec.id]))
    labels = ["function", "version", "tier", "sharing"]
    yield gauge(
        "function_bytes", "Bytes that a version holds, by whether other versions hold them too.", labels, samples
    )
    tiers = [(("disk",), disk.nbytes), (("host",), known.host_bytes), (("private",), sum(own.values()))]
    yield gauge("tier_bytes", "Bytes of all functions together; a block counts once in each store.", ["tier"], tiers)
    resident = (((name,), nbytes) for name, nbytes in known.stores.items())
    yield gauge("host_store_bytes", "Bytes in a host store, including those being loaded.", ["store"], resident)
    released = (((name,), count) for name, count in list(statistics.released_bytes.items()))
    yield counter("host_store_released_bytes", "Bytes that were removed from a host store.", ["store"], released)
    loaded = [tally for tally in tallies if tally.loaded_bytes]
    yield counter("loaded_bytes", "Bytes that were loaded from disk.", ["function"], _named(loaded, "loaded_bytes"))


def _machine(config: SchedulerConfig, known: Snapshot) -> Iterator[Metric]:
    yield gauge("cores", "Cores that workers may use.", [], [((), config.cores or 1)])
    yield gauge("cores_running", "Cores of the runs, binds and starts in progress.", [], [((), known.cores_running)])
    yield gauge(
        "cores_reserved", "Cores that are reserved for workers, idle ones included.", [], [((), known.cores_reserved)]
    )
    budgets = [("host", known.host_budget), ("private", config.memory_bytes)]
    bounded: list[Sample] = [((tier,), nbytes) for tier, nbytes in budgets if nbytes is not None]
    yield gauge("budget_bytes", "Limit of a tier in bytes, if it has one.", ["tier"], bounded)


def _accounts(accounts: Accounts) -> Iterator[Metric]:
    workers, stores = list(accounts.workers.values()), list(accounts.stores.values())
    amounts = {
        "store_table": sum(page_bytes(nbytes) for store in stores for nbytes in store.resident.values()),
        "store_scheduler": sum(sum(store.held.values()) for store in stores),
        "store_kernel": sum(file.allocated for store in stores for file in store.files.values()),
        "worker_expected": sum(process.expected or 0 for process in workers),
        "worker_private": sum(process.memory.private for process in workers),
        "worker_pss": sum(process.memory.pss for process in workers),
        "worker_shared_pss": sum(process.memory.shared for process in workers),
        "zygote_pss": accounts.zygotes,
    }
    help_text = "Memory at the last comparison, by the source of the count."
    yield gauge("memory_bytes", help_text, ["source"], (((name,), nbytes) for name, nbytes in amounts.items()))
    yield counter(
        "accounting_mismatch",
        "Differences between two counts of the same memory that two consecutive comparisons found.",
        ["kind"],
        (((kind,), accounts.mismatches[kind]) for kind in KINDS),
    )
    yield counter("accounting_passes", "Comparisons of the counts of bytes.", [], [((), accounts.passes)])


def _verification(verification: VerificationCounts) -> Iterator[Metric]:
    damaged = [(("host",), verification.damaged_memory), (("disk",), verification.damaged_disk)]
    yield counter("blocks_damaged", "Blocks whose content no longer matched their address.", ["tier"], damaged)
    yield counter("verified_bytes", "Bytes in memory that were hashed again.", [], [((), verification.verified_bytes)])


def _named(tallies: Iterable[FunctionStatistics], field: str) -> Iterator[Sample]:
    """Yield a count for each function that had a request or a worker."""
    return (((each.name,), getattr(each, field)) for each in tallies if each.requests or each.wakes)


def _by_name(counts: Counter[str], tallies: Sequence[FunctionStatistics]) -> Iterator[Sample]:
    """Yield the counts of these functions."""
    return (((each.name,), counts[each.name]) for each in tallies if each.name in counts)

"""Reads a scheduler's steps, simulated or live, and computes the figures of a report.

It needs only the events and actions, and the memory of one worker of each function.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from overwinter.core.actions import Action, Drop, Refuse, Reply, Run, StartWorker
from overwinter.core.events import Arrived, BlocksLoaded, Cancelled, Deployed, Event, RunEnded, WorkerExited
from overwinter.core.function import FunctionSpec
from overwinter.core.ids import Address, FunctionId, FunctionName, RequestId, RunId, Seconds, StoreName, WorkerId
from overwinter.telemetry.latencies import Latencies
from overwinter.telemetry.pipelines import ApplicationFigures

SAMPLES = 600
"""Points of each curve over time."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one function, and of all together."""

    requests: int
    answered: int
    refused: dict[str, int]
    """By the error's name."""
    cancelled: int
    """Whoever asked went away before the answer."""
    lost: int
    """Neither answered nor refused nor cancelled."""
    attainment: float | None
    """Share of the requests, of functions with an SLO, that were answered within it; None: no SLO."""
    slo_ms: float | None = None
    """Of one function."""
    p50_ms: float | None
    p99_ms: float | None
    started: dict[str, int]
    """Requests answered, by what their function was woken from when they came."""
    wakes: dict[str, int]
    """Workers started, by where the function's blocks were."""
    loaded_bytes: int
    worker_seconds: float
    busy_seconds: float
    worker_core_s: float
    """Cores of its workers by their time alive."""
    busy_core_s: float
    """Of these, while they ran; busy_core_s / worker_core_s is AsyFunc's CPU utility."""


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes over the simulated time; a block that many functions share counts once."""

    blocks_mean: float
    blocks_peak: int
    workers_mean: float
    workers_peak: float
    mean: float
    peak: float


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """A point of the curves over time."""

    at_s: float
    workers: int
    blocks_bytes: int
    workers_bytes: float
    worker_cores: int
    """Of the workers alive."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All that a simulation says. As JSON: `msgspec.json.encode`."""

    duration_s: float
    total: Figures
    memory: Memory
    functions: dict[str, Figures]
    applications: dict[str, ApplicationFigures] = {}
    samples: list[Sample]
    latencies: list[tuple[float, float]]
    """(seconds, share of the answers up to them)."""


class Tally:
    """Counts of one function while the steps are read."""

    def __init__(self, slo_s: float | None) -> None:
        self.slo_s = slo_s
        self.requests = self.answered = self.cancelled = self.within = self.loaded_bytes = 0
        self.refused: Counter[str] = Counter()
        self.started: Counter[str] = Counter()
        self.wakes: Counter[str] = Counter()
        self.latencies = Latencies()
        self.worker_seconds = self.busy_seconds = 0.0
        self.worker_core_s = self.busy_core_s = 0.0
        self.from_disk = False

    def figures(self) -> Figures:
        """The counts as data."""
        return Figures(
            requests=self.requests,
            answered=self.answered,
            refused=dict(sorted(self.refused.items())),
            cancelled=self.cancelled,
            lost=self.requests - self.answered - self.cancelled - self.refused.total(),
            attainment=self.within / self.requests if self.slo_s is not None and self.requests else None,
            slo_ms=_ms(self.slo_s),
            p50_ms=_ms(self.latencies.quantile(0.5)),
            p99_ms=_ms(self.latencies.quantile(0.99)),
            started=dict(sorted(self.started.items())),
            wakes=dict(sorted(self.wakes.items())),
            loaded_bytes=self.loaded_bytes,
            worker_seconds=self.worker_seconds,
            busy_seconds=self.busy_seconds,
            worker_core_s=self.worker_core_s,
            busy_core_s=self.busy_core_s,
        )


class LivingWorker:
    """A worker while the steps are read."""

    __slots__ = ("batch", "cores", "nbytes", "needs", "run_cores", "runs", "since", "tally")

    def __init__(self, tally: Tally, action: StartWorker, needs: dict[int, int], since: float) -> None:
        self.tally = tally
        self.needs = needs
        self.batch, self.nbytes = next(iter(needs.items()))
        self.since = since
        self.cores = action.cores
        self.run_cores = max(1, action.cores // action.concurrency)
        self.runs: dict[RunId, tuple[float, dict[Tally, int]]] = {}
        """When each began, and how many requests of whom are in it."""


class OpenRequest(NamedTuple):
    """A request that has no answer yet."""

    tally: Tally
    arrived: float


class StepReader:
    """Reads `(now, event, actions)` one after another. Memory of a worker is what its function's profile says of
    the largest batch it has run; if they do not share, each has its weights to itself and there is no host store.
    """

    def __init__(self, duration_s: float, shared: bool = True) -> None:
        self._shared = shared
        self._tallies: dict[FunctionName, Tally] = {}
        self._specs: dict[FunctionId, FunctionSpec] = {}
        self._open: dict[RequestId, OpenRequest] = {}
        self._workers: dict[WorkerId, LivingWorker] = {}
        self._blocks: dict[StoreName, dict[Address, int]] = {}
        self._usage = Usage(duration_s / SAMPLES)
        self._hears: dict[type[Event], Callable[[Any, Seconds], None]] = {
            Arrived: self._arrived,
            RunEnded: self._ended,
            WorkerExited: self._exited,
            BlocksLoaded: self._blocks_loaded,
            Cancelled: self._cancelled,
            Deployed: self._deployed,
        }
        self._sees: dict[type[Action], Callable[[Any, Seconds], None]] = {
            Run: self._ran,
            Reply: self._replied,
            Refuse: self._refused,
            StartWorker: self._starts,
            Drop: self._dropped,
        }

    @property
    def open_requests(self) -> int:
        """Requests that came and have no answer yet."""
        return len(self._open)

    def observe(self, now: Seconds, event: Event, actions: list[Action]) -> None:
        """Read one step."""
        hear = self._hears.get(type(event))
        if hear is not None:
            hear(event, now)
        for action in actions:
            see = self._sees.get(type(action))
            if see is not None:
                see(action, now)

    def _arrived(self, event: Arrived, now: Seconds) -> None:
        tally = self._tally(event.name)
        tally.requests += 1
        self._open[event.request] = OpenRequest(tally, now)

    def _cancelled(self, event: Cancelled, now: Seconds) -> None:
        if event.request in self._open:
            self._open.pop(event.request).tally.cancelled += 1

    def _deployed(self, event: Deployed, now: Seconds) -> None:
        spec = event.function
        self._specs[spec.id] = spec
        self._tally(spec.name, spec)
        if event.resident:
            self._hold(spec, now)

    def _ran(self, action: Run, now: Seconds) -> None:
        worker = self._workers[action.worker]
        if action.functions:
            whose = {self._tally(self._specs[id_].name): number for id_, number in Counter(action.functions).items()}
        else:
            tally = worker.tally if action.function is None else self._tally(self._specs[action.function].name)
            whose = {tally: len(action.requests)}
        worker.runs[action.run] = now, whose
        if len(action.requests) > worker.batch:
            self._grow(worker, len(action.requests), now)

    def _refused(self, action: Refuse, now: Seconds) -> None:
        self._open.pop(action.request).tally.refused[action.error] += 1

    def _dropped(self, action: Drop, now: Seconds) -> None:
        self._usage.turn(now)
        blocks = self._blocks.get(action.store, {})
        self._usage.blocks_bytes -= sum(blocks.pop(address, 0) for address in action.addresses)

    def _tally(self, name: FunctionName, spec: FunctionSpec | None = None) -> Tally:
        tally = self._tallies.get(name)
        if tally is None:
            slo_ms = None if spec is None else spec.settings.slo_ms
            tally = self._tallies[name] = Tally(None if slo_ms is None else slo_ms / 1000)
        return tally

    def _replied(self, action: Reply, now: Seconds) -> None:
        tally, arrived = self._open.pop(action.request)
        seconds = now - arrived
        tally.answered += 1
        tally.started[action.start] += 1
        tally.latencies.add(seconds)
        if tally.slo_s is not None and seconds <= tally.slo_s:
            tally.within += 1

    def _starts(self, action: StartWorker, now: Seconds) -> None:
        spec = self._specs[action.function]
        tally = self._tally(spec.name)
        tally.wakes["disk" if tally.from_disk else "host"] += 1
        tally.from_disk = False
        needs = _worker_bytes(spec, action, self._shared)
        worker = self._workers[action.worker] = LivingWorker(tally, action, needs, now)
        self._usage.turn(now)
        self._usage.workers += 1
        self._usage.worker_cores += worker.cores
        self._usage.workers_bytes += worker.nbytes

    def _grow(self, worker: LivingWorker, batch: int, now: Seconds) -> None:
        """A worker runs more requests at once than before."""
        worker.batch, needed = next((each for each in worker.needs.items() if each[0] >= batch), (batch, worker.nbytes))
        self._usage.turn(now)
        self._usage.workers_bytes += needed - worker.nbytes
        worker.nbytes = needed

    def _ended(self, event: RunEnded, now: Seconds) -> None:
        worker = self._workers.get(event.worker)
        run = None if worker is None else worker.runs.pop(event.run, None)
        if worker is not None and run is not None:
            since, whose = run
            batch = sum(whose.values())
            for tally, count in whose.items():
                share = count / batch
                tally.busy_seconds += (now - since) * share
                tally.busy_core_s += (now - since) * share * worker.run_cores

    def _exited(self, event: WorkerExited, now: Seconds) -> None:
        worker = self._workers.pop(event.worker, None)
        if worker is None:
            return
        _count_life(worker, now)
        self._usage.turn(now)
        self._usage.workers -= 1
        self._usage.worker_cores -= worker.cores
        self._usage.workers_bytes -= worker.nbytes

    def _blocks_loaded(self, event: BlocksLoaded, now: Seconds) -> None:
        spec = self._specs[event.function]
        tally = self._tally(spec.name)
        tally.loaded_bytes += event.added
        tally.from_disk = event.added > 0
        self._hold(spec, now)

    def _hold(self, spec: FunctionSpec, now: Seconds) -> None:
        """All blocks of a function are in its host store."""
        if not self._shared:
            return
        blocks = self._blocks.setdefault(spec.store, {})
        new = {blob.address: blob.nbytes for blob in spec.blobs if blob.address not in blocks}
        blocks.update(new)
        self._usage.turn(now)
        self._usage.blocks_bytes += sum(new.values())

    def report(self, now: Seconds) -> Report:
        """The figures at `now`, the end."""
        self._usage.turn(now)
        for worker in self._workers.values():
            _count_life(worker, now)
        return Report(
            duration_s=now,
            total=self._total(),
            memory=self._usage.memory(now),
            functions={name: tally.figures() for name, tally in self._tallies.items()},
            samples=self._usage.samples,
            latencies=Latencies().merge(tally.latencies for tally in self._tallies.values()).shares(),
        )

    def _total(self) -> Figures:
        total = Tally(None)
        with_slo = Tally(0.0)
        for tally in self._tallies.values():
            total.requests += tally.requests
            total.answered += tally.answered
            total.cancelled += tally.cancelled
            total.loaded_bytes += tally.loaded_bytes
            total.worker_seconds += tally.worker_seconds
            total.busy_seconds += tally.busy_seconds
            total.worker_core_s += tally.worker_core_s
            total.busy_core_s += tally.busy_core_s
            total.refused.update(tally.refused)
            total.started.update(tally.started)
            total.wakes.update(tally.wakes)
            if tally.slo_s is not None:
                with_slo.requests += tally.requests
                with_slo.within += tally.within
        total.latencies.merge(tally.latencies for tally in self._tallies.values())
        return msgspec.structs.replace(total.figures(), attainment=with_slo.figures().attainment)


class Usage:
    """Memory over time: its sum, its peak, and a curve of bounded length."""

    def __init__(self, every_s: float) -> None:
        self.workers = self.worker_cores = self.blocks_bytes = 0
        self.workers_bytes = 0.0
        self.samples: list[Sample] = []
        self._every_s = every_s
        self._turned = 0.0
        self._blocks_s = self._workers_s = 0.0
        self._blocks_peak = 0
        self._workers_peak = self._peak = 0.0

    def turn(self, now: float) -> None:
        """Account for the time up to now; to be called before each change."""
        spent = now - self._turned
        if spent > 0:
            self._blocks_s += spent * self.blocks_bytes
            self._workers_s += spent * self.workers_bytes
            self._blocks_peak = max(self._blocks_peak, self.blocks_bytes)
            self._workers_peak = max(self._workers_peak, self.workers_bytes)
            self._peak = max(self._peak, self.blocks_bytes + self.workers_bytes)
            self._turned = now
        while len(self.samples) * self._every_s <= now:
            at = len(self.samples) * self._every_s
            self.samples.append(Sample(at, self.workers, self.blocks_bytes, self.workers_bytes, self.worker_cores))

    def memory(self, now: float) -> Memory:
        """The figures up to `now`."""
        seconds = now or 1.0
        return Memory(
            blocks_mean=self._blocks_s / seconds,
            blocks_peak=self._blocks_peak,
            workers_mean=self._workers_s / seconds,
            workers_peak=self._workers_peak,
            mean=(self._blocks_s + self._workers_s) / seconds,
            peak=self._peak,
        )


def _count_life(worker: LivingWorker, now: float) -> None:
    worker.tally.worker_seconds += now - worker.since
    worker.tally.worker_core_s += (now - worker.since) * worker.cores
    worker.since = now


def _worker_bytes(spec: FunctionSpec, action: StartWorker, shared: bool) -> dict[int, int]:
    """By the batches that were measured in a worker so made, ascending."""
    if spec.profile is None:
        return {1: 0}
    shape = (action.cores, action.concurrency)
    own = 0 if shared else spec.profile.weight_bytes
    alike = (point for point in spec.profile.points if (point.cores, point.concurrency) == shape)
    return {point.batch: point.memory_bytes + own for point in sorted(alike, key=lambda p: p.batch)} or {1: own}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000

"""Statistics of a live node's functions. `Statistics` is the node's only reader of the scheduler's steps.

Metrics, usage, `top` and `explain` are computed from them on request, mostly in a separate thread; here values are only
counted. Their size is bounded by the deployed functions, never by the names that callers use.
"""

from collections import Counter, deque
from collections.abc import Collection, Mapping
from typing import NamedTuple

from overwinter.core.actions import Decision, Refuse, Reply, Run, Start
from overwinter.core.events import Arrived, Event, MemoryMeasured, MemoryPressure, Profiled, RunEnded, ZygoteLost
from overwinter.core.function import FunctionSpec
from overwinter.core.ids import Address, FunctionId, FunctionName, Seconds, StoreName, is_part, slice_number, whole_id
from overwinter.core.profile import Configuration
from overwinter.scheduler.latency import WORKER_BYTES
from overwinter.store.shared_blocks import SharedBlocks
from overwinter.telemetry.histogram import BATCHES, SECONDS, Histogram
from overwinter.telemetry.in_progress import LiveWorker, OpenRequest, OpenRun
from overwinter.telemetry.pool import DevicePart, DeviceRun
from overwinter.telemetry.tally import Tally
from overwinter.telemetry.tracking import Tracker

SMOOTHING = 0.2
"""The weight of the latest value in smoothed values."""
ANSWERS_KEPT = 256
"""The number of recent answers per function whose latencies are kept."""
SHARED_RUNS_KEPT = 64
"""The number of recent shared runs per function whose participants are kept."""
RECORDS_KEPT = 32
"""The number of recent decisions and refusals per function that are kept."""

Answer = tuple[Seconds, float]
"""The time of an answer, and the seconds that the request had waited for it."""


class DecisionRecord(NamedTuple):
    """A decision about a function, or a refusal: its kind, or the name of the error, and the reason."""

    at: Seconds
    what: str
    why: str


class FunctionStatistics(Tally):
    """The statistics of one function."""

    def __init__(self, name: FunctionName) -> None:
        super().__init__(name)
        self.durations: dict[Start, Histogram] = {}
        """The durations of answered requests, by the kind of start."""
        self.recent: deque[Answer] = deque(maxlen=ANSWERS_KEPT)
        self.decisions: deque[DecisionRecord] = deque(maxlen=RECORDS_KEPT)
        self.refusals: deque[DecisionRecord] = deque(maxlen=RECORDS_KEPT)
        self.shared_with: deque[tuple[FunctionName, ...]] = deque(maxlen=SHARED_RUNS_KEPT)
        """The functions with which it shared its last shared runs."""
        self.disk_byte_s = self.host_byte_s = 0.0
        """The byte-seconds of blocks that it no longer holds."""
        self.usual_run_s = self.usual_request_s = self.usual_wake_s = 0.0
        """The smoothed seconds of a run, of a run divided by all its requests, and of a wake; 0 until there was one."""
        self.background_core_s = 0.0
        """The CPU seconds that its workers used in excess of the cores of their runs."""
        self.profiled: Seconds | None = None
        """When its profile was last measured, corrected, or loaded at its deploy or at the node's start."""
        self.runs = self.run_requests = 0
        """The ended runs, and its own requests in them."""
        self.run_s = 0.0
        """The time of these runs."""
        self.shared_runs = self.shared_run_requests = 0
        """Of these, the runs with requests of several functions, and its own requests in them."""
        self.shared_charged_s = self.shared_whole_s = 0.0
        """The seconds of cores, or of a device, that those runs took: its part of them, and the whole."""
        self.retries = 0
        self.wait_s = 0.0
        """The seconds from arrivals until the request was first sent to a worker or a device."""


def _smoothed(before: float, seconds: float) -> float:
    return before + SMOOTHING * (seconds - before) if before else seconds


class VersionStatistics:
    """The outcomes of the requests for one version of a function."""

    def __init__(self) -> None:
        self.durations = Histogram(SECONDS)
        """The durations of answered requests."""
        self.refused: Counter[str] = Counter()
        """The refused requests, by the error's name."""


Worker = LiveWorker[FunctionStatistics]


class ServiceObserver:
    """The interface of an observer of arrivals, runs, wakes and profiles; by default it ignores them."""

    def arrived(self, now: Seconds) -> None:
        """A request arrived."""

    def ran(self, function: FunctionId, configuration: Configuration, seconds: float, now: Seconds) -> None:
        """A run of this configuration ended after this many seconds, with as many runs in progress in its worker as
        when the configuration was measured.
        """

    def woke(self, function: FunctionId, seconds: float, now: Seconds) -> None:
        """A worker was ready, this long after its start, which included no warm-up."""

    def profiled(self, function: FunctionId) -> None:
        """The profile of a version has changed."""

    def removed(self, function: FunctionId) -> None:
        """A version was removed."""


class Statistics(Tracker[FunctionStatistics]):
    """The counts from the scheduler's steps. Only the loop's thread changes them, except `removed_tallies`."""

    def __init__(self, observer: ServiceObserver | None = None) -> None:
        super().__init__(FunctionStatistics)
        self._observer = observer or ServiceObserver()
        self.waits, self.run_times = Histogram(SECONDS), Histogram(SECONDS)
        self.batches = Histogram(BATCHES)
        self.wake_times: dict[Start, Histogram] = {"host": Histogram(SECONDS), "disk": Histogram(SECONDS)}
        self.decision_counts: Counter[Decision] = Counter()
        self.pressure_events = self.zygotes_lost = 0
        self.disk: SharedBlocks[FunctionId] = SharedBlocks()
        self.stores: dict[StoreName, SharedBlocks[FunctionId]] = {}
        self.released_bytes: Counter[StoreName] = Counter()
        """The bytes of blocks that no function holds any more."""
        self.versions: dict[FunctionId, VersionStatistics] = {}
        self.removed_tallies: list[FunctionStatistics] = []
        """Removed functions whose usage is not written to its file yet; `Meter.flush` removes them."""
        self._sizes: dict[FunctionId, Mapping[Address, int]] = {}

    def store(self, name: StoreName) -> SharedBlocks[FunctionId]:
        """Return the blocks held in a host store, by holder."""
        blocks = self.stores.get(name)
        if blocks is None:
            blocks = self.stores[name] = SharedBlocks()
        return blocks

    def private_bytes(self) -> Counter[FunctionId]:
        """Return each version's part of the private memory of workers."""
        private: Counter[FunctionId] = Counter()
        for worker in list(self.workers.values()):
            private.update(dict.fromkeys(list(worker.bound), worker.part_bytes))
        return private

    def running(self) -> Counter[str]:
        """Return the requests in workers and on devices, by function; 0 for one that is bound but not running."""
        running: Counter[str] = Counter()
        for worker in list(self.workers.values()):
            running.update({tally.name: 0 for tally in list(worker.bound.values())})
            for run in list(worker.runs.values()):
                running.update({tally.name: count for tally, count in run.requests.items()})
        for executor in list(self.pool.executors.values()):
            on_device = executor.run
            if on_device is not None:
                for part in self._own(on_device):
                    running[part.tally.name] += len(part.requests)
        return running

    def _own(self, run: DeviceRun[FunctionStatistics]) -> list[DevicePart[FunctionStatistics]]:
        """Return the parts of a run on a device, except the programs that handlers called, which count as runs of
        workers, and except later slices of programs.
        """
        return [own for own in run.parts if not is_part(own.spec.id) or self._is_counterpart(own.spec)]

    def _is_counterpart(self, spec: FunctionSpec) -> bool:
        """Whether this part is the pool's counterpart of a function in workers (scheduler/counterpart.py)."""
        whole = self.specs.get(whole_id(spec.id))
        is_called = whole is not None and whole.has_handler
        return spec.settings.device == "any" and slice_number(spec.id) is None and not is_called

    # Hooks of the tracker

    def _worker_started(self, worker: Worker, now: Seconds) -> None:
        profile = self.specs[worker.function].profile
        sizes = () if profile is None else profile.worker_bytes(worker.cores, worker.concurrency).values()
        worker.nbytes = float(next(iter(sizes), WORKER_BYTES))

    def _arrived(self, event: Arrived, now: Seconds) -> None:
        super()._arrived(event, now)
        self._observer.arrived(now)

    def _reply(self, action: Reply, now: Seconds) -> None:
        caller = self._requests[action.request].caller
        super()._reply(action, now)
        # A program may be removed before the answer to its last call.
        spec = self.specs.get(action.function)
        if caller is None or spec is None or spec.settings.device != "any":
            return
        worker = self.workers.get(caller[0])
        run = None if worker is None else worker.runs.get(caller[1])
        if run is not None:
            # A device ran the program for the worker, so the time of the run does not correct the profile.
            run.at_full_concurrency = False

    def _answered(self, tally: FunctionStatistics, action: Reply, seconds: float, now: Seconds) -> None:
        histogram = tally.durations.get(action.start)
        if histogram is None:
            histogram = tally.durations[action.start] = Histogram(SECONDS)
        histogram.add(seconds)
        tally.recent.append((now, seconds))
        version = self.versions.get(action.function)
        if version is not None:
            version.durations.add(seconds)

    def _refused(self, tally: FunctionStatistics, action: Refuse, now: Seconds) -> None:
        tally.refusals.append(DecisionRecord(now, action.error, action.message))
        version = None if action.function is None else self.versions.get(action.function)
        if version is not None:
            version.refused[action.error] += 1

    def _run_started(self, worker: Worker, run: OpenRun[FunctionStatistics], action: Run, now: Seconds) -> None:
        run.at_full_concurrency = len(worker.runs) == worker.concurrency and not action.functions
        for id_ in action.requests:
            self._sent(self._requests[id_], now)

    def _sent(self, request: OpenRequest[FunctionStatistics], at: Seconds, number: int = 1) -> None:
        """A request was sent to a worker or a device. `number`: the slice of the program; 1 for a whole program too."""
        before, request.last_slice = request.last_slice, number
        if before:
            request.tally.retries += number <= before
            return
        waited = at - request.arrived
        request.tally.wait_s += waited
        self.waits.add(waited)

    def _run_completed(
        self, worker: Worker, run: OpenRun[FunctionStatistics], event: RunEnded | None, now: Seconds
    ) -> None:
        seconds = now - run.begun
        self._count_run(run.requests, seconds, seconds * worker.run_cores)
        if event is not None:
            # A profile holds for runs with all concurrent runs in progress, and excludes the cost of a worker's first
            # run.
            is_full = run.at_full_concurrency and len(worker.runs) + 1 == worker.concurrency
            if is_full and worker.warm and not event.failures:
                self._observer.ran(
                    run.function, Configuration(worker.cores, run.batch, worker.concurrency), seconds, now
                )
            worker.warm = True

    def _run_on_device_completed(self, run: DeviceRun[FunctionStatistics], now: Seconds) -> None:
        # The requests count as sent only now, because a run whose blocks found no place on the device is sent again.
        for part in run.parts:
            for request in filter(None, map(self._requests.get, part.requests)):
                self._sent(request, run.begun, slice_number(part.spec.id) or 1)
        if not self._own(run):
            return
        requests: Counter[FunctionStatistics] = Counter()
        for part in run.parts:
            requests[part.tally] += len(part.requests)
        self._count_run(requests, now - run.begun, now - run.begun, {part.tally for part in self._own(run)})

    def _count_run(
        self,
        requests: Mapping[FunctionStatistics, int],
        seconds: float,
        whole_s: float,
        counted: Collection[FunctionStatistics] | None = None,
    ) -> None:
        """Count a run that took `whole_s` of cores or of a device, by its requests of each function. `counted`: the
        functions for which it counts, by default all.
        """
        batch = sum(requests.values())
        self.run_times.add(seconds)
        self.batches.add(batch)
        for tally, count in requests.items():
            if counted is not None and tally not in counted:
                continue
            tally.runs += 1
            tally.run_requests += count
            tally.run_s += seconds
            tally.usual_run_s = _smoothed(tally.usual_run_s, seconds)
            tally.usual_request_s = _smoothed(tally.usual_request_s, seconds / batch)
            if len(requests) > 1:
                tally.shared_runs += 1
                tally.shared_run_requests += count
                tally.shared_charged_s += whole_s * count / batch
                tally.shared_whole_s += whole_s
                tally.shared_with.append(tuple(each.name for each in requests if each is not tally))

    def _worker_ready(self, worker: Worker, seconds: float, now: Seconds) -> None:
        self.wake_times[worker.start].add(seconds)
        worker.tally.usual_wake_s = _smoothed(worker.tally.usual_wake_s, seconds)
        if not worker.warm_up:
            self._observer.woke(worker.function, now - worker.since, now)

    def _version_deployed(self, spec: FunctionSpec, now: Seconds) -> None:
        self._sizes[spec.id] = {blob.address: blob.nbytes for blob in spec.blobs}
        if not is_part(spec.name):
            self.versions[spec.id] = VersionStatistics()
        self.disk.hold(spec.id, self._sizes[spec.id], now)
        if spec.profile is not None:
            self.tally_of(spec).profiled = now

    def _version_removed(self, spec: FunctionSpec, now: Seconds) -> None:
        self.tally_of(spec).disk_byte_s += self.disk.release(spec.id, now)
        del self._sizes[spec.id]
        self.versions.pop(spec.id, None)
        self._observer.removed(spec.id)

    def _function_removed(self, tally: FunctionStatistics) -> None:
        self.removed_tallies.append(tally)

    def _blocks_held(self, spec: FunctionSpec, now: Seconds) -> None:
        self.store(spec.store).hold(spec.id, self._sizes[spec.id], now)

    def _blocks_released(self, spec: FunctionSpec, now: Seconds) -> None:
        blocks = self.store(spec.store)
        before = blocks.nbytes
        self.tally_of(spec).host_byte_s += blocks.release(spec.id, now)
        self.released_bytes[spec.store] += before - blocks.nbytes

    def _decision_made(self, tally: FunctionStatistics, what: Decision, why: str, now: Seconds) -> None:
        tally.decisions.append(DecisionRecord(now, what, why))
        self.decision_counts[what] += 1

    def _profiled(self, event: Profiled, now: Seconds) -> None:
        spec = self.specs.get(event.function)
        if spec is not None:
            self.tally_of(spec).profiled = now
            self._observer.profiled(event.function)

    def _other_event(self, event: Event, now: Seconds) -> None:
        if isinstance(event, MemoryMeasured):
            for worker, taken in event.taken:
                process = self.workers.get(worker)
                # A lower value is recorded only when the accounting reads it from smaps, which is more exact.
                if process is not None and taken > process.nbytes:
                    self.set_memory(process, float(taken), now)
        elif isinstance(event, MemoryPressure):
            self.pressure_events += 1
        elif isinstance(event, ZygoteLost):
            self.zygotes_lost += 1

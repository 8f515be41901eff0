"""Tracks requests, runs, workers and held blocks from a scheduler's steps.

One pass over `(now, event, actions)`, live or simulated, counts requests, runs, workers and held blocks into one tally
per function. It uses only the steps, so it can read any journal.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from overwinter.core import ids
from overwinter.core.actions import (
    Action,
    Bind,
    Evict,
    Explanation,
    LoadBlocks,
    LoadFinished,
    PrepareOnDevice,
    Refuse,
    Reply,
    Run,
    RunOnDevice,
    Start,
    StartExecutor,
    StartWorker,
    StopWorker,
    Unbind,
)
from overwinter.core.events import (
    Arrived,
    BindFailed,
    BlocksLoaded,
    Bound,
    Cancelled,
    Deployed,
    Event,
    LoadFailed,
    PreparedOnDevice,
    Profiled,
    Removed,
    RunEnded,
    TrafficSet,
    UnloadAsked,
    WorkerExited,
    WorkerReady,
)
from overwinter.core.function import FunctionSpec
from overwinter.core.ids import FunctionId, FunctionName, RequestId, RunId, Seconds, WorkerId
from overwinter.telemetry.hooks import Hooks
from overwinter.telemetry.in_progress import LiveWorker, OpenRequest, OpenRun
from overwinter.telemetry.loads import Loads
from overwinter.telemetry.pool import DeviceRun, TrackedPool
from overwinter.telemetry.tally import Tally
from overwinter.telemetry.versions import KnownVersions

T = TypeVar("T", bound=Tally)


class Tracker(Hooks[T]):
    """Reads steps one after another. Subclasses that need more than the tallies override the methods of Hooks."""

    def __init__(self, tally: Callable[[FunctionName], T]) -> None:
        self._new_tally = tally
        self.tallies: dict[FunctionName, T] = {}
        self.unknown = tally(FunctionName(""))
        """The tally of requests for unknown names. Callers can invent any number of names, so they share one tally."""
        self.calls = tally(FunctionName(""))
        """The tally of calls of programs on the pool by handlers. They are parts of other requests."""
        self.trial_tally = tally(FunctionName(""))
        """The tally of the time in which workers only tried a version. No function is charged for this time."""
        self.specs: dict[FunctionId, FunctionSpec] = {}
        self.workers: dict[WorkerId, LiveWorker[T]] = {}
        self.pool: TrackedPool[T] = TrackedPool()
        self._versions = KnownVersions()
        self._requests: dict[RequestId, OpenRequest[T]] = {}
        self._trials: set[FunctionId] = set()
        self._loads = Loads()
        self._held: set[FunctionId] = set()
        """The functions whose blocks the host store holds."""
        self._event_handlers: dict[type[Event], Callable[[Any, Seconds], None]] = {
            Arrived: self._arrived,
            RunEnded: self._run_ended,
            WorkerReady: self._ready,
            Bound: self._bound,
            BindFailed: self._bind_failed,
            WorkerExited: self._exited,
            BlocksLoaded: self._blocks_loaded,
            LoadFailed: self._load_failed,
            Cancelled: self._cancelled,
            Deployed: self._deployed,
            Removed: lambda event, now: self._forget(event.function, now),
            TrafficSet: self._traffic_set,
            UnloadAsked: self._unload_asked,
            Profiled: self._profiled,
            PreparedOnDevice: self.pool.end_preparation,
        }
        self._action_handlers: dict[type[Action], Callable[[Any, Seconds], None]] = {
            Reply: self._reply,
            Run: self._run,
            Refuse: self._refuse,
            StartWorker: self._start,
            StopWorker: self._stop,
            Bind: self._bind,
            Unbind: self._unbind,
            LoadBlocks: self._load_blocks,
            Evict: self._evict,
            StartExecutor: self.pool.start,
            PrepareOnDevice: self.pool.prepare,
            RunOnDevice: lambda action, now: self.pool.run(action, self.specs, self.tally_of, now),
            Explanation: self._explain,
            LoadFinished: self._load_finished,
        }

    @property
    def open_requests(self) -> int:
        """The requests that are not answered yet."""
        return len(self._requests)

    def observe(self, now: Seconds, event: Event, actions: Sequence[Action]) -> None:
        """Read one step. A live node calls this for every step."""
        handle = self._event_handlers.get(type(event))
        if handle is None:
            self._other_event(event, now)
        else:
            handle(event, now)
        for action in actions:
            count = self._action_handlers.get(type(action))
            if count is not None:
                count(action, now)

    def tally_of(self, spec: FunctionSpec) -> T:
        """Return the tally of the function to which this version, or this part of a version, belongs."""
        return self.tallies[ids.whole_name(spec.name)]

    # Requests and runs

    def _arrived(self, event: Arrived, now: Seconds) -> None:
        tally = self.calls if ids.is_part(event.name) else self.tallies.get(event.name, self.unknown)
        tally.requests += 1
        self._requests[event.request] = OpenRequest(tally, now, event.caller)

    def _cancelled(self, event: Cancelled, now: Seconds) -> None:
        request = self._requests.pop(event.request, None)
        if request is not None:
            request.tally.cancelled += 1

    def _refuse(self, action: Refuse, now: Seconds) -> None:
        tally = self._requests.pop(action.request).tally
        tally.refused[action.error] += 1
        tally.slo_requests += tally.slo_s is not None
        self._refused(tally, action, now)

    def _reply(self, action: Reply, now: Seconds) -> None:
        request = self._requests.pop(action.request)
        tally, seconds = request.tally, now - request.arrived
        tally.answered += 1
        tally.answered_by_start[action.start] += 1
        if tally.slo_s is not None:
            tally.slo_requests += 1
            tally.in_slo += seconds <= tally.slo_s
        self._answered(tally, action, seconds, now)

    def _run(self, action: Run, now: Seconds) -> None:
        worker = self.workers.get(action.worker)
        if worker is None:
            return
        if not (worker.runs or worker.binds):
            worker.busy_since = now
        batch, function = len(action.requests), action.function or worker.function
        if action.functions:
            requests = dict(Counter(map(worker.bound.__getitem__, action.functions)))
        else:
            requests = {worker.bound[function] if action.function else worker.tally: batch}
        if worker.trial_tally is not None:
            worker.serve(requests, now)
        run = worker.runs[action.run] = OpenRun(now, function, requests, batch)
        self._run_started(worker, run, action, now)

    def _run_ended(self, event: RunEnded, now: Seconds) -> None:
        worker = self.workers.get(event.worker)
        if worker is None:
            self._end_run_on_device(event.worker, event, now)
        elif event.run in worker.runs:
            self._end_run(worker, event.run, event, now)

    def _end_run(self, worker: LiveWorker[T], id_: RunId, event: RunEnded | None, now: Seconds) -> None:
        run = worker.runs.pop(id_)
        core_s = (now - run.begun) * worker.run_cores
        # Of concurrent runs, the last one to end is also charged for the time in which the others ran.
        busy_s = 0.0 if worker.runs or worker.binds else now - worker.busy_since
        worker.busy_s += busy_s
        for tally, count in run.requests.items():
            share = count / run.batch
            tally.busy_s += busy_s * share
            tally.core_s += core_s * share
        self._run_completed(worker, run, event, now)

    # Workers

    def _start(self, action: StartWorker, now: Seconds) -> None:
        spec = self.specs[action.function]
        tally = self.tally_of(spec)
        arrivals = (each.arrived for each in self._requests.values() if tally in (each.tally, each.asked))
        load_began = self._loads.take_from_disk(action.function, arrivals, now)
        start: Start = "host" if load_began is None else "disk"
        trial_tally = self.trial_tally if action.function in self._trials else None
        worker = LiveWorker(tally, action, start, now if load_began is None else load_began, now, trial_tally)
        self.workers[action.worker] = worker
        tally.wakes[start] += 1
        tally.workers += 1
        self._worker_started(worker, now)

    def _stop(self, action: StopWorker, now: Seconds) -> None:
        worker = self.workers.get(action.worker)
        if worker is not None:
            worker.stopping = True
        elif action.worker in self.pool.executors:
            self._end_run_on_device(action.worker, None, now)
            self.pool.stop(action, now)

    def _ready(self, event: WorkerReady, now: Seconds) -> None:
        worker = self.workers.get(event.worker)
        if worker is None:
            return
        seconds = now - worker.wake_began
        worker.tally.woken[worker.start] += 1
        worker.tally.wake_s[worker.start] += seconds
        self._worker_ready(worker, seconds, now)

    def _exited(self, event: WorkerExited, now: Seconds) -> None:
        worker = self.workers.get(event.worker)
        if worker is None:
            run_on_device = self._end_run_on_device(event.worker, None, now)
            self.pool.exit(event.worker, now)
            if run_on_device is not None and event.lost_blocks:
                self._lose((part.spec.id for part in run_on_device.parts), now)
            return
        for run in list(worker.runs):
            self._end_run(worker, run, None, now)
        for function in list(worker.binds):
            worker.end_bind(function, now)
        if not worker.stopping:
            worker.tally.crashes += 1
        if event.lost_blocks:
            self._lose(worker.bound, now)
        del self.workers[event.worker]
        self.set_memory(worker, 0.0, now)
        worker.charge_all(now)
        worker.tally.workers -= 1
        self._worker_ended(worker, now)

    def set_memory(self, worker: LiveWorker[T], nbytes: float, now: Seconds) -> None:
        """Set the private memory of the worker."""
        worker.set_memory(nbytes, now)

    def _bind(self, action: Bind, now: Seconds) -> None:
        if action.worker in self.workers:
            tally = self.tally_of(self.specs[action.function])
            self.workers[action.worker].begin_bind(action.function, tally, now)

    def _bound(self, event: Bound, now: Seconds) -> None:
        if event.worker in self.workers:
            self.workers[event.worker].end_bind(event.function, now)

    def _bind_failed(self, event: BindFailed, now: Seconds) -> None:
        if event.lost_blocks:
            self._lose((event.function,), now)
        worker = self.workers.get(event.worker)
        if worker is not None and event.function in worker.binds:
            worker.end_bind(event.function, now)
            worker.unbind(event.function, now)

    def _unbind(self, action: Unbind, now: Seconds) -> None:
        if action.worker in self.workers:
            self.workers[action.worker].unbind(action.function, now)
        else:
            self.pool.unbind(action, now)

    # Devices

    def _end_run_on_device(self, executor: WorkerId, event: RunEnded | None, now: Seconds) -> DeviceRun[T] | None:
        run = self.pool.end_run(executor, event, now)
        if run is not None:
            self._run_on_device_completed(run, now)
        return run

    # Blocks

    def _load_blocks(self, action: LoadBlocks, now: Seconds) -> None:
        self._loads.begin(action.function, action.operation, now)

    def _load_failed(self, event: LoadFailed, now: Seconds) -> None:
        if self._loads.is_answered_by(event):
            self._release(event.function, now)

    def _unload_asked(self, event: UnloadAsked, now: Seconds) -> None:
        if event.function not in self._trials:
            self._release(event.function, now)

    def _blocks_loaded(self, event: BlocksLoaded, now: Seconds) -> None:
        if not self._loads.is_answered_by(event):
            # The function was unloaded meanwhile; the scheduler drops its blocks in this step.
            return
        self._loads.end(event.function, event.added > 0, now)
        spec = self.specs[event.function]
        self.tally_of(spec).loaded_bytes += event.added
        self._hold(spec, now)

    def _hold(self, spec: FunctionSpec, now: Seconds) -> None:
        self._held.add(spec.id)
        if spec.on_pool:
            self.pool.held(spec.id, self.tally_of(spec), now)
        self._blocks_held(spec, now)

    def _evict(self, action: Evict, now: Seconds) -> None:
        spec = self.specs.get(action.function)
        if spec is not None:
            tally = self.tally_of(spec)
            tally.evictions += 1
            self._release(action.function, now)
            self._decision_made(tally, "evict", action.why, now)

    def _release(self, function: FunctionId, now: Seconds) -> None:
        """The blocks of the function are no longer held, or their load was abandoned."""
        self._loads.forget(function)
        if function in self._held:
            self._held.remove(function)
            self.pool.released(function, now)
            self._blocks_released(self.specs[function], now)

    def _lose(self, functions: Iterable[FunctionId], now: Seconds) -> None:
        """Blocks were missing or damaged. A load of them that began after an earlier loss continues."""
        for function in filter(self._held.__contains__, functions):
            self._release(function, now)

    # Functions

    def _deployed(self, event: Deployed, now: Seconds) -> None:
        spec, name = event.function, ids.whole_name(event.function.name)
        self.specs[spec.id] = spec
        if name not in self.tallies:
            tally = self._new_tally(name)
            tally.tenant = spec.tenant
            # Other threads read the tallies, so complete the tally before publishing it.
            self.tallies[name] = tally
        self._versions.add(spec, proven=not event.on_trial)
        if event.on_trial:
            self._trials.add(spec.id)
        self._update_default(name)
        self._version_deployed(spec, now)
        if event.resident:
            self._hold(spec, now)

    def _update_default(self, name: FunctionName) -> None:
        """Take id, tenant and SLO from the default version of the name."""
        spec = self._versions.default(name)
        if spec is not None:
            tally = self.tallies[name]
            tally.default, tally.tenant = spec.id, spec.tenant
            tally.slo_s = None if spec.settings.slo_ms is None else spec.settings.slo_ms / 1000

    def _traffic_set(self, event: TrafficSet, now: Seconds) -> None:
        self._versions.split(event.name, event.shares)
        self._update_default(event.name)

    def _load_finished(self, action: LoadFinished, now: Seconds) -> None:
        if action.function not in self._trials:
            return
        if action.error is None:
            spec = self.specs[action.function]
            self._trials.remove(action.function)
            self._versions.prove(spec)
            self._update_default(ids.whole_name(spec.name))
        else:
            self._forget(action.function, now)

    def _forget(self, function: FunctionId, now: Seconds) -> None:
        if function not in self.specs:
            return
        self._release(function, now)
        self._trials.discard(function)
        spec = self.specs.pop(function)
        self._versions.discard(spec)
        self._version_removed(spec, now)
        name = ids.whole_name(spec.name)
        if self._versions.has(name):
            self._update_default(name)
        else:
            # Another thread may read the usage now: it must find the tally in `tallies` or where the call puts it.
            self._function_removed(self.tallies[name])
            del self.tallies[name]

    def _explain(self, action: Explanation, now: Seconds) -> None:
        spec = self.specs.get(action.function)
        if spec is not None:
            self._decision_made(self.tally_of(spec), action.what, ids.whole_names(action.why), now)
            if action.what == "quarantine":
                # The scheduler releases its blocks in this step, without an Evict.
                self._release(action.function, now)

"""Carries out the actions for the workers of a simulated node: they are forked, bind, run, and end."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from overwinter.core.actions import Bind, Prepare, Run, StartWorker
from overwinter.core.events import (
    BindFailed,
    Bound,
    Event,
    MemoryMeasured,
    RunEnded,
    WorkerExited,
    WorkerReady,
)
from overwinter.core.ids import Address, FunctionId, TenantId, WorkerId
from overwinter.simulation.copies import SimulatedFunction
from overwinter.simulation.durations import Durations
from overwinter.simulation.faults import FaultModel
from overwinter.simulation.handlers import Handlers
from overwinter.simulation.machine import Cores, HostBlocks, Job, SerialResource, SimulatedWorker
from overwinter.simulation.models import MIB
from overwinter.simulation.scenario import Machine
from overwinter.simulation.timeline import Callback, Timeline


class SharedParts(NamedTuple):
    """What the processes of a simulated node share. `handle` gets their events."""

    machine: Machine
    timeline: Timeline
    host: HostBlocks
    zygote: SerialResource
    faults: FaultModel
    handle: Callable[[Event], None]


class Workers:
    """The workers of all functions. `shares`: whether they share weights; `ids` numbers requests."""

    def __init__(
        self,
        functions: Mapping[FunctionId, SimulatedFunction],
        durations: Durations,
        shared_parts: SharedParts,
        shares: bool,
        ids: Iterator[int],
    ) -> None:
        self._by_id = functions
        self._durations = durations
        self._machine, self._timeline, self._host, self._zygote, self._faults, self._handle = shared_parts
        self._shares = shares
        self._cores = Cores(self._machine.cores, self._timeline)
        self._prepared: set[tuple[TenantId, Address]] = set()
        self._workers: dict[WorkerId, SimulatedWorker] = {}
        self.handlers = Handlers(functions, ids, self._timeline, self._handle, self._work, durations.separate_run_s)

    def start(self, action: StartWorker) -> None:
        """Fork a worker, or use the process that was forked ahead."""
        function = self._by_id[action.function]
        process = self._workers[action.worker] = SimulatedWorker(action, function)
        ahead = None if action.ahead is None else self._workers.pop(action.ahead, None)
        if not self._host.holds(function.spec, self._timeline.now):
            self.exit(process.worker, "StoreError", "a block is not in the host store", lost_blocks=True)
            return
        self._await_death(process)
        if ahead is not None:
            self._load(process, self._machine.contain_s)
            return
        forked = self._zygote.take(self._timeline.now, self._machine.fork_s)
        self._timeline.at(forked, partial(self._load, process))

    def fork_ahead(self, worker: WorkerId, id_: FunctionId) -> None:
        """Start a process ahead that waits until a start uses it."""
        process = self._workers[worker] = SimulatedWorker(StartWorker(worker, id_), self._by_id[id_])
        self._await_death(process)
        forked = self._zygote.take(self._timeline.now, self._machine.fork_s)
        seconds, crash = self._machine.contain_s * self._faults.slowness(), self._faults.start_crash()
        self._timeline.at(forked, partial(self._contain, process, seconds, crash))

    def prepare(self, action: Prepare) -> None:
        """The zygote compiles a program, so that later starts need not."""
        spec = self._by_id[action.function].spec
        self._prepared -= {(spec.tenant, action.forget)}
        self._prepared.add((spec.tenant, spec.program))

    def zygote_died(self) -> None:
        """All workers die with their zygote, and what it has compiled is lost."""
        self._prepared.clear()
        for worker in list(self._workers):
            self.exit(worker, "WorkerError", "its zygote died")

    def bind(self, action: Bind) -> None:
        """Bind another function of the family in a worker."""
        process, function = self._workers.get(action.worker), self._by_id[action.function]
        if process is None:
            # Its exit is about to reach the scheduler.
            return
        worker, id_, operation = action.worker, action.function, action.operation
        if not self._host.holds(function.spec, self._timeline.now):
            message = "a block is not in the host store"
            failed = BindFailed(worker, id_, operation, "StoreError", message, lost_blocks=True)
            self._timeline.after(0.0, partial(self._handle, failed))
            return
        seconds = function.model.bind_s * self._faults.slowness()
        bound = Bound(worker, id_, operation)
        self._work(process, 1, seconds, self._faults.start_crash(), partial(self._handle, bound))

    def run(self, action: Run) -> None:
        """Run a batch of requests."""
        process = self._workers.get(action.worker)
        if process is None:
            # Its exit is about to reach the scheduler.
            return
        if process.function.model.handler is not None:
            self.handlers.run(process, action, self._durations.variation(process.function), self._faults.run_crash())
            return
        seconds = self._durations.run_s(process, len(action.requests), action.functions)
        ended = RunEnded(process.worker, action.run)
        self._work(process, process.run_cores, seconds, self._faults.run_crash(), partial(self._handle, ended))

    def exit(self, worker: WorkerId, error: str, reason: str, seconds: float = 0.0, lost_blocks: bool = False) -> None:
        """End a worker's process, and tell the scheduler after some seconds; a process ends only once."""
        process = self._workers.pop(worker, None)
        if process is None:
            return
        self._timeline.after(seconds, partial(self._handle, WorkerExited(worker, error, reason, lost_blocks)))
        for job in process.jobs:
            self._cores.cancel(job)
        self.handlers.exited(worker, seconds)

    def _await_death(self, process: SimulatedWorker) -> None:
        life = self._faults.worker_life_s()
        if life is not None:
            self._timeline.after(life, partial(self.exit, process.worker, "WorkerError", "killed by a fault"))

    def _contain(self, process: SimulatedWorker, seconds: float, crash: float | None) -> None:
        if process.worker in self._workers:
            self._work(process, 1, seconds, crash, partial(self._handle, WorkerReady(process.worker)))

    def _load(self, process: SimulatedWorker, done_s: float = 0.0) -> None:
        if process.worker not in self._workers:
            return
        model, spec = process.function.model, process.function.spec
        seconds = model.start_s + (0.0 if (spec.tenant, spec.program) in self._prepared else model.prepare_s)
        if not self._shares and spec.profile is not None:
            seconds += spec.profile.weight_bytes / (self._machine.load_mib_per_s * MIB)
        seconds = max(0.0, seconds - done_s) * self._faults.slowness()
        self._work(process, 1, seconds, self._faults.start_crash(), partial(self._ready, process))

    def _ready(self, process: SimulatedWorker) -> None:
        self._handle(WorkerReady(process.worker))
        if process.function.spec.profile is None:
            # As on a node, memory that is in no profile is measured.
            self._handle(MemoryMeasured(((process.worker, int(process.function.model.worker_mib * MIB)),)))

    def _work(self, process: SimulatedWorker, cores: int, seconds: float, crash: float | None, then: Callback) -> None:
        """Keep cores busy; `then` follows, or the worker's death after the share `crash` of the time."""
        if crash is not None:
            seconds *= crash
            then = partial(self.exit, process.worker, "WorkerError", "crashed by a fault")
        self._cores.submit(Job(cores, seconds, process.jobs, then))

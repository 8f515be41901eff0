"""A small world for the scheduler: it records actions and lets a test choose the next event."""

import msgspec

from overwinter.core.actions import (
    Bind,
    Drop,
    Evict,
    Explanation,
    ForkAhead,
    LoadBlocks,
    LoadFinished,
    Prepare,
    PrepareOnDevice,
    Refuse,
    Reply,
    Run,
    RunOnDevice,
    SetAlarm,
    StartExecutor,
    StartWorker,
    StopWorker,
    Unbind,
)
from overwinter.core.config import SchedulerConfig
from overwinter.core.events import (
    Alarm,
    Arrived,
    BindFailed,
    BlocksLoaded,
    Bound,
    Cancelled,
    Deployed,
    LoadAsked,
    LoadFailed,
    MemoryPressure,
    RateForecast,
    Removed,
    RunEnded,
    RunFailure,
    WorkerExited,
    WorkerReady,
)
from overwinter.core.function import BlobSize, FunctionSpec, Settings
from overwinter.core.ids import function_id, is_part, program_id, program_name, slice_name, whole_id
from overwinter.scheduler.invariants import check
from overwinter.scheduler.scheduler import Scheduler
from tests.scheduler.devices import Devices
from tests.scheduler.transitions import check_steps, lifecycle_states


def spec(
    name="f",
    version=1,
    blobs=(("a", 10), ("b", 20)),
    has_handler=False,
    profile=None,
    tenant="t",
    family="",
    **settings,
) -> FunctionSpec:
    settings.setdefault("max_workers", 1)
    return FunctionSpec(
        id=function_id(name, version),
        name=name,
        version=version,
        tenant=tenant,
        profile=profile,
        settings=Settings(**settings),
        program=f"program-of-{family or name}",
        family=family,
        has_handler=has_handler,
        blobs=tuple(BlobSize(address, nbytes) for address, nbytes in blobs),
    )


def slices(function: FunctionSpec) -> list[FunctionSpec]:
    """Return a function cut into one slice for each of its blocks, the last slice first."""
    found: list[FunctionSpec] = []
    for number in range(len(function.blobs), 0, -1):
        following, blobs = found[-1].id if found else None, function.blobs[number - 1 : number]
        name = function.name if number == 1 else slice_name(function.name, number)
        id_ = function_id(name, function.version)
        own = {"id": id_, "name": name, "blobs": blobs, "following": following, "profile": None}
        found.append(msgspec.structs.replace(function, **own))
    return found


class World:
    """Feeds a scheduler and records its actions."""

    def __init__(self, **config) -> None:
        self.scheduler = Scheduler(SchedulerConfig(**config))
        self.state = self.scheduler.state
        self.resources = self.scheduler.cycle.resources
        self.now = 0.0
        self.alarm: float | None = None
        self.loads: list[LoadBlocks] = []
        self.blobs: dict[str, tuple[str, ...]] = {}
        """The blocks of every function that ever existed."""
        self.stores: dict[str, str] = {}
        self.families: dict[str, tuple[str, str]] = {}
        self.deployed: dict[str, FunctionSpec] = {}
        """The existing functions, on trial or not."""
        self.on_trial: set[str] = set()
        self.loading: set[str] = set()
        """The functions whose trial or load is in progress."""
        self.open: dict[int, float] = {}
        """The deadline of each request without an answer."""
        self.resident: set[tuple[str, str]] = set()
        """Store and address of every block that was loaded and not dropped."""
        self.starting: dict[int, str] = {}
        self.alive: set[int] = set()
        self.stopping: set[int] = set()
        self.ahead: dict[int, str] = {}
        """Processes forked ahead that no start has taken over, each with a function of its tenant."""
        self.running: dict[int, Run] = {}
        self.devices = Devices(self.scheduler.cycle.config.devices)
        self.binding: list[Bind] = []
        """The binds in progress."""
        self.bound: dict[int, set[str]] = {}
        """The functions bound in each process."""
        self.forked_for: dict[int, str] = {}
        self.answers: dict[int, Reply | Refuse] = {}
        self.log: list = []
        self.next_request = 0

    def send(self, event) -> list:
        before = lifecycle_states(self.state, self.now)
        actions = self.scheduler.handle(event, self.now)
        check(self.scheduler.cycle)
        if not isinstance(event, Deployed):
            check_steps(before, lifecycle_states(self.state, self.now), event)
        self.take_note(event)
        for action in actions:
            self.carry_out(action)
        self.log += actions
        return actions

    def take_note(self, event) -> None:
        match event:
            case Deployed(function, on_trial):
                self.deployed[function.id] = function
                if on_trial:
                    self.on_trial.add(function.id)
                    self.loading.add(function.id)
            case LoadAsked(function):
                self.loading.add(function)
            case Removed(function):
                self.deployed.pop(function, None)
                self.on_trial.discard(function)
            case Cancelled(request):
                self.open.pop(request, None)

    def carry_out(self, action) -> None:  # noqa: C901, PLR0912, PLR0915
        match action:
            case LoadBlocks():
                self.loads.append(action)
            case ForkAhead(worker, function):
                assert worker not in self.alive
                self.starting[worker] = self.ahead[worker] = function
                self.alive.add(worker)
            case StartWorker(worker, function):
                if action.ahead is not None:
                    self.take_over(action)
                self.starting[worker] = function
                self.alive.add(worker)
                self.bound[worker], self.forked_for[worker] = {function}, function
            case Bind(worker, function):
                assert worker in self.alive - set(self.starting), f"worker {worker} is not there to bind {function}"
                assert function not in self.bound[worker] | {bind.function for bind in self.binds_in(worker)}
                assert self.family_of(function) == self.family_of(self.forked_for[worker]), "of another family"
                self.binding.append(action)
            case Unbind(worker, function) if worker in self.devices.executors:
                self.devices.unbind(action)
            case StartExecutor(executor):
                self.devices.start(action)
                self.starting[executor] = action.device
            case RunOnDevice():
                assert action.executor not in self.starting.keys() | self.stopping, "its executor cannot run"
                whose = dict.fromkeys(action.functions or (action.function,))
                self.devices.run(action, [self.deployed[id_] for id_ in whose])
            case PrepareOnDevice(executor, _, function):
                assert executor not in self.starting.keys() | self.stopping, "its executor cannot prepare"
                self.devices.prepare(action, self.deployed[function])
            case Unbind(worker, function):
                assert all(function not in self.whose(run) for run in self.running.values() if run.worker == worker)
                self.bound[worker].remove(function)
            case Run(worker, run):
                assert worker in self.alive
                assert run not in self.running
                assert self.whose(action) <= self.bound[worker], f"{self.whose(action)} is not bound in {worker}"
                self.running[run] = action
            case StopWorker(worker):
                self.stopping.add(worker)
            case Reply(request) | Refuse(request):
                assert request not in self.answers, f"request {request} was answered twice"
                self.answers[request] = action
                self.open.pop(request, None)
            case SetAlarm():
                self.alarm = action.at
            case Drop(addresses, store):
                self.resident -= {(store, address) for address in addresses}
            case LoadFinished():
                self.end_load(action)
            case Prepare() | Evict() | Explanation():
                pass

    def take_over(self, action: StartWorker) -> None:
        """From now on a worker is the process that was forked ahead."""
        assert action.ahead in self.alive - set(self.starting) - self.stopping, "it cannot be taken over"
        self.alive.remove(action.ahead)
        of = self.ahead.pop(action.ahead)
        assert self.families[of][0] == self.families[action.function][0], "it is another tenant's"

    def binds_in(self, worker) -> list[Bind]:
        return [bind for bind in self.binding if bind.worker == worker]

    def whose(self, run: Run) -> set[str]:
        return set(run.functions) or {run.function or self.forked_for[run.worker]}

    def family_of(self, function) -> tuple[str, str]:
        return self.families[function]

    def end_load(self, finished: LoadFinished) -> None:
        self.loading.discard(finished.function)
        if finished.error is not None and finished.function in self.state.functions:
            # It was deployed again before the end of its trial, and the new trial continues.
            return
        if finished.function in self.on_trial and finished.error is not None:
            self.deployed.pop(finished.function, None)
        self.on_trial.discard(finished.function)

    # Events that may happen next

    def deploy(self, function: FunctionSpec, on_trial=False, quarantined="", cut=False) -> list:
        """Deploy a function, and with device "any" also its program as another, as a node does; `cut`: in slices."""
        program = program_id(function.id)
        if self.devices.configs and function.settings.device == "any" and not is_part(function.name):
            named = {"id": program, "name": program_name(function.name)}
            profile = None if function.has_handler else function.profile
            other = msgspec.structs.replace(function, **named, has_handler=False, profile=profile)
            for each in slices(other) if cut else [other]:
                self.deploy(each, on_trial)
        elif cut:
            for each in slices(function)[:-1]:
                self.deploy(each, on_trial)
            function = slices(function)[-1]
        elif program in self.deployed and function.settings.device != "pool":
            self.send(Removed(program))
        self.blobs[function.id] = tuple(blob.address for blob in function.blobs)
        self.stores[function.id] = function.store
        self.families[function.id] = function.tenant, function.family or function.id
        places = {(function.store, address) for address in self.blobs[function.id]}
        resident = not on_trial and places <= self.resident
        return self.send(Deployed(function, on_trial, resident, quarantined))

    def manage(self, event) -> None:
        """Load, unload or remove a function, and the parts of it that run on devices."""
        self.send(event)
        for part in [each for each in self.deployed if each != event.function and whole_id(each) == event.function]:
            self.send(type(event)(part))

    def arrive(self, name="f", version=None, deadline=None, priority=0, due=None, caller=None) -> int:
        self.next_request += 1
        timeout_s = max((f.settings.timeout_s for f in self.deployed.values() if f.name == name), default=0.0)
        limit = self.now + timeout_s
        self.open[self.next_request] = limit if deadline is None else min(limit, deadline)
        self.send(Arrived(self.next_request, name, version, deadline, priority, due, caller))
        return self.next_request

    def load_blocks(self, added=30, at=0) -> list:
        load = self.loads.pop(at)
        store, addresses = self.stores[load.function], self.blobs[load.function]
        self.resident |= {(store, address) for address in addresses}
        return self.send(BlocksLoaded(load.function, load.operation, added, addresses, store))

    def fail_load(self, error="NoSpaceError", came=(), at=0) -> list:
        """Let the oldest load fail, although the blocks `came` were loaded."""
        load = self.loads.pop(at)
        store = self.stores[load.function]
        self.resident |= {(store, address) for address in came}
        return self.send(LoadFailed(load.function, load.operation, error, "full", tuple(came), store))

    def ready(self) -> list:
        worker = next(iter(self.starting))
        del self.starting[worker]
        return self.send(WorkerReady(worker))

    def bind(self, at=0) -> list:
        """Let the oldest bind succeed."""
        bind = self.binding.pop(at)
        self.bound[bind.worker].add(bind.function)
        return self.send(Bound(bind.worker, bind.function, bind.operation))

    def fail_bind(self, at=0, lost_blocks=False) -> list:
        bind = self.binding.pop(at)
        return self.send(BindFailed(bind.worker, bind.function, bind.operation, "HandlerError", "bad", lost_blocks))

    def finish(self, failures=()) -> list:
        return self.finish_run(next(iter(self.running.values())), failures)

    def finish_run(self, run: Run, failures=(), program_s=0.0) -> list:
        del self.running[run.run]
        failed = tuple(RunFailure(r, "HandlerError", "bad") for r in failures)
        return self.send(RunEnded(run.worker, run.run, failed, program_s=program_s))

    def finish_on_device(self, failures=(), unplaced=False, fault="") -> list:
        """Let the oldest run on a device end."""
        run = next(iter(self.devices.running.values()))
        failed = tuple(RunFailure(request, "ProgramError", "bad") for request in failures)
        return self.send(self.devices.end(run, failed, unplaced, fault))

    def end_preparation(self, interrupted=False) -> list:
        return self.send(self.devices.end_preparation(interrupted))

    def die(self, worker=None, reason="signal 9", lost_blocks=False) -> list:
        worker = min(self.alive) if worker is None else worker
        self.alive.discard(worker)
        self.devices.exit(worker)
        self.ahead.pop(worker, None)
        self.stopping.discard(worker)
        self.starting.pop(worker, None)
        self.binding = [bind for bind in self.binding if bind.worker != worker]
        self.running = {run: action for run, action in self.running.items() if action.worker != worker}
        return self.send(WorkerExited(worker, "WorkerError", reason, lost_blocks))

    def ring(self) -> list:
        assert self.alarm is not None
        self.now, self.alarm = max(self.now, self.alarm), None
        actions = self.send(Alarm())
        late = [id_ for id_, deadline in self.open.items() if deadline <= self.now]
        assert not late, f"requests {late} are past their deadline"
        return actions

    def settle(self) -> None:
        """Let everything in progress succeed."""
        self.settle_processes()
        while self.running or self.devices.running:
            if self.running:
                self.finish()
            else:
                self.finish_on_device()
            self.settle_processes()

    def calm(self) -> None:
        """Let everything succeed until nothing more happens."""
        for _ in range(10_000):
            self.settle()
            if self.alarm is None:
                return
            self.ring()
        raise AssertionError("its alarms never end")

    def end_well(self, names, soon_s) -> None:
        """From any state on, if everything succeeds, every request is answered, every function can be served, every
        worker becomes idle and can be evicted. No request expires whose deadline is further away than `soon_s`.
        """
        for function in list(self.deployed):
            self.send(RateForecast(function, 0.0))
        patient = {id_ for id_, deadline in self.open.items() if deadline > self.now + soon_s}
        patient |= {self.arrive(name) for name in names}
        self.calm()
        assert not self.open, "requests without an answer"
        assert not self.loading, "loads without an answer"
        assert all(worker.is_idle for worker in self.state.workers.values()), "workers that are not idle"
        assert all(device.operation is None for device in self.state.pool.devices.values()), "devices that are not idle"
        assert not self.devices.preparing, "a preparation that does not end"
        # Idle workers may stay forever, until their memory is needed.
        self.send(MemoryPressure(1 << 40))
        self.calm()
        assert not self.alive, "unneeded workers"
        assert not self.resources.memory.taken, "memory of workers that are gone"
        for id_ in patient:
            answer = self.answers[id_]
            assert isinstance(answer, Reply) or answer.error != "DeadlineError", f"request {id_} was forgotten"
        needed = {(f.store, blob.address) for f in self.deployed.values() for blob in f.blobs}
        assert self.resident <= needed, "blocks are kept that no function needs"

    def settle_processes(self) -> None:
        """As `settle`, but runs continue."""
        while self.loads or self.starting or self.stopping or self.binding or self.devices.preparing:
            if self.devices.preparing:
                self.end_preparation()
            elif self.stopping:
                self.die(min(self.stopping))
            elif self.binding:
                self.bind()
            elif self.loads:
                self.load_blocks()
            else:
                self.ready()

"""A small world for the mind: it keeps what was asked for and lets a test choose what happens next."""

from overwinter.core.actions import (
    Announce,
    Decide,
    Drop,
    Prepare,
    Refuse,
    Reply,
    Run,
    SetAlarm,
    Stage,
    StartBody,
    StopBody,
)
from overwinter.core.config import MindConfig
from overwinter.core.events import Alarm, Arrived, BodyExited, BodyReady, Deployed, RunEnded, RunFailure, Staged
from overwinter.core.function import BlobSize, FunctionSpec, Settings
from overwinter.core.ids import function_id
from overwinter.policy.integrity import check_integrity
from overwinter.policy.mind import Mind

COUNTING = ("Announce", "Prepare")


def spec(
    name="f", version=1, blobs=(("a", 10), ("b", 20)), sandboxed=False, profile=None, tenant="t", **settings
) -> FunctionSpec:
    settings.setdefault("max_bodies", 1)
    return FunctionSpec(
        id=function_id(name, version),
        name=name,
        version=version,
        tenant=tenant,
        profile=profile,
        settings=Settings(**settings),
        program=f"program-of-{name}",
        sandboxed=sandboxed,
        blobs=tuple(BlobSize(address, nbytes) for address, nbytes in blobs),
    )


class World:
    """Feeds a mind and remembers what it asked for."""

    def __init__(self, **config) -> None:
        self.mind = Mind(MindConfig(**config))
        self.now = 0.0
        self.alarm: float | None = None
        self.staging: list[str] = []
        self.blobs: dict[str, tuple[str, ...]] = {}
        self.resident: set[str] = set()
        self.starting: dict[int, str] = {}
        self.alive: set[int] = set()
        self.stopping: set[int] = set()
        self.running: dict[int, Run] = {}
        self.answers: dict[int, Reply | Refuse] = {}
        self.log: list = []
        self.next_request = 0

    def send(self, event) -> list:
        actions = self.mind.handle(event, self.now)
        check_integrity(self.mind.state)
        for action in actions:
            self.carry_out(action)
        self.log += actions
        return actions

    def carry_out(self, action) -> None:
        match action:
            case Stage(function):
                self.staging.append(function)
            case StartBody(worker, function):
                self.starting[worker] = function
                self.alive.add(worker)
            case Run(worker, run):
                assert worker in self.alive
                assert run not in self.running
                self.running[run] = action
            case StopBody(worker):
                self.stopping.add(worker)
            case Reply(request) | Refuse(request):
                assert request not in self.answers, f"request {request} was answered twice"
                self.answers[request] = action
            case SetAlarm(at):
                self.alarm = at
            case Drop(addresses):
                self.resident -= set(addresses)
            case Announce() | Prepare() | Decide():
                pass

    # What may happen next

    def deploy(self, function: FunctionSpec, on_trial=False) -> list:
        self.blobs[function.id] = tuple(blob.address for blob in function.blobs)
        resident = not on_trial and set(self.blobs[function.id]) <= self.resident
        return self.send(Deployed(function, on_trial, resident))

    def arrive(self, name="f", version=None, deadline=None, priority=0) -> int:
        self.next_request += 1
        self.send(Arrived(self.next_request, name, version, deadline, priority))
        return self.next_request

    def stage(self, added=30) -> list:
        function = self.staging.pop(0)
        self.resident |= set(self.blobs[function])
        return self.send(Staged(function, added, self.blobs[function]))

    def ready(self) -> list:
        worker = next(iter(self.starting))
        del self.starting[worker]
        return self.send(BodyReady(worker))

    def finish(self, failures=()) -> list:
        run = self.running.pop(next(iter(self.running)))
        return self.send(RunEnded(run.worker, run.run, tuple(RunFailure(r, "HandlerError", "bad") for r in failures)))

    def die(self, worker=None, reason="signal 9", lost_blocks=False) -> list:
        worker = min(self.alive) if worker is None else worker
        self.alive.discard(worker)
        self.stopping.discard(worker)
        self.starting.pop(worker, None)
        self.running = {run: action for run, action in self.running.items() if action.worker != worker}
        return self.send(BodyExited(worker, "WorkerError", reason, lost_blocks))

    def ring(self) -> list:
        assert self.alarm is not None
        self.now, self.alarm = max(self.now, self.alarm), None
        return self.send(Alarm())

    def settle(self) -> None:
        """Let everything that is under way go well."""
        self.settle_processes()
        while self.running:
            self.finish()
            self.settle_processes()

    def settle_processes(self) -> None:
        """As `settle`, but runs go on."""
        while self.staging or self.starting or self.stopping:
            if self.stopping:
                self.die(min(self.stopping))
            elif self.staging:
                self.stage()
            else:
                self.ready()

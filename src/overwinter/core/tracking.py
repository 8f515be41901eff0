"""What is under way after a mind's steps, and how did it end?

One pass over `(now, event, actions)`, live or simulated: requests, runs, bodies and who keeps blocks in a host store,
counted into one tally a function. Nothing but the steps is known, so any journal can be read.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from overwinter.core.actions import (
    Action,
    Announce,
    Bind,
    Decide,
    Refuse,
    Reply,
    Run,
    Stage,
    Start,
    StartBody,
    StopBody,
    Unbind,
)
from overwinter.core.events import (
    Arrived,
    BindFailed,
    BodyExited,
    BodyReady,
    Bound,
    Cancelled,
    Deployed,
    Event,
    Profiled,
    Removed,
    RunEnded,
    Staged,
    StageFailed,
    TrafficSet,
    UnloadAsked,
)
from overwinter.core.function import FunctionSpec
from overwinter.core.ids import FunctionId, FunctionName, OperationId, RequestId, RunId, Seconds, WorkerId
from overwinter.core.tally import Tally
from overwinter.core.told import Told
from overwinter.core.underway import LivingBody, OpenRequest, OpenRun
from overwinter.core.versions import Versions

T = TypeVar("T", bound=Tally)


class Tracker(Told[T]):
    """Reads steps one after another. Whoever needs more than the tallies overrides what it is told."""

    def __init__(self, tally: Callable[[FunctionName], T]) -> None:
        self._make = tally
        self.tallies: dict[FunctionName, T] = {}
        self.nobody = tally(FunctionName(""))
        """Of requests for names that are not deployed here: callers may invent as many as they like."""
        self.own = tally(FunctionName(""))
        """Of the node itself: what workers cost that tried a version and have served nobody since."""
        self.specs: dict[FunctionId, FunctionSpec] = {}
        self.bodies: dict[WorkerId, LivingBody[T]] = {}
        self._versions: dict[FunctionName, dict[int, FunctionSpec]] = {}
        self._proven: dict[FunctionName, Versions] = {}
        self._requests: dict[RequestId, OpenRequest[T]] = {}
        self._trials: set[FunctionId] = set()
        self._coming: dict[FunctionId, tuple[OperationId, Seconds]] = {}
        """Functions whose blocks are on their way, by which staging, and since when."""
        self._from_disk: dict[FunctionId, Seconds] = {}
        """Functions whose next body waited for the disk, and since when."""
        self._kept: set[FunctionId] = set()
        self._hears: dict[type[Event], Callable[[Any, Seconds], None]] = {
            Arrived: self._arrived,
            RunEnded: self._run_ended,
            BodyReady: self._ready,
            Bound: self._bound,
            BindFailed: self._bind_failed,
            BodyExited: self._exited,
            Staged: self._staged,
            StageFailed: self._stage_failed,
            Cancelled: self._cancelled,
            Deployed: self._deployed,
            Removed: self._removed,
            TrafficSet: self._traffic_set,
            UnloadAsked: self._unload_asked,
            Profiled: self._profiled,
        }
        self._sees: dict[type[Action], Callable[[Any, Seconds], None]] = {
            Reply: self._reply,
            Run: self._run,
            Refuse: self._refuse,
            StartBody: self._start,
            StopBody: self._stop,
            Bind: self._bind,
            Unbind: self._unbind,
            Stage: self._stage,
            Decide: self._decide,
            Announce: self._announce,
        }

    @property
    def open_requests(self) -> int:
        """Requests that came and have no answer yet."""
        return len(self._requests)

    def observe(self, now: Seconds, event: Event, actions: Sequence[Action]) -> None:
        """Take in one step. A live node calls it for every one: most find nobody who counts."""
        self._hears.get(type(event), self._heard)(event, now)
        for action in actions:
            count = self._sees.get(type(action))
            if count is not None:
                count(action, now)

    # Requests and runs

    def _arrived(self, event: Arrived, now: Seconds) -> None:
        tally = self.tallies.get(event.name, self.nobody)
        tally.requests += 1
        self._requests[event.request] = OpenRequest(tally, now)

    def _cancelled(self, event: Cancelled, now: Seconds) -> None:
        request = self._requests.pop(event.request, None)
        if request is not None:
            request.tally.cancelled += 1

    def _refuse(self, action: Refuse, now: Seconds) -> None:
        tally = self._requests.pop(action.request).tally
        tally.refused[action.error] += 1
        self._refused(tally, action, now)

    def _reply(self, action: Reply, now: Seconds) -> None:
        request = self._requests.pop(action.request)
        tally, seconds = request.tally, now - request.arrived
        tally.answered += 1
        tally.started[action.start] += 1
        if tally.slo_s is not None and seconds <= tally.slo_s:
            tally.within += 1
        self._answered(tally, action, seconds, now)

    def _run(self, action: Run, now: Seconds) -> None:
        body = self.bodies[action.worker]
        if not body.is_busy:
            body.busy_since = now
        if action.functions:
            requests = dict(Counter(body.bound[function] for function in action.functions))
        else:
            requests = {body.tally if action.function is None else body.bound[action.function]: len(action.requests)}
        body.serve(requests, now)
        body.runs[action.run] = OpenRun(now, requests)
        for id_ in action.requests:
            request = self._requests[id_]
            if request.ran:
                request.tally.retries += 1
                continue
            request.ran = True
            waited = now - request.arrived
            request.tally.wait_s += waited
            self._handed(request.tally, waited)

    def _run_ended(self, event: RunEnded, now: Seconds) -> None:
        body = self.bodies.get(event.worker)
        if body is not None and event.run in body.runs:
            self._end_run(body, event.run, now)

    def _end_run(self, body: LivingBody[T], run: RunId, now: Seconds) -> None:
        ended = body.runs.pop(run)
        seconds = now - ended.begun
        # Of runs at once the last pays for the time in which others ran, too.
        busy_s = 0.0 if body.is_busy else now - body.busy_since
        body.busy_s += busy_s
        core_s = seconds * body.run_cores
        for tally, count, share in ended.shares():
            tally.run_s += seconds
            tally.busy_s += busy_s * share
            tally.pay(count, core_s, share)
        self._ran(ended, seconds)

    # Bodies

    def _start(self, action: StartBody, now: Seconds) -> None:
        spec = self.specs[action.function]
        tally = self.tallies[spec.name]
        asked = self._from_disk.pop(action.function, None)
        start: Start = "host" if asked is None else "disk"
        trial = self.own if action.function in self._trials else None
        body = LivingBody(tally, action, start, now if asked is None else asked, now, trial)
        body.nbytes = self._body_bytes(spec, action)
        self.bodies[action.worker] = body
        tally.wakes[start] += 1
        tally.bodies += 1
        self._began(body, now)

    def _stop(self, action: StopBody, now: Seconds) -> None:
        body = self.bodies.get(action.worker)
        if body is not None:
            body.stopping = True

    def _ready(self, event: BodyReady, now: Seconds) -> None:
        body = self.bodies.get(event.worker)
        if body is None:
            return
        seconds = now - body.asked
        body.tally.woken[body.start] += 1
        body.tally.wake_s[body.start] += seconds
        self._woken(body, seconds)

    def _exited(self, event: BodyExited, now: Seconds) -> None:
        body = self.bodies.get(event.worker)
        if body is None:
            return
        for run in list(body.runs):
            self._end_run(body, run, now)
        for function in list(body.binds):
            body.end_bind(function, now)
        if not body.stopping:
            body.tally.crashes += 1
        if event.lost_blocks:
            for function in body.bound:
                self._let_go(function, now)
        del self.bodies[event.worker]
        self.weigh(body, 0.0, now)
        body.tally.bodies -= 1
        self._gone(body, now)

    def weigh(self, body: LivingBody[T], nbytes: float, now: Seconds) -> None:
        """From now on the body has so much private memory."""
        body.pay(now)
        body.nbytes = nbytes

    def _bind(self, action: Bind, now: Seconds) -> None:
        tally = self.tallies[self.specs[action.function].name]
        self.bodies[action.worker].begin_bind(action.function, tally, now)

    def _bound(self, event: Bound, now: Seconds) -> None:
        if event.worker in self.bodies:
            self.bodies[event.worker].end_bind(event.function, now)

    def _bind_failed(self, event: BindFailed, now: Seconds) -> None:
        if event.lost_blocks:
            self._let_go(event.function, now)
        body = self.bodies.get(event.worker)
        if body is not None and event.function in body.binds:
            body.end_bind(event.function, now)
            body.unbind(event.function, now)

    def _unbind(self, action: Unbind, now: Seconds) -> None:
        self.bodies[action.worker].unbind(action.function, now)

    # Blocks

    def _stage(self, action: Stage, now: Seconds) -> None:
        self._coming[action.function] = action.operation, now

    def _stage_failed(self, event: StageFailed, now: Seconds) -> None:
        if self._answers(event):
            self._let_go(event.function, now)

    def _unload_asked(self, event: UnloadAsked, now: Seconds) -> None:
        if event.function not in self._trials:
            self._let_go(event.function, now)

    def _staged(self, event: Staged, now: Seconds) -> None:
        if not self._answers(event):
            # Let go while it came: the mind drops it in this very step.
            return
        _, began = self._coming.pop(event.function)
        spec = self.specs[event.function]
        self.tallies[spec.name].staged_bytes += event.added
        if event.added:
            self._from_disk[event.function] = began
        self._keep(spec, now)

    def _answers(self, event: Staged | StageFailed) -> bool:
        """Whether it tells of the staging that is waited for, and not of one given up."""
        operation, _ = self._coming.get(event.function, (None, None))
        return operation == event.operation

    def _keep(self, spec: FunctionSpec, now: Seconds) -> None:
        self._kept.add(spec.id)
        self._keeps(spec, now)

    def _let_go(self, function: FunctionId, now: Seconds) -> None:
        """The function's blocks are held for it no more, or will not be."""
        self._coming.pop(function, None)
        self._from_disk.pop(function, None)
        if function in self._kept:
            self._kept.remove(function)
            self._releases(self.specs[function], now)

    # Functions

    def _deployed(self, event: Deployed, now: Seconds) -> None:
        spec = event.function
        self.specs[spec.id] = spec
        if spec.name not in self.tallies:
            tally = self._make(spec.name)
            tally.tenant = spec.tenant
            # Other threads look at the tallies: they find them whole.
            self.tallies[spec.name] = tally
            self._versions[spec.name], self._proven[spec.name] = {}, Versions()
        self._versions[spec.name][spec.version] = spec
        if event.on_trial:
            self._trials.add(spec.id)
        else:
            self._proven[spec.name].add(spec.version)
        self._appoint(spec.name)
        self._came(spec, now)
        if event.resident:
            self._keep(spec, now)

    def _appoint(self, name: FunctionName) -> None:
        """The version that stands for the name says who pays and what is promised."""
        tally, proven = self.tallies[name], self._proven[name]
        if proven.numbers:
            spec = self._versions[name][proven.default]
            tally.tenant = spec.tenant
            tally.slo_s = None if spec.settings.slo_ms is None else spec.settings.slo_ms / 1000

    def _traffic_set(self, event: TrafficSet, now: Seconds) -> None:
        if event.name in self._proven:
            self._proven[event.name].split(event.shares)
            self._appoint(event.name)

    def _announce(self, action: Announce, now: Seconds) -> None:
        if action.function not in self._trials:
            return
        if action.error is None:
            spec = self.specs[action.function]
            self._trials.remove(action.function)
            self._proven[spec.name].add(spec.version)
            self._appoint(spec.name)
        else:
            self._forget(action.function, now)

    def _removed(self, event: Removed, now: Seconds) -> None:
        self._forget(event.function, now)

    def _forget(self, function: FunctionId, now: Seconds) -> None:
        if function not in self.specs:
            return
        self._let_go(function, now)
        self._trials.discard(function)
        spec = self.specs.pop(function)
        versions = self._versions[spec.name]
        del versions[spec.version]
        self._proven[spec.name].discard(spec.version)
        self._left(spec, now)
        if versions:
            self._appoint(spec.name)
        else:
            del self._versions[spec.name], self._proven[spec.name]
            self._ended(self.tallies.pop(spec.name))

    def _decide(self, action: Decide, now: Seconds) -> None:
        spec = self.specs.get(action.function)
        if spec is None:
            return
        tally = self.tallies[spec.name]
        if action.what == "evict":
            tally.evictions += 1
            self._let_go(action.function, now)
        self._decided(tally, action, now)

"""The mind of a node: `handle(event, now) -> [Action]`, pure, the only writer of its state.

A request's way: Arrived puts it into its function's queue; `_serve` (serving.py) hands waiting requests to
a body with a slot or wakes the function (waking.py): Stage if the host store lacks blocks, then StartBody, in a shape
that a scaler chose (sizing.py). RunEnded answers. A body's death costs its requests one retry and the function a rest.
What each step decides lies in one file per question beside this one.
"""

from typing import assert_never

from overwinter.core.actions import Action, SetAlarm, StopBody
from overwinter.core.events import (
    Alarm,
    Arrived,
    BodyExited,
    BodyReady,
    Cancelled,
    Demoted,
    Deployed,
    Event,
    Foretold,
    LoadAsked,
    MemoryMeasured,
    Pressed,
    Profiled,
    Removed,
    RoomMeasured,
    RunEnded,
    Staged,
    StageFailed,
    UnloadAsked,
    ZygoteLost,
)
from overwinter.core.ids import FunctionId, Seconds, WorkerId
from overwinter.policy import memory, queueing, reclaiming, recovery, turns
from overwinter.policy.deploying import Deploying
from overwinter.policy.lifecycles import step_blocks, step_function
from overwinter.policy.state import Body, Function

_TAKES = (Arrived, BodyReady, RunEnded)
"""What never gives bytes of a host store back, and comes too often to look for them each time."""


class Mind(Deploying):
    """Decides for one node. Deterministic: the same events at the same times give the same actions."""

    def handle(self, event: Event, now: Seconds) -> list[Action]:
        """What should be done about `event`, in order."""
        self._actions, self.in_hand = [], None
        self._gave_bytes = not isinstance(event, _TAKES)
        self._step(event, now)
        self._fill_lines(now)
        # Again, if somebody in line was given up meanwhile, or a policy failed on somebody.
        while self.state.faults or (self._gave_bytes and self.state.wants_bytes):
            self._contain(now)
            self._fill_lines(now)
        alarm = self._alarms.due_change()
        if alarm is not None:
            self._actions.append(SetAlarm(alarm))
        return self._actions

    def _step(self, event: Event, now: Seconds) -> None:  # noqa: C901, PLR0912
        match event:
            case Arrived():
                self._arrived(event, now)
            case RunEnded():
                self._run_ended(event, now)
            case Alarm():
                self._alarm(now)
            case BodyReady(worker):
                self._body_ready(worker, now)
            case BodyExited():
                self._body_exited(event, now)
            case Cancelled(request):
                self._cancelled(request)
            case Staged():
                self._staged(event, now)
            case StageFailed():
                self._stage_failed(event, now)
            case Deployed():
                self._deployed(event, now)
            case Removed(function):
                self._removed(function, now)
            case LoadAsked(function):
                self._load(function, now)
            case UnloadAsked(function):
                self._unload(function, now)
            case ZygoteLost(tenant) if tenant is not None:
                self.state.prepared.pop(tenant, None)
            case ZygoteLost():
                self.state.prepared.clear()
            case Demoted(worker):
                self._demoted(worker, now)
            case Profiled():
                self._profiled(event)
            case Foretold(function, rate):
                if function in self.state.functions:
                    self.state.functions[function].foretold = rate
            case Pressed(nbytes):
                self._give_back(nbytes, now)
            case MemoryMeasured():
                self._memory_measured(event, now)
            case RoomMeasured(nbytes):
                self.state.host_limit = nbytes
            case _:
                assert_never(event)

    # Waking

    def _staged(self, event: Staged, now: Seconds) -> None:
        function = self.state.functions.get(event.function)
        if function is None or function.staging != event.operation:
            # It was removed or unloaded meanwhile, and its blocks came after they had been let go.
            self._drop_unshared(event.addresses, event.store)
            return
        function.blocks = step_blocks(function.blocks, "staged")
        function.turn_at, function.staging = now if function.bodies else None, None
        function.restage = False
        if event.added:
            for request in function.queue:
                self.state.requests[request].start = "disk"
        if function.queue or function.on_trial or function.announce:
            self._wake(function, now)
        elif function.state == "waking":
            function.state = step_function(function.state, "wait")

    def _stage_failed(self, event: StageFailed, now: Seconds) -> None:
        function = self.state.functions.get(event.function)
        if function is None or function.staging != event.operation:
            self._drop_unshared(event.addresses, event.store)
            return
        self._release(function)
        missing = self.state.residents(function).missing(function.sizes)
        winnable = missing <= reclaiming.winnable_bytes(self.state, function)
        again = event.error == "NoSpaceError" and not function.restage and winnable
        if again and self._reclaim(missing, function, now):
            # The tmpfs is fuller than the tables know: what was won may be enough.
            function.restage = True
            self._stage(function, now)
            return
        function.restage = False
        self._settle(function, "failed")
        self._refuse_queue(function, event.error, event.message, self.config.retry_after_min_s)
        self._failed(function, event.error, event.message, now)

    def _body_ready(self, worker: WorkerId, now: Seconds) -> None:
        body = self.state.bodies.get(worker)
        if body is None:
            return
        self._step_body(body, "ready", now)
        function = self.state.owner(body)
        if function is None or body.state == "stopping":
            return
        function.lost = False
        if function.state == "waking":
            function.state = step_function(function.state, "ready")
        if function.on_trial or function.announce:
            self._prove(function)
        # The core of its wake is its own still.
        self._serve(function, now, granted=body.point.run_cores == 1)
        self._keep(body, function, now)

    def _demoted(self, worker: WorkerId, now: Seconds) -> None:
        """What it runs may end, however long that takes; what waits is for others."""
        body = self.state.bodies.get(worker)
        if body is None or body.leaves:
            return
        self._retire(body, now)
        function = self.state.owner(body)
        if function is not None:
            self._serve(function, now)

    # Deaths

    def _body_exited(self, event: BodyExited, now: Seconds) -> None:
        body = self.state.bodies.get(event.worker)
        if body is None:
            return
        self.in_hand = body.function
        function = self.state.owner(body)
        self._forget_body(body)
        if function is None:
            for id_ in body.in_hand():
                if id_ in self.state.requests:
                    self._refuse(id_, "NotFoundError", f"function {body.function} was removed")
        else:
            function.bodies.remove(body.id)
            if event.lost_blocks and function.blocks == "present":
                self._release(function)
            turns.keep_line(self.state, function)
            spared = self._spare(function, event.lost_blocks, now)
            died = body.state != "stopping" and not spared
            if body.runs or not spared:
                self._retry(function, body, event)
            if function.state == "unloaded":
                self._refuse_unloaded(function)
            self._settle(function, "failed" if died else "sleep")
            if died:
                self._failed(function, event.error, event.reason, now)
            self._yield_bytes(function, now)
            if function.spec.id in self.state.functions:
                self._serve(function, now)
            self._watch_leave(function)

    def _retry(self, function: Function, body: Body, event: BodyExited) -> None:
        """Requests that a body died under, or never started for, get one more try or a clear error."""
        hopeless = body.state == "starting" and not self.state.is_ready(function)
        in_hand = body.in_hand()
        error, reason = ("NoSpaceError", body.stopped_for) if body.stopped_for else (event.error, event.reason)
        struck = in_hand or (tuple(function.queue) if hopeless else ())
        for id_ in struck:
            request = self.state.requests.get(id_)
            if request is not None:
                request.failures += 1
                if not recovery.may_retry(request, self.config):
                    self._refuse(id_, error, f"function {function.spec.id} failed twice: {reason}")
        open_ = tuple(id_ for id_ in struck if id_ in self.state.requests)
        if in_hand:
            queueing.put_back(function.queue, open_, self.state.requests)
        elif struck:
            function.queue.clear()
            function.queue.extend(open_)

    # Memory

    def _give_back(self, nbytes: int, now: Seconds) -> None:
        """The machine runs short: blocks that nothing holds go first, then the bodies idle longest."""
        before = self.state.host_bytes()
        if self._reclaim(nbytes, None, now):
            return
        won = before - self.state.host_bytes()
        for body in list(self.state.idle.values()):
            if won >= nbytes:
                return
            won += body.nbytes
            self._stop(body, now)
        while won < nbytes and (excessive := memory.next_to_stop(self.state.bodies.values())) is not None:
            if not memory.is_far_beyond(excessive):
                return
            won += excessive.nbytes
            self._outgrew(excessive, now)

    def _memory_measured(self, event: MemoryMeasured, now: Seconds) -> None:
        """Count what workers take, and stop some if all together may not have it."""
        for worker, taken in event.taken:
            if worker in self.state.bodies:
                self._weigh(self.state.bodies[worker], taken)
        limit, bodies = self.config.memory_bytes, self.state.bodies.values()
        if limit is None or self.state.body_bytes <= limit:
            return
        stopping = [body for body in bodies if body.state == "stopping"]
        # One that was asked to stop may go on to grow.
        self._actions += [StopBody(body.id, kill=True) for body in stopping if memory.is_far_beyond(body)]
        over = self.state.body_bytes - limit - sum(body.nbytes for body in stopping)
        while over > 0 and (excessive := memory.next_to_stop(bodies)) is not None:
            over -= excessive.nbytes
            self._outgrew(excessive, now)

    # Time

    def _alarm(self, now: Seconds) -> None:
        for key in self._alarms.pop_due(now):
            if isinstance(key, str):
                function = self.state.functions.get(FunctionId(key))
                if function is not None:
                    self._look_after_function(function, now)
            else:
                body = self.state.bodies.get(WorkerId(key))
                if body is not None:
                    self._look_after_body(body, now)

    def _look_after_function(self, function: Function, now: Seconds) -> None:
        """Refuse what is past its deadline; wake what has rested; look at the rate; let go what nobody uses."""
        self.in_hand = function.spec.id
        for request in self.state.open_requests(function):
            if request.deadline <= now:
                if request.id in function.queue:
                    function.queue.remove(request.id)
                self._expire(request.id, now)
        if function.state == "resting" and now >= function.rest_until:
            function.state = step_function(function.state, "rested")
            if function.announce:
                self._wake(function, now)
        if function.tick_at is not None and function.tick_at <= now:
            self._tick(function, now)
        leave_at = self._leave_at(function)
        if leave_at is not None and leave_at <= now:
            self._decide(function, "evict", f"nobody used it for {now - function.used:.0f} s")
            self._release(function)
        self._serve(function, now)
        self._watch(function, now)

    def _look_after_body(self, body: Body, now: Seconds) -> None:
        """Let an idle body sleep; kill one that hangs."""
        function = self.state.owner(body)
        if function is None:
            for id_ in body.in_hand():
                if id_ in self.state.requests and self.state.requests[id_].deadline <= now:
                    self._expire(id_, now)
            self._watch_orphan(body)
        if body.state == "idle":
            at = now if function is None else self._sleep_at(body, function, now)
            if now >= at:
                if not self._is_counted(function, body):
                    self._stop(body, now)
                    return
                at = Seconds(now + self.policy.period_s)
        else:
            at = self._must_change_at(body)
        if now < at:
            self._alarms.watch(body.id, at)
        elif body.state == "stopping":
            self._actions.append(StopBody(body.id, kill=True))
        elif body.until is not None and body.until <= now:
            self._overran(body, function, now)
        else:
            self._hung(body, function, now)

    def _must_change_at(self, body: Body) -> Seconds:
        """When a body that starts, runs or stops hangs, or may go on no longer."""
        if body.state == "busy":
            hangs = Seconds(next(iter(body.begun.values())) + body.timeout_s)
            return hangs if body.until is None else min(hangs, body.until)
        limit_s = self.config.stop_timeout_s if body.state == "stopping" else self.config.start_timeout_s
        return Seconds(body.since + limit_s)

    def _is_counted(self, function: Function | None, body: Body) -> bool:
        """Whether the body is one of several whose number follows the rate: keep-alive ends the last one alone. One
        for which requests wait stays too.
        """
        if function is not None and function.queue:
            return True
        if function is None or function.tick_at is None or not function.speeds.points:
            return False
        return any(other != body.id and self.state.bodies[other].has_slot for other in function.bodies)

    def _hung(self, body: Body, function: Function | None, now: Seconds) -> None:
        # The runs beside the one that hangs get their retry when the body is gone.
        for run in [run for run, begun in body.begun.items() if now >= begun + body.timeout_s]:
            for id_ in self._end_run(body, run):
                if id_ in self.state.requests:
                    self._refuse(id_, "DeadlineError", f"function {body.function} hung and was stopped")
        self._stop(body, now, kill=True)
        if function is not None:
            self._failed(function, "WorkerError", f"a body of {body.function} hung and was stopped", now)

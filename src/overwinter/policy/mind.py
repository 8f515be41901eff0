"""The mind of a node: `handle(event, now) -> [Action]`, pure, the only writer of its state.

A request's way: Arrived puts it into its function's queue; `_serve` (serving.py) hands waiting requests to
an idle body or, when there is none, wakes the function (waking.py): Stage if the host store lacks blocks,
then StartBody. RunEnded answers. A body's death costs its requests one retry and the function a rest.
What each step decides lies in one file per question beside this one.
"""

from typing import assert_never

from overwinter.core.actions import Action, Announce, SetAlarm, StopBody
from overwinter.core.events import (
    Alarm,
    Arrived,
    BodyExited,
    BodyReady,
    Cancelled,
    Deployed,
    Event,
    LoadAsked,
    Removed,
    RunEnded,
    Staged,
    StageFailed,
    UnloadAsked,
    ZygoteLost,
)
from overwinter.core.ids import FunctionId, Seconds, WorkerId
from overwinter.policy import keepalive, queueing, recovery
from overwinter.policy.lifecycles import step_blocks, step_body, step_function
from overwinter.policy.serving import Serving
from overwinter.policy.state import Body, Function


class Mind(Serving):
    """Decides for one node. Deterministic: the same events at the same times give the same actions."""

    def handle(self, event: Event, now: Seconds) -> list[Action]:
        """What should be done about `event`, in order."""
        self._actions = []
        self._step(event, now)
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
            case Cancelled(request):
                self._cancelled(request)
            case BodyReady(worker):
                self._body_ready(worker, now)
            case BodyExited():
                self._body_exited(event, now)
            case Staged():
                self._staged(event, now)
            case StageFailed():
                self._stage_failed(event, now)
            case Deployed(spec, on_trial, resident):
                self._deployed(Function(spec, on_trial), resident, now)
            case Removed(function):
                self._removed(function, now)
            case LoadAsked(function):
                self._load(function, now)
            case UnloadAsked(function):
                self._unload(function, now)
            case ZygoteLost():
                self.state.prepared.clear()
            case Alarm():
                self._alarm(now)
            case _:
                assert_never(event)

    # Waking

    def _staged(self, event: Staged, now: Seconds) -> None:
        function = self.state.functions.get(event.function)
        if function is None or function.blocks != "coming":
            # It was removed or unloaded meanwhile, and its blocks came after they had been let go.
            self._drop_unshared(event.addresses)
            return
        function.blocks = step_blocks(function.blocks, "staged")
        if event.added:
            for request in function.queue:
                self.state.requests[request].start = "disk"
        if function.queue or function.on_trial or function.announce:
            self._wake(function, now)
        elif function.state == "waking":
            function.state = step_function(function.state, "wait")

    def _stage_failed(self, event: StageFailed, now: Seconds) -> None:
        function = self.state.functions.get(event.function)
        if function is None or function.blocks != "coming":
            self._drop_unshared(event.addresses)
            return
        self._release(function)
        self._settle(function, "failed")
        self._refuse_queue(function, event.error, event.message, self.config.retry_after_min_s)
        self._failed(function, event.error, event.message, now)

    def _body_ready(self, worker: WorkerId, now: Seconds) -> None:
        body = self.state.bodies.get(worker)
        if body is None:
            return
        body.state, body.since = step_body(body.state, "ready"), now
        function = self.state.functions.get(body.function)
        if function is None or body.state == "stopping":
            return
        if function.state == "waking":
            function.state = step_function(function.state, "ready")
        if function.on_trial or function.announce:
            self._prove(function)
        self._serve(function, now)
        self._keep(body, function, now)

    def _prove(self, function: Function) -> None:
        """A body of the function runs: a new version answers for its name from now on."""
        if function.on_trial:
            self._publish(function)
        function.on_trial = function.announce = False
        self._actions.append(Announce(function.spec.id))

    def _publish(self, function: Function) -> None:
        versions = self.state.versions.setdefault(function.spec.name, [])
        versions.append(function.spec.version)
        versions.sort()

    # Deaths

    def _body_exited(self, event: BodyExited, now: Seconds) -> None:
        body = self.state.bodies.pop(event.worker, None)
        if body is None:
            return
        self._alarms.forget(body.id)
        died = body.state != "stopping"
        function = self.state.functions.get(body.function)
        if function is None:
            for id_ in body.batch:
                if id_ in self.state.requests:
                    self._refuse(id_, "NotFoundError", f"function {body.function} was removed")
        else:
            function.bodies.remove(body.id)
            if event.lost_blocks and function.blocks == "present":
                self._release(function)
            self._retry(function, body, event)
            self._settle(function, "failed" if died else "sleep")
            if died:
                self._failed(function, event.error, event.reason, now)
            else:
                self._serve(function, now)
        self._fill_room(now)

    def _retry(self, function: Function, body: Body, event: BodyExited) -> None:
        """Requests that a body died under, or never started for, get one more try or a clear error."""
        hopeless = body.state == "starting" and not self.state.is_ready(function)
        struck = body.batch or (tuple(function.queue) if hopeless else ())
        for id_ in struck:
            request = self.state.requests.get(id_)
            if request is not None:
                request.failures += 1
                if not recovery.may_retry(request, self.config):
                    self._refuse(id_, event.error, f"function {function.spec.id} failed twice: {event.reason}")
        open_ = tuple(id_ for id_ in struck if id_ in self.state.requests)
        if body.batch:
            queueing.put_back(function.queue, open_)
        elif struck:
            function.queue.clear()
            function.queue.extend(open_)

    def _failed(self, function: Function, error: str, reason: str, now: Seconds) -> None:
        """The function could not start or lost a body: it rests; a version on trial is forgotten."""
        if function.on_trial or function.announce:
            self._actions.append(Announce(function.spec.id, error, reason))
            function.announce = False
        if function.on_trial:
            function.on_trial = False
            self._forget(function, reason, now)
            return
        function.failures += 1
        function.rest_until = Seconds(now + recovery.backoff_s(function.failures, self.config))
        self._alarms.watch(function.spec.id, function.rest_until)

    # Functions come and go

    def _deployed(self, function: Function, resident: bool, now: Seconds) -> None:
        self.state.functions[function.spec.id] = function
        if resident:
            function.blocks = step_blocks(step_blocks(function.blocks, "stage"), "staged")
            self.state.sharers.update({blob.address for blob in function.spec.blobs})
        if function.on_trial:
            self._wake(function, now)
        else:
            self._publish(function)

    def _removed(self, id_: FunctionId, now: Seconds) -> None:
        function = self.state.functions.get(id_)
        if function is not None:
            self._forget(function, "it was removed", now)

    def _forget(self, function: Function, reason: str, now: Seconds) -> None:
        """Take a function out of the tables; a run under way may still end."""
        id_ = function.spec.id
        message = f"function {id_} is gone: {reason}"
        if function.on_trial or function.announce:
            self._actions.append(Announce(id_, "NotFoundError", message))
        self._refuse_queue(function, "NotFoundError", message)
        self._let_go(function, now)
        del self.state.functions[id_]
        versions = self.state.versions.get(function.spec.name, [])
        if function.spec.version in versions:
            versions.remove(function.spec.version)
        if not versions:
            self.state.versions.pop(function.spec.name, None)

    def _load(self, id_: FunctionId, now: Seconds) -> None:
        function = self.state.functions.get(id_)
        if function is None:
            self._actions.append(Announce(id_, "NotFoundError", f"no function {id_!r} is deployed here"))
            return
        if function.state == "unloaded":
            function.state = step_function(function.state, "load")
            if self.state.is_ready(function):
                function.state = step_function(step_function(function.state, "wake"), "ready")
        if function.state == "awake":
            self._actions.append(Announce(id_))
            return
        function.announce = True
        if function.state == "asleep":
            self._wake(function, now)

    def _unload(self, id_: FunctionId, now: Seconds) -> None:
        function = self.state.functions.get(id_)
        if function is None or function.on_trial or function.state == "unloaded":
            return
        message = f"function {id_} was unloaded; load it first"
        self._refuse_queue(function, "OverloadedError", message, self.config.retry_after_min_s)
        self._let_go(function, now)
        function.state = step_function(function.state, "unload")
        self._watch_deadlines(function, now)

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
        """Refuse what is past its deadline; wake what has rested."""
        for request in self.state.open_requests(function):
            if request.deadline <= now:
                waited = f"{now - request.arrived:.3f} s"
                if request.id in function.queue:
                    function.queue.remove(request.id)
                self._refuse(request.id, "DeadlineError", f"function {function.spec.id} had no answer after {waited}")
        if function.state == "resting" and now >= function.rest_until:
            function.state = step_function(function.state, "rested")
            if function.announce:
                self._wake(function, now)
        self._serve(function, now)
        self._watch_deadlines(function, now)

    def _watch_deadlines(self, function: Function, now: Seconds) -> None:
        times = [request.deadline for request in self.state.open_requests(function)]
        if function.rest_until > now:
            times.append(function.rest_until)
        if times:
            self._alarms.watch(function.spec.id, min(times))

    def _look_after_body(self, body: Body, now: Seconds) -> None:
        """Let an idle body sleep; kill one that hangs."""
        function = self.state.functions.get(body.function)
        settings = None if function is None else function.spec.settings
        if body.state == "idle":
            at = keepalive.sleep_at(body, 0.0 if settings is None else settings.keep_alive_s)
            if now >= at:
                self._stop(body, now)
                return
        elif body.state == "busy":
            at = Seconds(body.since + (0.0 if settings is None else settings.timeout_s))
        else:
            limit_s = self.config.stop_timeout_s if body.state == "stopping" else self.config.start_timeout_s
            at = Seconds(body.since + limit_s)
        if now < at:
            self._alarms.watch(body.id, at)
        elif body.state == "stopping":
            self._actions.append(StopBody(body.id, kill=True))
        else:
            self._hung(body, function, now)

    def _hung(self, body: Body, function: Function | None, now: Seconds) -> None:
        for id_ in body.batch:
            if id_ in self.state.requests:
                self._refuse(id_, "DeadlineError", f"function {body.function} hung and was stopped")
        body.batch = ()
        self._stop(body, now, kill=True)
        if function is not None:
            self._failed(function, "WorkerError", f"a body of {body.function} hung and was stopped", now)

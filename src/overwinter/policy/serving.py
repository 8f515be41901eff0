"""How a request is queued, run and answered: the middle part of the mind."""

from overwinter.core.actions import Prepare, Reply, Run
from overwinter.core.config import MindConfig
from overwinter.core.events import Arrived, RunEnded
from overwinter.core.ids import RequestId, RunId, Seconds, function_id
from overwinter.policy import batching, queueing, scaling
from overwinter.policy.lifecycles import step_body
from overwinter.policy.state import Body, Function, Request
from overwinter.policy.waking import Waking

RUN_SMOOTHING = 0.2


class Serving(Waking):
    """Adds the way of a request to waking."""

    def __init__(self, config: MindConfig) -> None:
        super().__init__(config)
        self._last_run = 0

    def _arrived(self, event: Arrived, now: Seconds) -> None:
        function = self._named(event)
        if function is None:
            return
        if function.state == "unloaded":
            message = f"function {function.spec.id} is unloaded; load it first"
            self._refuse(event.request, "OverloadedError", message, self.config.retry_after_min_s)
            return
        if not queueing.admits(function):
            message = f"function {function.spec.id} already has {len(function.queue)} requests waiting"
            wait = queueing.retry_after_s(function, self.config.retry_after_min_s)
            self._refuse(event.request, "OverloadedError", message, wait)
            return
        limit = Seconds(now + function.spec.settings.timeout_s)
        deadline = limit if event.deadline is None else min(event.deadline, limit)
        request = Request(event.request, function.spec.id, now, deadline)
        request.start = "warm" if function.state == "awake" else "host"
        self.state.requests[event.request] = request
        function.queue.append(event.request)
        self._alarms.watch(function.spec.id, deadline)
        self._serve(function, now)

    def _named(self, event: Arrived) -> Function | None:
        """The function asked for, or None after a refusal."""
        versions = self.state.versions.get(event.name, [])
        version = event.version if event.version is not None else (versions[-1] if versions else None)
        function = None if version is None else self.state.functions.get(function_id(event.name, version))
        if function is None:
            known = f"; its versions: {versions}" if versions else ""
            asked = event.name if event.version is None else function_id(event.name, event.version)
            self._refuse(event.request, "NotFoundError", f"no function {asked!r} is deployed here{known}")
        return function

    def _serve(self, function: Function, now: Seconds) -> None:
        """Hand waiting requests to idle bodies; start a body if that is not enough."""
        idle = self.state.idle_bodies(function) if function.queue else []
        while function.queue and idle:
            self._run(function, idle.pop(), now)
        if scaling.wants_body(self.state, function, now):
            self._wake(function, now)

    def _run(self, function: Function, body: Body, now: Seconds) -> None:
        self._last_run += 1
        body.state = step_body(body.state, "run")
        body.run, body.since, body.batch = RunId(self._last_run), now, batching.next_batch(function)
        self._alarms.watch(body.id, Seconds(now + function.spec.settings.timeout_s))
        self._actions.append(Run(body.id, body.run, body.batch))

    def _run_ended(self, event: RunEnded, now: Seconds) -> None:
        body = self.state.bodies.get(event.worker)
        if body is None or body.run != event.run:
            return
        failures = {failure.request: failure for failure in event.failures}
        function = self.state.functions.get(body.function)
        for id_ in body.batch:
            request = self.state.requests.pop(id_, None)
            failure = failures.get(id_)
            if request is None:
                continue
            if failure is None:
                self._actions.append(Reply(id_, body.function, request.start))
            else:
                self._refuse(id_, failure.error, failure.message)
        if function is not None:
            spent = now - body.since
            before = function.run_s
            function.run_s = spent if before is None else before + RUN_SMOOTHING * (spent - before)
            function.failures = 0
            self._prepare(function, spent)
        self._rest(body, function, now)

    def _prepare(self, function: Function, spent_s: float) -> None:
        """Let the zygote rehearse a program that has run, unless that would keep others' wakes waiting."""
        spec = function.spec
        if not spec.sandboxed and spec.program not in self.state.prepared and spent_s <= self.config.rehearsal_max_s:
            self.state.prepared.add(spec.program)
            self._actions.append(Prepare(spec.id))

    def _rest(self, body: Body, function: Function | None, now: Seconds) -> None:
        """A body finished its work: give it more, keep it for a while, or let it go."""
        body.state = step_body(body.state, "done")
        body.run, body.batch, body.since = None, (), now
        if body.state == "stopping":
            return
        if function is None or function.state == "unloaded":
            self._stop(body, now)
            return
        # Another function may wait for room: one that is always busy must not keep it out for ever.
        if self.state.wants_room:
            self._make_room(self.state.functions[self.state.wants_room[0]], now)
        self._serve(function, now)
        self._keep(body, function, now)

    def _cancelled(self, id_: RequestId) -> None:
        request = self.state.requests.pop(id_, None)
        function = None if request is None else self.state.functions.get(request.function)
        if function is not None and id_ in function.queue:
            function.queue.remove(id_)

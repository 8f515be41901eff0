"""How does a body change, in all tables that count it, and what becomes of its function then?"""

from overwinter.core.actions import Action, Decide, Decision, Refuse, StopBody
from overwinter.core.config import MindConfig
from overwinter.core.ids import FunctionId, RequestId, RunId, Seconds
from overwinter.core.policies import policy_named
from overwinter.policy import turns
from overwinter.policy.alarms import Alarms
from overwinter.policy.lifecycles import step_body, step_function
from overwinter.policy.state import Body, Function, Request, State


class Bodies:
    """The state, the actions of the step under way, and how bodies come to their end."""

    def __init__(self, config: MindConfig) -> None:
        self.config = config
        self.policy = policy_named(config.policy)
        self.cores = config.cores or 1
        self._ordered = self.policy.order == "deadline" and config.cores is not None
        self.state = State(host_limit=config.host_bytes)
        self._alarms = Alarms()
        self._actions: list[Action] = []
        self._gave_bytes = False
        """Whether bytes of a host store may have been given back since those who wait for them were last asked."""
        self.in_hand: FunctionId | None = None
        """Whose turn it is in the step under way, as far as it is one function's."""
        self._last_worker = self._last_operation = 0

    def _step_body(self, body: Body, event: str, now: Seconds) -> None:
        """The body's next state, in all tables that count it."""
        state, before = self.state, body.state
        body.state = step_body(before, event)
        if body.state == before:
            return
        body.since = now
        state.counts[before] -= 1
        state.counts[body.state] += 1
        if body.state == "busy":
            state.working[body.id] = body
        else:
            state.working.pop(body.id, None)
        if before == "idle":
            del state.idle[body.id]
        if event == "ready":
            body.ready_at = now
        if body.state == "idle":
            state.idle[body.id] = body
        elif body.state == "stopping":
            if body.until is None:
                self._count_staying(body, -1)
            state.leaving += not body.retires
            state.reserved_cores -= body.point.cores

    def _count_staying(self, body: Body, count: int) -> None:
        """In what its tenant has: it is there, or will soon be gone."""
        tenant = self.state.tenant(body.tenant)
        tenant.staying += count
        tenant.nbytes += count * body.nbytes

    def _weigh(self, body: Body, taken: int) -> None:
        """The body takes so many bytes now; one that is stopped gives nothing back before its process is gone."""
        before = body.nbytes
        body.taken = max(taken, body.taken) if body.state == "stopping" else taken
        self.state.body_bytes += body.nbytes - before
        if not body.goes:
            self.state.tenant(body.tenant).nbytes += body.nbytes - before

    def _forget_body(self, body: Body) -> None:
        """The body's process is gone."""
        state = self.state
        if not body.goes:
            self._count_staying(body, -1)
        state.tenant(body.tenant).bodies -= 1
        state.forget_tenant(body.tenant)
        del state.bodies[body.id]
        state.idle.pop(body.id, None)
        state.working.pop(body.id, None)
        state.counts[body.state] -= 1
        state.leaving -= body.leaves
        state.body_bytes -= body.nbytes
        if body.state != "stopping":
            state.reserved_cores -= body.point.cores
        state.running_cores -= body.point.run_cores * len(body.runs)
        self._alarms.forget(body.id)

    def _end_run(self, body: Body, run: RunId) -> tuple[RequestId, ...]:
        """Take a run out of its body; the requests that were in it."""
        del body.begun[run]
        self.state.running_cores -= body.point.run_cores
        return body.runs.pop(run)

    def _stop(self, body: Body, now: Seconds, kill: bool = False, event: str = "sleep") -> None:
        """End a body; `event` is what befalls its function, if this was the last that ran or would."""
        self._step_body(body, "stop", now)
        # One that does not listen is killed.
        self._alarms.forget(body.id)
        self._alarms.watch(body.id, Seconds(now + self.config.stop_timeout_s))
        self._actions.append(StopBody(body.id, kill))
        function = self.state.owner(body)
        if function is None:
            self._watch_orphan(body)
        else:
            self._settle(function, event)
            turns.keep_line(self.state, function)

    def _watch_orphan(self, body: Body) -> None:
        """Ring for the deadlines of what a body still runs for a function that is gone."""
        deadlines = [self.state.requests[id_].deadline for id_ in body.in_hand() if id_ in self.state.requests]
        if deadlines:
            self._alarms.watch(body.id, min(deadlines))

    def _settle(self, function: Function, event: str) -> None:
        """A body left the function: asleep, or resting, if it was the last that ran or would."""
        if function.state == "awake" and not self.state.is_ready(function):
            starting = self.state.has_starting(function)
            function.state = step_function(function.state, "sleep" if starting else event)
            if starting:
                function.state = step_function(function.state, "wake")
        elif function.state == "waking" and function.blocks != "coming" and not self.state.has_starting(function):
            function.state = step_function(function.state, "failed")

    def _retire(self, body: Body, now: Seconds) -> None:
        """It gets no more work, and goes when it has done what it has."""
        self.state.leaving += not body.leaves
        body.retires = True
        if body.state == "idle":
            self._stop(body, now)

    def _drain(self, body: Body, now: Seconds) -> None:
        """What it runs may still end, for a while."""
        if body.state == "busy" and body.until is None:
            self._count_staying(body, -1)
            body.until = Seconds(now + self.config.drain_timeout_s)
            self._alarms.watch(body.id, body.until)

    def _stay(self, body: Body) -> None:
        """What it runs may go on after all."""
        if body.until is not None:
            body.until = None
            if body.state != "stopping":
                self._count_staying(body, 1)

    def _overran(self, body: Body, function: Function | None, now: Seconds) -> None:
        """Its while is over: what it runs is refused, and it is killed."""
        if function is None:
            error, why = "NotFoundError", f"function {body.function} was removed"
        elif function.state == "unloaded":
            error, why = self._why_unloaded(function)
        else:
            error, why = "OverloadedError", f"the worker of function {body.function} was needed by another tenant"
        for run in list(body.runs):
            for id_ in self._end_run(body, run):
                if id_ in self.state.requests:
                    told = f"{why}, and its run did not end within {self.config.drain_timeout_s:g} s"
                    self._refuse(id_, error, told, self.config.retry_after_min_s)
        self._stop(body, now, kill=True)

    def _step_back(self, function: Function) -> None:
        """What was to wake must wait for others to go."""
        if function.state == "waking" and not self.state.has_starting(function):
            function.state = step_function(function.state, "wait")

    # Words

    def _why_unloaded(self, function: Function) -> tuple[str, str]:
        """The error for a request to a function that is unloaded, and what to do."""
        if function.fault:
            return "QuarantineError", function.fault
        return "OverloadedError", f"function {function.spec.id} is unloaded; load it first"

    def _decide(self, function: Function, what: Decision, why: str) -> None:
        self._actions.append(Decide(function.spec.id, what, why))

    def _open(self, request: Request) -> None:
        self.state.requests[request.id] = request
        self.state.tenant(request.tenant).requests += 1

    def _close(self, id_: RequestId) -> Request | None:
        """The request has its answer, or needs none; None if that was so before."""
        request = self.state.requests.pop(id_, None)
        if request is not None:
            tenant = self.state.tenants[request.tenant]
            tenant.requests -= 1
            if not tenant.functions:
                self.state.forget_tenant(request.tenant)
        return request

    def _refuse(self, request: RequestId, error: str, message: str, wait: float | None = None) -> None:
        self._close(request)
        self._actions.append(Refuse(request, error, message, wait))

    def _refuse_queue(self, function: Function, error: str, message: str, wait: float | None = None) -> None:
        while function.queue:
            self._refuse(function.queue.popleft(), error, message, wait)

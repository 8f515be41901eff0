"""How a request is queued, run and answered: the middle part of the mind."""

from itertools import islice

from overwinter.core.actions import Prepare, Reply, Run
from overwinter.core.config import MindConfig
from overwinter.core.events import Arrived, RunEnded
from overwinter.core.ids import RequestId, RunId, Seconds, function_id
from overwinter.policy import batching, containment, cores, keepalive, queueing
from overwinter.policy.containment import asked
from overwinter.policy.scaling.wants import wake_s
from overwinter.policy.sizing import Sizing
from overwinter.policy.state import Body, Function, Request

USE_SMOOTHING = 0.2


class Serving(Sizing):
    """Adds the way of a request to sizing and waking."""

    def __init__(self, config: MindConfig) -> None:
        super().__init__(config)
        self._last_run = self._core_turns = 0
        self._rule = batching.RULES[self.policy.batching]

    def _arrived(self, event: Arrived, now: Seconds) -> None:
        function = self._named(event)
        if function is None:
            return
        self.in_hand = function.spec.id
        if function.state == "unloaded":
            self._refuse(event.request, *self._why_unloaded(function), self.config.retry_after_min_s)
            return
        self._count(function, now)
        full = queueing.why_full(self.state, function, self.config.requests_max)
        if full is not None:
            wait = queueing.retry_after_s(function, self.config.retry_after_min_s)
            self._refuse(event.request, "OverloadedError", full, wait)
            return
        limit = Seconds(now + function.spec.settings.timeout_s)
        deadline = limit if event.deadline is None else min(event.deadline, limit)
        request = Request(event.request, function.spec.id, now, deadline, queueing.level(event.priority))
        request.tenant = function.spec.tenant
        if not self.state.is_ready(function):
            request.start = "host"
        self._open(request)
        queueing.insert(function.queue, request, self.state.requests)
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

    def _serve(self, function: Function, now: Seconds, granted: bool = False) -> None:
        """Hand waiting requests to bodies with a slot, when their rule says so; start a body if that is not enough.

        `granted`: a core is this function's already.
        """
        self.in_hand, function.batch_at = function.spec.id, None
        while function.queue:
            bodies = self.state.slots(function)
            if not bodies:
                break
            if self.policy.order == "deadline":
                turned = (function.turns + 1) % cores.LATE_TURN == 0
                cores.put_late_last(self.state, function, now, turned)
            plain = batching.Send(bodies[0], 1)
            step = asked(self.state, function, plain, self._next_step, function, bodies, now)
            if isinstance(step, batching.Wait):
                function.batch_at = Seconds(now + step.seconds)
                self._alarms.watch(function.spec.id, function.batch_at)
                return
            if not self._has_core(function, step.body.point.run_cores, now, granted):
                return
            if step.late and function.spec.settings.late == "refuse" and not function.best_effort:
                self._shed(function, step, now)
            self._run(function, step.body, step.count, now)
            granted = False
        self._leave_if_idle(function)
        if self._asks(function, now):
            self._wake(function, now, granted)

    def _fill_lines(self, now: Seconds) -> None:
        """Serve those who wait for something that may be free now."""
        state = self.state
        if self._gave_bytes and state.wants_bytes:
            self._gave_bytes = False
            self._fill_bytes(now)
        if state.wants_core or state.late:
            self._fill_cores(now)
        if state.wants_room or state.wants_more:
            self._fill_room(now)

    def _fill_cores(self, now: Seconds) -> None:
        """Hand free cores to those whose requests wait for one."""
        state = self.state
        while function := self._next_up(now):
            cores.leave_line(state, function)
            self._serve(function, now, granted=True)
        if state.wants_core or state.late:
            # What hangs ends nothing that would be heard of.
            waits = next(iter(state.wants_core or state.late))
            self._alarms.watch(waits, cores.next_overdue(state, now))

    def _next_up(self, now: Seconds) -> Function | None:
        """Whose the next free core is, or None where nobody waits or no core is free."""
        state = self.state
        for waiting in (state.wants_core, state.late):
            for id_ in [id_ for id_ in waiting if not state.functions[id_].queue]:
                del waiting[id_]
        if not state.wants_core and not state.late:
            return None
        if not cores.is_free(state, self.cores, 1, now):
            return cores.in_a_hurry(state, self.cores, now)
        function = cores.next_up(state, self._core_turns + 1, now)
        if not cores.is_free(state, self.cores, cores.needs(state, function), now):
            return None
        self._core_turns += 1
        return function

    def _next_step(self, function: Function, bodies: list[Body], now: Seconds) -> batching.Step:
        slo_ms, speeds = function.spec.settings.slo_ms, function.speeds
        # One of priority may have come after those behind it.
        next_ones = islice(function.queue, max(body.point.batch for body in bodies))
        waiting = batching.Waiting(
            count=len(function.queue),
            waited_s=now - min(self.state.requests[id_].arrived for id_ in next_ones),
            slo_s=0.0 if slo_ms is None else slo_ms / 1000,
            latency=lambda body, count: speeds.latency_s(body.point, count) or 0.0,
            keeps_up=self._keeps_up(function),
        )
        if slo_ms is None or (speeds.run_s is None and not speeds.points):
            return batching.greedy(waiting, bodies)
        return batching.sound(self._rule(waiting, bodies), bodies)

    def _shed(self, function: Function, step: batching.Send, now: Seconds) -> None:
        """Refuse what cannot be in time any more, so that what can be is (AsyFunc, alg. 3, lines 16-18).

        Where a wake takes longer than the promise, a body that has just come answers the newest all the same: it would
        be woken again and again to answer nobody.
        """
        slo_s = (function.spec.settings.slo_ms or 0.0) / 1000
        latency = containment.expected_s(self.state, function, step.body.point, step.count) or 0.0
        hopeless = [id_ for id_ in function.queue if now - self.state.requests[id_].arrived + latency > slo_s]
        woken = step.body.state == "idle" and step.body.since == step.body.ready_at
        soonest = wake_s(function) + (containment.expected_s(self.state, function, step.body.point, 1) or 0.0)
        if woken and soonest > slo_s and len(hopeless) == len(function.queue):
            hopeless = hopeless[: -step.count]
        if hopeless:
            self._decide(function, "shed", f"{len(hopeless)} requests could not be in time any more")
        for id_ in hopeless:
            function.queue.remove(id_)
            message = f"function {function.spec.id} can no longer answer this request within {slo_s * 1000:g} ms"
            self._refuse(id_, "OverloadedError", message, self.config.retry_after_min_s)

    def _run(self, function: Function, body: Body, count: int, now: Seconds) -> None:
        taken, expired = queueing.take(function.queue, count, self.state.requests, now)
        for id_ in expired:
            self._expire(id_, now)
        if not taken:
            return
        self._last_run += 1
        function.turns += 1
        run = RunId(self._last_run)
        if self.policy.keep_alive == "history":
            keepalive.remember(function.gaps, now - function.used)
        self._step_body(body, "run", now)
        body.runs[run], body.begun[run] = taken, now
        self.state.running_cores += body.point.run_cores
        self._touch(function, now)
        self._alarms.watch(body.id, Seconds(now + function.spec.settings.timeout_s))
        self._actions.append(Run(body.id, run, taken))

    def _touch(self, function: Function, now: Seconds) -> None:
        """The function is used: the last of those to leave the host store."""
        kept, id_ = self.state.kept, function.spec.id
        if id_ in kept:
            del kept[id_]
            kept[id_] = None
        function.every_s += USE_SMOOTHING * (now - function.used - function.every_s)
        function.used = now

    def _expire(self, id_: RequestId, now: Seconds) -> None:
        request = self.state.requests[id_]
        waited = f"{now - request.arrived:.3f} s"
        self._refuse(id_, "DeadlineError", f"function {request.function} had no answer after {waited}")

    def _run_ended(self, event: RunEnded, now: Seconds) -> None:
        body = self.state.bodies.get(event.worker)
        if body is None or event.run not in body.runs:
            return
        self.in_hand = body.function
        failures = {failure.request: failure for failure in event.failures}
        function = self.state.owner(body)
        spent = now - body.begun[event.run]
        batch = self._end_run(body, event.run)
        for id_ in batch:
            request = self._close(id_)
            failure = failures.get(id_)
            if request is None:
                continue
            if failure is None:
                self._actions.append(Reply(id_, body.function, request.start))
            else:
                self._refuse(id_, failure.error, failure.message)
        if function is not None:
            asked(self.state, function, None, function.speeds.observe, body.point, len(batch), spent)
            function.failures = 0
            self._prepare(function, spent)
        self._rest(body, function, now)

    def _prepare(self, function: Function, spent_s: float) -> None:
        """Let the tenant's zygote rehearse a program that has run, unless that would take it long."""
        spec = function.spec
        if spec.program in self.state.prepared.get(spec.tenant, {}) or spent_s > self.config.rehearsal_max_s:
            return
        prepared = self.state.prepared.setdefault(spec.tenant, {})
        forget = next(iter(prepared)) if len(prepared) >= self.config.prepared_max else None
        if forget is not None:
            del prepared[forget]
        prepared[spec.program] = None
        self._actions.append(Prepare(spec.id, forget))

    def _rest(self, body: Body, function: Function | None, now: Seconds) -> None:
        """A run of a body ended: give it more, keep it for a while, or let it go."""
        if not body.runs:
            self._step_body(body, "done", now)
        if body.state == "stopping":
            return
        if function is None or function.state == "unloaded":
            if not body.runs:
                self._stop(body, now)
            return
        # Another function may wait: one that is always busy must not keep it out for ever.
        if self.state.wants_room:
            self._fill_room(now)
        self._free_bytes(now)
        self._serve(function, now)
        self._keep(body, function, now)

    def _cancelled(self, id_: RequestId) -> None:
        request = self._close(id_)
        function = None if request is None else self.state.functions.get(request.function)
        if function is not None and id_ in function.queue:
            function.queue.remove(id_)
            self._leave_if_idle(function)

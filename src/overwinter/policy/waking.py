"""How a function gets bodies, keeps them and loses them: the lower part of the mind.

A wake is two steps, each a single flight: Stage when the host store lacks blocks, then StartBody. When the node has
all the bodies it may have, one gives way (turns.py); when the host store is full, the function least worth its bytes
does.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import inf

from overwinter.core.actions import Action, Announce, Decide, Decision, Drop, Refuse, Stage, StartBody, StopBody
from overwinter.core.config import MindConfig
from overwinter.core.ids import Address, RequestId, RunId, Seconds, StoreName, WorkerId
from overwinter.core.policies import policy_named
from overwinter.core.profile import Point, Shape
from overwinter.policy import cores, keepalive, reclaiming, recovery, turns
from overwinter.policy.alarms import Alarms
from overwinter.policy.lifecycles import step_blocks, step_body, step_function
from overwinter.policy.scaling.wants import wants_body
from overwinter.policy.state import Body, Function, State


class Waking:
    """The state, the actions of the step under way, and what wakes functions and puts them to sleep."""

    def __init__(self, config: MindConfig) -> None:
        self.config = config
        self.policy = policy_named(config.policy)
        self.cores = config.cores or 1
        self._ordered = self.policy.order == "deadline" and config.cores is not None
        self.state = State()
        self._alarms = Alarms()
        self._actions: list[Action] = []
        self._last_worker = 0

    def _wake(self, function: Function, now: Seconds, granted: bool = False) -> None:
        """Take the next step towards more bodies; `granted`: a core is this function's already."""
        if function.state == "resting" or function.blocks == "coming" or function.spec.id == self.state.yields:
            return
        if function.state == "asleep":
            function.state = step_function(function.state, "wake")
        if function.blocks == "absent":
            self._stage(function, now)
        elif not self._has_core(function, 1, now, granted):
            return
        elif turns.is_behind(self.state, function) or len(self.state.bodies) >= self.config.bodies_max:
            # Without asking in which shapes.
            self._make_room(function, now)
        else:
            self._start(function, self._wanted_shapes(function, now), now)

    def _wanted_shapes(self, function: Function, now: Seconds) -> Sequence[Shape]:
        """In which shapes bodies should be started for what waits."""
        return (function.speeds.usual.shape,)

    def _has_core(self, function: Function, needed: int, now: Seconds, granted: bool) -> bool:
        """Whether the function may use so many cores now; if not, it waits for them."""
        state = self.state
        if not self._ordered or function.spec.sandboxed or function.on_trial or function.announce:
            return True
        if granted or (not state.wants_core and not state.late and cores.is_free(state, self.cores, needed, now)):
            return True
        if function.spec.id not in state.late or not cores.is_late(state, function, now):
            state.late.pop(function.spec.id, None)
            state.wants_core[function.spec.id] = None
        self._step_back(function)
        return False

    # Blocks

    def _stage(self, function: Function, now: Seconds) -> None:
        residents, line = self.state.residents(function), self.state.wants_bytes
        if self.config.host_bytes is not None:
            if line and line[0] != function.spec.id:
                self._await_bytes(function, now)
                return
            short = self.state.host_bytes() + residents.missing(function.sizes) - self.config.host_bytes
            if short > 0 and not self._reclaim(short, function, now):
                self._await_bytes(function, now)
                return
        turns.leave_bytes_line(self.state, function)
        turns.leave_line(self.state, function)
        function.blocks = step_blocks(function.blocks, "stage")
        residents.hold(function.sizes)
        self.state.kept[function.spec.id] = None
        self._actions.append(Stage(function.spec.id))

    def _reclaim(self, nbytes: int, keep: Function | None, now: Seconds) -> bool:
        """Let blocks leave the host stores until so many bytes are won; False if what may leave is not enough."""
        goal = self.state.host_bytes() - nbytes
        while self.state.host_bytes() > goal:
            victim = reclaiming.next_victim(self.state, self.policy.eviction, now, keep)
            if victim is None:
                return False
            before = self.state.host_bytes()
            self._release(victim)
            won = before - self.state.host_bytes()
            self._decide(victim, "evict", f"{won} bytes were needed; it was used {now - victim.used:.1f} s ago")
        return True

    def _await_bytes(self, function: Function, now: Seconds) -> None:
        """Nothing more may leave the host store: this function waits in line, and another gives way."""
        self._step_back(function)
        turns.leave_line(self.state, function)
        cores.leave_line(self.state, function)
        line, limit = self.state.wants_bytes, self.config.host_bytes or 0
        size, pinned = sum(function.sizes.values()), reclaiming.pinned_bytes(self.state, function)
        if size + pinned > limit:
            beside = f", {pinned} of them pinned by others: make it larger, or unpin" if pinned else ": make it larger"
            why = f"function {function.spec.id} needs {size} bytes of the host store, which has {limit}{beside}"
            turns.leave_bytes_line(self.state, function)
            self._refuse_queue(function, "NoSpaceError", why, self.config.retry_after_min_s)
            self._failed(function, "NoSpaceError", why, now)
            return
        if function.spec.id not in line:
            line.append(function.spec.id)
            self._decide(function, "wait", "the host store is full of what is in use")
        self._free_bytes(now)

    def _free_bytes(self, now: Seconds) -> None:
        """Have a function give its bytes to those that wait, one at a time."""
        state = self.state
        if state.yields is not None or not state.wants_bytes:
            return
        function, at = turns.next_to_yield(state, now)
        if function is None:
            if at < inf:
                self._alarms.watch(state.wants_bytes[0], Seconds(at))
            return
        state.yields = function.spec.id
        for worker in list(function.bodies):
            if not state.bodies[worker].leaves:
                self._retire(state.bodies[worker], now)
        self._yield_bytes(function, now)

    def _yield_bytes(self, function: Function, now: Seconds) -> None:
        """The function's last body may be gone: its blocks go too, if that was what it was to go for."""
        if self.state.yields != function.spec.id or function.bodies:
            return
        self.state.yields = None
        if self.state.wants_bytes and function.blocks == "present":
            self._decide(function, "evict", "others wait for room in the host store, and it has had its turn")
            self._release(function)
            self._fill_bytes(now)
        if function.queue and wants_body(self.state, function, self.policy, self.cores, now):
            self._wake(function, now)

    def _fill_bytes(self, now: Seconds) -> None:
        """Something was given back: the function that waited longest for room in the host store tries again."""
        line = self.state.wants_bytes
        while line:
            function = self.state.functions[line[0]]
            if self._asks(function, now):
                self._wake(function, now)
                if line and line[0] == function.spec.id:
                    return
            else:
                line.popleft()

    def _release(self, function: Function) -> None:
        """The function's blocks are kept no more: drop those that no other function holds, wherever they came from."""
        residents = self.state.residents(function)
        if function.blocks != "absent":
            function.blocks = step_blocks(function.blocks, "release")
            residents.release(function.sizes)
            del self.state.kept[function.spec.id]
        self._drop_unshared(function.sizes, function.spec.store)

    def _drop_unshared(self, addresses: Iterable[Address], store: StoreName) -> None:
        residents = self.state.stores.get(store)
        free = tuple(sorted(set(addresses))) if residents is None else residents.unshared(set(addresses))
        if free:
            self._actions.append(Drop(free, store))

    # Bodies

    def _start(self, function: Function, shapes: Sequence[Shape], now: Seconds) -> int:
        """Start bodies of these shapes, and tell how many; where there is no room, the function waits for it."""
        if function.spec.id == self.state.yields:
            return 0
        for started, shape in enumerate(shapes):
            point = function.speeds.point(shape)
            if turns.is_behind(self.state, function) or not self._has_room(point):
                self._make_room(function, now)
                return started
            turns.leave_line(self.state, function)
            self._last_worker += 1
            body = Body(WorkerId(self._last_worker), function.spec.id, point, since=now)
            self.state.bodies[body.id] = self.state.working[body.id] = body
            self.state.counts["starting"] += 1
            self.state.reserved_cores += point.cores
            self.state.body_bytes += point.memory_bytes
            function.bodies.append(body.id)
            self._alarms.watch(body.id, Seconds(now + self.config.start_timeout_s))
            program = function.spec.program
            if program in self.state.prepared:
                del self.state.prepared[program]
                self.state.prepared[program] = None
            # Zeros through a program that has run before tell nothing new.
            rehearse = function.on_trial and not self.state.proven[program]
            self._actions.append(StartBody(body.id, body.function, rehearse, point.cores, point.concurrency))
        return len(shapes)

    def _has_room(self, point: Point) -> bool:
        state, limit = self.state, self.config.memory_bytes
        return (
            len(state.bodies) < self.config.bodies_max
            # One body alone may be larger than the bound: it would never run otherwise.
            and (limit is None or not state.bodies or state.body_bytes + point.memory_bytes <= limit)
            and not (self.policy.reserves and state.reserved_cores and not self._has_cores(point))
        )

    def _has_cores(self, point: Point) -> bool:
        return self.state.reserved_cores + point.cores <= self.cores

    def _make_room(self, function: Function, now: Seconds) -> None:
        """There is no room, or others come first: this function waits in line, and a body of another goes."""
        self._step_back(function)
        turns.line_up(self.state, function)
        if not self._has_room(function.speeds.usual):
            self._let_one_go(now)

    def _let_one_go(self, now: Seconds) -> None:
        """Have a body leave for whoever waits for room, unless one does for each of them."""
        state = self.state
        if state.leaving >= len(state.wants_room) + len(state.wants_more):
            return
        body = turns.idle_longest(state)
        if body is None and state.leaving < len(state.wants_room):
            body = turns.longest_at_work(state, now)
        if body is not None:
            self._retire(body, now)

    def _retire(self, body: Body, now: Seconds) -> None:
        """It gets no more work, and goes when it has done what it has."""
        self.state.leaving += not body.leaves
        body.retires = True
        if body.state == "idle":
            self._stop(body, now)

    def _step_back(self, function: Function) -> None:
        """What was to wake must wait for others to go."""
        if function.state == "waking" and not self.state.has_starting(function):
            function.state = step_function(function.state, "wait")

    def _fill_room(self, now: Seconds) -> None:
        """Start a body for the first in line, if there is room now; who wants none any more leaves the line."""
        while (id_ := turns.first_in_line(self.state)) is not None:
            function = self.state.functions[id_]
            if not self._asks(function, now):
                turns.leave_line(self.state, function)
            elif not self._has_room(function.speeds.usual):
                self._let_one_go(now)
                return
            else:
                self._wake(function, now)
                if turns.first_in_line(self.state) == id_:
                    return

    def _asks(self, function: Function, now: Seconds) -> bool:
        """Whether a function in line still wants what it waits for."""
        if function.on_trial or function.announce:
            return function.state != "resting"
        return wants_body(self.state, function, self.policy, self.cores, now)

    def _keep(self, body: Body, function: Function, now: Seconds) -> None:
        """A body with nothing to do stays for the keep-alive, unless another function needs its room."""
        if body.state != "idle":
            return
        if body.retires:
            self._stop(body, now)
            return
        self._alarms.watch(body.id, keepalive.sleep_at(body, function, self.policy))
        self._free_bytes(now)

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
            state.leaving += not body.retires
            state.reserved_cores -= body.point.cores

    def _forget_body(self, body: Body) -> None:
        """The body's process is gone."""
        state = self.state
        del state.bodies[body.id]
        state.idle.pop(body.id, None)
        state.working.pop(body.id, None)
        state.counts[body.state] -= 1
        state.leaving -= body.leaves
        state.body_bytes -= body.point.memory_bytes
        if body.state != "stopping":
            state.reserved_cores -= body.point.cores
        state.running_cores -= body.point.run_cores * len(body.runs)
        self._alarms.forget(body.id)

    def _end_run(self, body: Body, run: RunId) -> tuple[RequestId, ...]:
        """Take a run out of its body; the requests that were in it."""
        del body.begun[run]
        self.state.running_cores -= body.point.run_cores
        return body.runs.pop(run)

    def _stop(self, body: Body, now: Seconds, kill: bool = False) -> None:
        self._step_body(body, "stop", now)
        # One that does not listen is killed.
        self._alarms.forget(body.id)
        self._alarms.watch(body.id, Seconds(now + self.config.stop_timeout_s))
        self._actions.append(StopBody(body.id, kill))
        function = self.state.functions.get(body.function)
        if function is not None:
            self._settle(function, "sleep")

    def _settle(self, function: Function, event: str) -> None:
        """A body left the function: asleep, or resting, if it was the last that ran or would."""
        if function.state == "awake" and not self.state.is_ready(function):
            starting = self.state.has_starting(function)
            function.state = step_function(function.state, "sleep" if starting else event)
            if starting:
                function.state = step_function(function.state, "wake")
        elif function.state == "waking" and function.blocks != "coming" and not self.state.has_starting(function):
            function.state = step_function(function.state, "failed")

    def _let_go(self, function: Function, now: Seconds) -> None:
        """Give back all that a function holds: its idle bodies and its blocks."""
        self._alarms.forget(function.spec.id)
        turns.leave_line(self.state, function)
        cores.leave_line(self.state, function)
        turns.leave_bytes_line(self.state, function)
        if function.spec.id == self.state.yields:
            self.state.yields = None
        for worker in list(function.bodies):
            body = self.state.bodies[worker]
            if body.state in ("idle", "starting"):
                self._stop(body, now)
        self._release(function)

    # Ends

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
            self.state.proven[function.spec.program] -= 1
            self.state.proven += Counter()
        if not versions:
            self.state.versions.pop(function.spec.name, None)

    # Words

    def _decide(self, function: Function, what: Decision, why: str) -> None:
        self._actions.append(Decide(function.spec.id, what, why))

    def _refuse(self, request: RequestId, error: str, message: str, wait: float | None = None) -> None:
        self.state.requests.pop(request, None)
        self._actions.append(Refuse(request, error, message, wait))

    def _refuse_queue(self, function: Function, error: str, message: str, wait: float | None = None) -> None:
        while function.queue:
            self._refuse(function.queue.popleft(), error, message, wait)

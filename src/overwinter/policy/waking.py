"""How a function gets bodies, keeps them and loses them: the lower part of the mind.

A wake is two steps, each a single flight: Stage when the host store lacks blocks, then StartBody. When the node has
all the bodies it may have, one gives way (turns.py); when the host store is full, the function least worth its bytes
does.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import inf

from overwinter.core.actions import Announce, Drop, Stage, StartBody
from overwinter.core.ids import Address, OperationId, Seconds, StoreName, WorkerId
from overwinter.core.profile import Shape
from overwinter.policy import cores, keepalive, memory, reclaiming, recovery, turns
from overwinter.policy.containment import asked
from overwinter.policy.lifecycles import step_blocks, step_function
from overwinter.policy.room import Room
from overwinter.policy.scaling.wants import wants_body
from overwinter.policy.state import Body, Function


class Waking(Room):
    """Adds what wakes functions and puts them to sleep."""

    def _wake(self, function: Function, now: Seconds, granted: bool = False) -> None:
        """Take the next step towards more bodies; `granted`: a core is this function's already."""
        self.in_hand = function.spec.id
        if function.state == "resting" or function.blocks == "coming" or function.spec.id == self.state.yields:
            return
        too_large = function.speeds.too_large_bytes
        if too_large is not None and not self.state.has_body(function):
            limit = self.config.memory_bytes
            why = f"a worker of function {function.spec.id} needs {too_large} bytes, and all workers may have {limit}"
            self._give_up(function, f"{why}: raise memory_bytes", now)
            return
        if function.state == "asleep":
            function.state = step_function(function.state, "wake")
        if function.blocks == "absent":
            self._stage(function, now)
        elif not self._has_core(function, 1, now, granted):
            return
        elif self._is_behind(function) or len(self.state.bodies) >= self.config.bodies_max:
            # Without asking in which shapes.
            self._line_up(function)
        else:
            usual = (function.speeds.usual.shape,)
            shapes = asked(self.state, function, usual, self._wanted_shapes, function, now)
            if not self._start(function, shapes, now):
                function.awaits = function.speeds.point(shapes[0])
                self._line_up(function)

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
        residents, line, limit = self.state.residents(function), self.state.wants_bytes, self.state.host_limit
        if limit is not None:
            behind = next(iter(line), function.spec.id) != function.spec.id
            short = self.state.host_bytes() + residents.missing(function.sizes) - limit
            why = self._never_fits(function, limit) if behind or short > 0 else None
            if why is not None:
                self._give_up(function, why, now)
                return
            if behind or (short > 0 and not self._reclaim(short, function, now)):
                self._await_bytes(function, now)
                return
        self._leave_lines(function)
        function.blocks = step_blocks(function.blocks, "stage")
        residents.hold(function.sizes)
        self.state.kept[function.spec.id] = None
        self._last_operation += 1
        function.staging = OperationId(self._last_operation)
        self._actions.append(Stage(function.spec.id, function.staging))

    def _never_fits(self, function: Function, limit: int) -> str | None:
        """Why no eviction can win room enough in the host store, if none can."""
        size, pinned = sum(function.sizes.values()), reclaiming.pinned_bytes(self.state, function)
        if size + pinned <= limit:
            return None
        beside = f", {pinned} of them pinned by others: make it larger, or unpin" if pinned else ": make it larger"
        return f"function {function.spec.id} needs {size} bytes of the host store, which has {limit}{beside}"

    def _give_up(self, function: Function, why: str, now: Seconds) -> None:
        """What it needs can never be had: whoever waits for it is told."""
        self._step_back(function)
        self._leave_lines(function)
        function.restage = False
        self._refuse_queue(function, "NoSpaceError", why, self.config.retry_after_min_s)
        self._failed(function, "NoSpaceError", why, now)
        self._gave_bytes = True

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
        line = self.state.wants_bytes
        if function.spec.id not in line:
            line[function.spec.id] = None
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
                self._alarms.watch(next(iter(state.wants_bytes)), Seconds(at))
            return
        state.yields = function.spec.id
        turns.leave_line(state, function)
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
        if self._asks(function, now):
            self._wake(function, now)

    def _fill_bytes(self, now: Seconds) -> None:
        """Something was given back: the function that waited longest for room in the host store tries again."""
        line = self.state.wants_bytes
        while line:
            function = self.state.functions[next(iter(line))]
            if self._asks(function, now):
                self._wake(function, now)
                if next(iter(line), None) == function.spec.id:
                    return
            else:
                del line[function.spec.id]

    def _release(self, function: Function) -> None:
        """The function's blocks are kept no more: drop those that no other function holds, wherever they came from."""
        turns.leave_line(self.state, function)
        function.staging = None
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
        """Start bodies of these shapes as far as there is room and nobody comes before, and tell how many."""
        if function.spec.id == self.state.yields:
            return 0
        for started, shape in enumerate(shapes):
            point = function.speeds.point(shape)
            if self._is_behind(function) or not self._has_room(function, point):
                return started
            turns.leave_line(self.state, function)
            self._last_worker += 1
            spec = function.spec
            id_ = WorkerId(self._last_worker)
            body = Body(id_, spec.id, point, spec.settings.timeout_s, spec.tenant, since=now)
            self.state.bodies[body.id] = self.state.working[body.id] = body
            self.state.counts["starting"] += 1
            self.state.reserved_cores += point.cores
            self.state.body_bytes += point.memory_bytes
            self.state.tenant(body.tenant).bodies += 1
            self._count_staying(body, 1)
            function.bodies.append(body.id)
            if function.turn_at is None:
                function.turn_at = now
            self._alarms.watch(body.id, Seconds(now + self.config.start_timeout_s))
            prepared = self.state.prepared.get(spec.tenant, {})
            if spec.program in prepared:
                del prepared[spec.program]
                prepared[spec.program] = None
            # Zeros through a program that has run before tell nothing new; what others have run is not told.
            rehearse = function.on_trial and not self.state.proven[spec.tenant, spec.program]
            self._actions.append(StartBody(body.id, body.function, rehearse, point.cores, point.concurrency))
        return len(shapes)

    def _fill_room(self, now: Seconds) -> None:
        """Start a body for the first in line, if there is room now, else have others leave; who wants none any more
        leaves the line.
        """
        while (id_ := self.first_in_line()) is not None:
            function = self.state.functions[id_]
            if not self._asks(function, now):
                turns.leave_line(self.state, function)
            elif not self.has_room_for(function):
                if not self._let_one_go(now):
                    self._watch_turns(function, now)
                    return
            else:
                self._wake(function, now)
                if self.first_in_line() == id_:
                    return

    def _asks(self, function: Function, now: Seconds) -> bool:
        """Whether a function wants a body, and may have one."""
        if function.spec.id == self.state.yields:
            return False
        if function.on_trial or function.announce:
            return function.state != "resting" and not self.state.has_starting(function)
        if not function.queue:
            return False
        return asked(self.state, function, False, wants_body, self.state, function, self.policy, self.cores, now)

    def _keep(self, body: Body, function: Function, now: Seconds) -> None:
        """A body with nothing to do stays for the keep-alive, unless another function needs its room."""
        if body.state != "idle":
            return
        if body.retires:
            self._stop(body, now)
            return
        self._alarms.watch(body.id, self._sleep_at(body, function, now))
        self._free_bytes(now)

    def _sleep_at(self, body: Body, function: Function, now: Seconds) -> Seconds:
        return asked(self.state, function, now, keepalive.sleep_at, body, function, self.policy)

    def _let_go(self, function: Function, now: Seconds) -> None:
        """Give back all that a function holds: its idle bodies and its blocks."""
        self._alarms.forget(function.spec.id)
        self._leave_lines(function)
        if function.spec.id == self.state.yields:
            self.state.yields = None
        for worker in list(function.bodies):
            body = self.state.bodies[worker]
            if body.state in ("idle", "starting"):
                self._stop(body, now)
            else:
                self._drain(body, now)
        self._release(function)

    def _leave_lines(self, function: Function) -> None:
        """Wait for nothing any more."""
        turns.leave_line(self.state, function)
        cores.leave_line(self.state, function)
        turns.leave_bytes_line(self.state, function)

    def _leave_if_idle(self, function: Function) -> None:
        """Its last request is gone: it waits in no line any more."""
        if not (function.queue or function.on_trial or function.announce):
            self._leave_lines(function)

    # Ends

    def _let_one_go(self, now: Seconds) -> bool:
        """Have a body leave for those who wait for room, unless there will be room for all; whether one does."""
        first = self.first_in_line()
        excessive = None if first is None else self._excessive_for(self.state.functions[first])
        if excessive is not None:
            self._outgrew(excessive, now)
            return True
        function = self._without_room()
        if function is None:
            return False
        body = self.idle_for(function) or self._busy_for(function, now)
        if body is None:
            return False
        self._retire(body, now)
        if body.tenant != function.spec.tenant:
            self._drain(body, now)
        return True

    def _outgrew(self, body: Body, now: Seconds) -> None:
        """Kill a body that takes more than there is. What it runs is refused: again it would take as much. But if it
        takes little more than it was to, that is tried again as after any death.
        """
        function, why = self.state.owner(body), memory.told(body, self.config.memory_bytes)
        self.in_hand, body.stopped_for, starting = body.function, why, body.state == "starting"
        if function is not None:
            self._decide(function, "stop", why)
        if body.state == "idle" or not (starting or memory.is_far_beyond(body)):
            self._stop(body, now, kill=True)
            return
        refused = [id_ for run in list(body.runs) for id_ in self._end_run(body, run) if id_ in self.state.requests]
        self._stop(body, now, kill=True, event="failed")
        for id_ in refused:
            self._refuse(id_, "NoSpaceError", why, self.config.retry_after_min_s)
        if function is None:
            return
        if starting and not self.state.has_body(function):
            self._refuse_queue(function, "NoSpaceError", why, self.config.retry_after_min_s)
            self._leave_if_idle(function)
        self._failed(function, "NoSpaceError", why, now)

    def _spare(self, function: Function, lost_blocks: bool, now: Seconds) -> bool:
        """Whether a body's end is no failure: its blocks had vanished from memory, and not twice in a row. A deploy or
        a load that waits for the function goes on.
        """
        spared = lost_blocks and not function.lost
        function.lost = lost_blocks
        if spared:
            self._step_back(function)
            if function.on_trial or function.announce:
                self._wake(function, now)
        return spared

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
        self.state.tenant(function.spec.tenant).functions -= 1
        self.state.forget_tenant(function.spec.tenant)
        for worker in function.bodies:
            self._watch_orphan(self.state.bodies[worker])
        versions = self.state.versions.get(function.spec.name, [])
        if function.spec.version in versions:
            versions.remove(function.spec.version)
            self.state.proven[function.spec.tenant, function.spec.program] -= 1
            self.state.proven += Counter()
        if not versions:
            self.state.versions.pop(function.spec.name, None)

"""How a function gets a body, keeps it and loses it: the lower part of the mind.

A wake is two steps, each a single flight: Stage when the host store lacks blocks, then StartBody. When the
node has all the bodies it may have, the one idle longest gives way.
"""

from collections.abc import Iterable

from overwinter.core.actions import Action, Drop, Refuse, Stage, StartBody, StopBody
from overwinter.core.config import MindConfig
from overwinter.core.ids import Address, RequestId, Seconds, WorkerId
from overwinter.policy import keepalive, scaling
from overwinter.policy.alarms import Alarms
from overwinter.policy.lifecycles import step_blocks, step_body, step_function
from overwinter.policy.state import Body, Function, State


class Waking:
    """The state, the actions of the step under way, and what wakes functions and puts them to sleep."""

    def __init__(self, config: MindConfig) -> None:
        self.config = config
        self.state = State()
        self._alarms = Alarms()
        self._actions: list[Action] = []
        self._last_worker = 0

    def _wake(self, function: Function, now: Seconds) -> None:
        """Take the next step towards one more body."""
        if function.state == "resting" or function.blocks == "coming":
            return
        if function.state == "asleep":
            function.state = step_function(function.state, "wake")
        if function.blocks == "absent":
            function.blocks = step_blocks(function.blocks, "stage")
            self.state.sharers.update({blob.address for blob in function.spec.blobs})
            self._actions.append(Stage(function.spec.id))
        elif len(self.state.bodies) >= self.config.bodies_max:
            self._make_room(function, now)
        else:
            self._start(function, now)

    def _start(self, function: Function, now: Seconds) -> None:
        self._last_worker += 1
        body = Body(WorkerId(self._last_worker), function.spec.id, since=now)
        self.state.bodies[body.id] = body
        function.bodies.append(body.id)
        self._alarms.watch(body.id, Seconds(now + self.config.start_timeout_s))
        self._actions.append(StartBody(body.id, body.function, function.on_trial))

    def _make_room(self, function: Function, now: Seconds) -> None:
        """The node has all its bodies: the one idle longest goes, and this function comes after it."""
        if function.state == "waking" and not self.state.has_starting(function):
            function.state = step_function(function.state, "wait")
        if function.spec.id not in self.state.wants_room:
            self.state.wants_room.append(function.spec.id)
        leaving = sum(body.state == "stopping" for body in self.state.bodies.values())
        if leaving < len(self.state.wants_room):
            body = keepalive.gives_way(self.state.bodies.values())
            if body is not None:
                self._stop(body, now)

    def _fill_room(self, now: Seconds) -> None:
        """A body is gone: the function that waited longest for its room may start one."""
        while self.state.wants_room and len(self.state.bodies) < self.config.bodies_max:
            function = self.state.functions[self.state.wants_room.popleft()]
            asked = function.on_trial or function.announce
            if asked or scaling.wants_body(self.state, function, now):
                self._wake(function, now)

    def _keep(self, body: Body, function: Function, now: Seconds) -> None:
        """A body with nothing to do stays for the keep-alive, unless another function needs its room."""
        if body.state != "idle":
            return
        if self.state.wants_room:
            self._make_room(self.state.functions[self.state.wants_room[0]], now)
        else:
            self._alarms.watch(body.id, keepalive.sleep_at(body, function.spec.settings.keep_alive_s))

    def _stop(self, body: Body, now: Seconds, kill: bool = False) -> None:
        body.state, body.since = step_body(body.state, "stop"), now
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

    def _release(self, function: Function) -> None:
        """The function needs its blocks no more: drop those that no other function holds, wherever they came from."""
        addresses = {blob.address for blob in function.spec.blobs}
        if function.blocks != "absent":
            function.blocks = step_blocks(function.blocks, "release")
            self.state.sharers.subtract(addresses)
        self._drop_unshared(addresses)

    def _drop_unshared(self, addresses: Iterable[Address]) -> None:
        free = sorted(address for address in set(addresses) if self.state.sharers[address] <= 0)
        for address in free:
            del self.state.sharers[address]
        if free:
            self._actions.append(Drop(tuple(free)))

    def _let_go(self, function: Function, now: Seconds) -> None:
        """Give back all that a function holds: its idle bodies and its blocks."""
        self._alarms.forget(function.spec.id)
        if function.spec.id in self.state.wants_room:
            self.state.wants_room.remove(function.spec.id)
        for worker in list(function.bodies):
            body = self.state.bodies[worker]
            if body.state in ("idle", "starting"):
                self._stop(body, now)
        self._release(function)

    def _refuse(self, request: RequestId, error: str, message: str, wait: float | None = None) -> None:
        self.state.requests.pop(request, None)
        self._actions.append(Refuse(request, error, message, wait))

    def _refuse_queue(self, function: Function, error: str, message: str, wait: float | None = None) -> None:
        while function.queue:
            self._refuse(function.queue.popleft(), error, message, wait)

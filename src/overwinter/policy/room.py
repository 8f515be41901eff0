"""Is there room for one more body, who is next to get it, and who is stopped for it?"""

from collections.abc import Iterator

from overwinter.core.ids import FunctionId, Seconds
from overwinter.core.profile import Point
from overwinter.policy import memory, tenants, turns
from overwinter.policy.bodies import Bodies
from overwinter.policy.state import Body, Function, Tenant


class Room(Bodies):
    """Adds the room of the node to bodies."""

    def _has_room(self, function: Function, point: Point) -> bool:
        state = self.state
        if tenants.has_all(state, self.config, function.spec.tenant):
            return False
        return self._fits(len(state.bodies), state.body_bytes, state.reserved_cores, point)

    def _fits(self, bodies: int, nbytes: int, reserved: int, point: Point) -> bool:
        """Whether there is room for one more beside so many bodies with so many bytes and cores."""
        limit = self.config.memory_bytes
        return (
            bodies < self.config.bodies_max
            and (limit is None or nbytes + point.memory_bytes <= limit)
            # One body alone may be wider than the machine: it would never run otherwise.
            and not (self.policy.reserves and reserved and reserved + point.cores > self.cores)
        )

    # The line

    def first_in_line(self) -> FunctionId | None:
        """Whose the next room is."""
        if tenants.alone(self.state):
            return turns.first_in_line(self.state)
        waiting = (tenant for tenant in self.state.tenants.values() if tenant.first is not None)
        first = min(waiting, key=self._place, default=None)
        return None if first is None else first.first

    def _is_behind(self, function: Function) -> bool:
        """Whether others come before this function."""
        state, first = self.state, self.first_in_line()
        if first is None or first == function.spec.id:
            return False
        tenant, other = function.spec.tenant, state.functions[first].spec.tenant
        if tenant == other:
            return turns.is_behind(state, function)
        return turns.is_in_line(state, function) or self._place(state.tenant(other)) <= self._place(
            state.tenant(tenant)
        )

    def _place(self, tenant: Tenant) -> tuple[bool, float]:
        """Where a tenant comes: the least share first, and last who may have no more."""
        return tenant.bodies >= tenants.most_bodies(self.state, self.config), tenants.share(tenant, self.config)

    def _in_order(self) -> Iterator[FunctionId]:
        for tenant in sorted(self.state.tenants.values(), key=self._place):
            yield from tenant.wants_room
            yield from tenant.wants_more

    def _line_up(self, function: Function) -> None:
        """There is no room, or others come first: this function waits in line, which `_fill_room` serves."""
        self._step_back(function)
        turns.line_up(self.state, function)

    def has_room_for(self, function: Function) -> bool:
        """Whether there is room for what a function in line would start."""
        return self._has_room(function, self._awaited(function))

    def _awaited(self, function: Function) -> Point:
        return function.awaits or function.speeds.usual

    # Who is stopped

    def idle_for(self, function: Function) -> Body | None:
        """The body that is stopped at once."""
        if tenants.alone(self.state):
            return turns.idle_longest(self.state)
        return max(turns.not_needed(self.state, self._givers(function)), key=self._riches, default=None)

    def _busy_for(self, function: Function, now: Seconds) -> Body | None:
        """The body that is stopped when it has done what it does."""
        own_may = self.state.leaving < len(self.state.wants_room)
        if tenants.alone(self.state):
            return turns.longest_at_work(self.state, now) if own_may else None
        over = (body for body in self._givers(function) if self._turn_ends(function, body) <= now)
        mine = function.spec.tenant
        busy = (body for body in over if body.state == "busy" and (own_may or body.tenant != mine))
        return max(busy, key=lambda body: (self._riches(body), body.retires, -body.ready_at, -body.id), default=None)

    def _excessive_for(self, function: Function) -> Body | None:
        """The body of another tenant that has to go at once for a function's: what it takes beyond its need was free
        until somebody needs it.
        """
        limit, mine, bodies = self.config.memory_bytes, function.spec.tenant, self.state.bodies.values()
        excessive = [body for body in bodies if memory.is_far_beyond(body) and body.tenant != mine]
        if limit is None or not excessive:
            return None
        stay = self.state.body_bytes - sum(body.nbytes for body in bodies if body.state == "stopping")
        if stay + self._awaited(function).memory_bytes <= limit:
            return None
        givers = {body.id for body in self._givers(function)}
        return memory.next_to_stop(body for body in excessive if body.goes or body.id in givers)

    def _givers(self, function: Function) -> list[Body]:
        """Bodies that may have to go for a function's."""
        wants, mine = self._awaited(function), function.spec.tenant
        most = max(each.staying for each in self.state.tenants.values())
        return [
            body
            for body in self.state.bodies.values()
            if body.state in ("idle", "busy")
            and not body.goes
            and not (body.retires and body.tenant == mine)
            and tenants.may_take(self.state, self.config, function, wants, body, most)
        ]

    def _riches(self, body: Body) -> float:
        return tenants.share(self.state.tenant(body.tenant), self.config)

    def _turn_ends(self, function: Function, body: Body) -> float:
        """When a body has had its turn; one that is to go already has."""
        if body.retires:
            return body.ready_at
        turn_s = turns.turn_s(self.state, body)
        own = body.tenant == function.spec.tenant
        return body.ready_at + (turn_s if own else min(turn_s, self.config.drain_timeout_s))

    def _watch_turns(self, function: Function, now: Seconds) -> None:
        """Ring when the next body of another tenant has had its turn: what sleeps ends nothing that would be heard."""
        if not tenants.alone(self.state):
            others = (body for body in self._givers(function) if body.tenant != function.spec.tenant)
            ends = [at for body in others if (at := self._turn_ends(function, body)) > now]
            if ends:
                self._alarms.watch(function.spec.id, Seconds(min(ends)))

    def _without_room(self) -> Function | None:
        """The first of those who wait that finds no room when those who go are gone."""
        state = self.state
        stay = [body for body in state.bodies.values() if not body.goes]
        added: list[Function] = []
        for id_ in self._in_order():
            function = state.functions[id_]
            if not self._finds_room(function, stay, added):
                return function
            added.append(function)
        return None

    def _finds_room(self, function: Function, stay: list[Body], added: list[Function]) -> bool:
        mine = function.spec.tenant
        # What its own tenant's bodies do will end, as far as it is concerned.
        others = [body for body in stay if not (body.retires and body.tenant == mine)]
        own = sum(body.tenant == mine for body in others) + sum(other.spec.tenant == mine for other in added)
        if own >= tenants.most_bodies(self.state, self.config):
            return False
        points = [*(body.point for body in others), *map(self._awaited, added)]
        cores = sum(point.cores for point in points)
        nbytes = sum(body.nbytes for body in others) + sum(self._awaited(each).memory_bytes for each in added)
        return self._fits(len(points), nbytes, cores, self._awaited(function))

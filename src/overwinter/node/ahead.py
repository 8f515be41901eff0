"""The node's side of bodies that are forked ahead: how they are forked, and how a function comes into one.

They are forked by their tenant's zygote once it holds all that it was to prepare. Until one is taken over it has
nothing of any function; then it is a body as any other, under the name of the worker that goes on in it. A start that
finds its process gone, or too small, forks one as if there had been none.
"""

from collections.abc import Sequence
from typing import Protocol

from overwinter.core.errors import WorkerError
from overwinter.core.ids import TenantId, WorkerId
from overwinter.node.bodies import BodyProcess
from overwinter.node.functions import DeployedFunction
from overwinter.node.log import Log
from overwinter.node.preparing import Preparing
from overwinter.node.sparing import Sparing
from overwinter.node.watching import Zygotes
from overwinter.node.zygotes import Room, ZygoteProcess
from overwinter.worker.channel import ChannelClosedError
from overwinter.worker.messages import Bind, ForkBody, Load, TakeOver

UNASKABLE = (ChannelClosedError, OSError, OverflowError)
"""What asking for a body fails with."""


class Forker(Protocol):
    """The processes."""

    zygotes: Zygotes

    def ask(self, zygote: ZygoteProcess, body: BodyProcess, order: ForkBody) -> None:
        """Ask a zygote for a body; UNASKABLE errors."""
        ...

    def hear(self, body: BodyProcess) -> None:
        """Hear a body from now on."""
        ...

    def end(self, body: BodyProcess, ending: str) -> None:
        """Tell a body's end, of which no zygote knows."""
        ...

    def kill(self, body: BodyProcess) -> None:
        """Kill a body, if it still lives."""
        ...


class Ahead:
    """Those that were asked for and not taken over."""

    def __init__(self, forker: Forker, preparing: Preparing, log: Log) -> None:
        self._forker = forker
        self._preparing = preparing
        self._log = log
        self._sparing = Sparing(log)
        self.bodies: dict[WorkerId, BodyProcess] = {}
        self._rooms: dict[WorkerId, Room | None] = {}
        """How large the zygote is that forked each; None: none was asked yet."""

    def fork(self, function: DeployedFunction, worker: WorkerId) -> None:
        """Fork one from the zygote of the function's tenant, as soon as that can; WorkerError when there is none, or no
        room.
        """
        tenant = function.family.tenant
        if tenant not in self._forker.zygotes.tenants:
            raise WorkerError(f"{tenant} has no zygote")
        try:
            body = BodyProcess(worker, function, function.load(bare=True), self._log)
        except OSError as error:
            raise WorkerError(f"a body could not be forked: {error}") from error
        body.is_ahead = True
        self.bodies[worker], self._rooms[worker] = body, None
        self._forker.hear(body)
        self.advance(tenant)

    def look(self) -> None:
        """Ask zygotes again that could not fork when they were to be asked."""
        for tenant in {body.family.tenant for worker, body in self.bodies.items() if self._rooms[worker] is None}:
            self.advance(tenant)

    def advance(self, tenant: TenantId) -> None:
        """Ask the tenant's zygote for those that it can fork now, with all its programs. What waits for that counts as
        starting: it does not wait for a zygote that is gone, or could not fork when it was asked last.
        """
        zygote = self._forker.zygotes.tenants.get(tenant)
        for body in self._unasked(tenant):
            if zygote is None or zygote.room is None or zygote.full:
                self._forker.end(body, "its tenant's zygote is gone, or cannot fork")
            elif zygote.can_fork and not self._preparing.wants(tenant):
                self._rooms[body.worker] = zygote.room
                try:
                    self._forker.ask(zygote, body, ForkBody(body.worker, None, *zygote.room, ahead=True))
                except UNASKABLE as error:
                    self._forker.end(body, f"it could not be forked: {error}")

    def _unasked(self, tenant: TenantId) -> list[BodyProcess]:
        return [
            body for worker, body in self.bodies.items() if self._rooms[worker] is None and body.family.tenant == tenant
        ]

    def is_unasked(self, body: BodyProcess) -> bool:
        """Whether no zygote knows of it."""
        return self._rooms.get(body.worker, body) is None

    def gone(self, body: BodyProcess) -> None:
        """One has ended."""
        if self.bodies.get(body.worker) is body:
            del self.bodies[body.worker], self._rooms[body.worker]

    def give_up(self, body: BodyProcess, why: str) -> None:
        """End one that does more than wait."""
        tenant = body.family.tenant
        self._sparing.say(tenant, f"a process forked ahead for {tenant} is ended: {why}")
        self._forker.kill(body)

    def take_over(
        self,
        worker: WorkerId | None,
        function: DeployedFunction,
        order: ForkBody,
        load: Load,
        bind: Bind | None,
        fds: Sequence[int],
    ) -> BodyProcess | None:
        """Let a worker go on in a body forked ahead; None where that cannot be, and it ends."""
        body = None if worker is None else self.bodies.get(worker)
        if worker is None or body is None:
            return None
        assert body.family.tenant == function.family.tenant, "it was forked by another tenant's zygote"
        room, shared = self._rooms[worker], 1 if load.source_bytes is None else 2
        try:
            if room is None or not room.holds(order) or load.concurrency > 1:
                raise OverflowError
            body.channel.send(TakeOver(order.memory_bytes, order.mapped_bytes))
            body.channel.send(load, fds[:shared])
            if bind is not None:
                body.channel.send(bind, fds[shared:])
        except UNASKABLE:
            self._forker.kill(body)
            return None
        self.gone(body)
        body.take_over(order.worker, function, load)
        return body

"""The node's side of its bodies: which zygote forks them, what they say, and how they end.

Everything here runs in callbacks of the event loop and never waits. Bodies are asked for once the base zygote is up, so
that one that dies before costs nobody a try. A body's end is told once: when its zygote tells it, when that zygote is
lost, or when the kernel says that the process is over and the zygote keeps silent.
"""

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence

import msgspec

from overwinter.core.errors import WorkerError
from overwinter.core.ids import FunctionId, TenantId, WorkerId
from overwinter.node.ahead import UNASKABLE, Ahead
from overwinter.node.answers import failed
from overwinter.node.bindings import Told
from overwinter.node.bodies import BodyProcess, ending
from overwinter.node.functions import DeployedFunction
from overwinter.node.insight.memory import anonymous_bytes
from overwinter.node.log import Log
from overwinter.node.preparing import Preparing
from overwinter.node.printed import Records
from overwinter.node.proofs import wait_over
from overwinter.node.staff import BodyStaff, Staff
from overwinter.node.watching import UNREADABLE, Bounds, Zygotes
from overwinter.node.zygotes import ZygoteProcess
from overwinter.worker.channel import ChannelClosedError, close_all
from overwinter.worker.messages import (
    Answer,
    Bind,
    BindFailed,
    Bound,
    Failure,
    ForkBody,
    Forked,
    FromBody,
    Load,
    LoadFailed,
    Measured,
    Ready,
    Stop,
    ToBody,
    Trying,
    Unbind,
    Waiting,
)

GONE_S = 5.0
LINGER_S = 1.0


class Processes:
    """Forks bodies from the zygotes, and hears them."""

    def __init__(self, staff: Staff, environment: Mapping[str, str], log: Log, bounds: Bounds | None = None) -> None:
        self._staff = staff
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._closing = False
        self._bodies: dict[WorkerId, BodyProcess] = {}
        self._measurers: dict[WorkerId, BodyStaff] = {}
        """Who hears of a body in place of the staff."""
        self._records = Records()
        self._held: dict[WorkerId, ForkBody] = {}
        """Bodies that wait for the base zygote, in their order."""
        self.zygotes = Zygotes(self, environment, log, bounds or Bounds())
        self._preparing = Preparing(self.zygotes, staff)
        self.prepare = self._preparing.prepare
        self.ahead = Ahead(self, self._preparing, log)

    def start(self) -> None:
        """Start the base zygote; `is_up` tells when it can fork. Bodies asked for before wait for it."""
        self.zygotes.start()

    def is_up(self) -> bool:
        """Whether bodies can be forked, as far as is known."""
        return self.zygotes.is_up()

    def zygote_smaps(self) -> list[int]:
        """The files in which the kernel counts the zygotes' memory."""
        return [zygote.smaps for zygote in self.zygotes.every() if zygote.smaps is not None]

    def body_smaps(self) -> dict[WorkerId, int]:
        """The files in which the kernel counts the bodies' memory; each is closed when its body ends."""
        return {worker: body.smaps for worker, body in self._bodies.items() if body.smaps is not None}

    def body_pids(self) -> dict[WorkerId, int]:
        """The bodies' process ids."""
        return {worker: body.pid for worker, body in self._bodies.items() if body.pid is not None}

    # What zygotes tell

    def body_forked(self, zygote: ZygoteProcess, message: Forked, pidfd: int | None, smaps: int | None) -> None:
        """A body that was asked for lives; without a descriptor it has ended already."""
        body = zygote.bodies.get(message.worker)
        if body is None or pidfd is None:
            close_all([fd for fd in (pidfd, smaps) if fd is not None])
            self._end_soon(zygote, body)
            return
        body.forked(zygote.channel.sender, pidfd, smaps)
        body.inherited_bytes = anonymous_bytes(zygote.pid or 0) or 0
        self._loop.add_reader(pidfd, self._process_over, zygote, body)

    def _end_soon(self, zygote: ZygoteProcess, body: BodyProcess | None) -> None:
        """A body's process is over: its zygote should say so too, and knows how it ended."""
        if body is not None:
            self._loop.call_later(LINGER_S, self._end_body, zygote, body.forked_as, "its process ended", body)

    def body_ended(self, zygote: ZygoteProcess, worker: WorkerId, status: int | None, reason: str = "") -> None:
        """A body is gone, or never was."""
        self._end_body(zygote, worker, ending(status) if status is not None else f"it could not be forked: {reason}")

    def zygote_idle(self, zygote: ZygoteProcess) -> None:
        """A zygote has come up, or has prepared what it was to."""
        if zygote.tenant is not None:
            self._preparing.advance(zygote.tenant)
            self.ahead.advance(zygote.tenant)
            return
        for worker, order in list(self._held.items()):
            try:
                self._order(self._bodies[worker], order)
            except UNASKABLE as error:
                self.end(self._bodies[worker], f"it could not be forked: {error}")

    def zygote_lost(self, zygote: ZygoteProcess, in_rehearsal: bool) -> None:
        """The zygote is gone, and what it held; its bodies are dead, and are told of here."""
        culprit = self._preparing.lost(zygote.tenant)
        if not self._closing:
            self._staff.zygote_lost(zygote.tenant, culprit if in_rehearsal else None, zygote.overran)
        for worker, body in list(zygote.bodies.items()):
            body.dismissed = True
            self._end_body(zygote, worker, ending(-signal.SIGKILL))
        if zygote.tenant is not None:
            self.ahead.advance(zygote.tenant)

    def looked(self) -> None:
        """All zygotes were looked at: one may have become idle, and make room."""
        self._preparing.look()
        self.ahead.look()
        alive = {body.family.tenant for body in self._bodies.values()}
        self.zygotes.groups.keep(alive | self.zygotes.tenants.keys())

    def _process_over(self, zygote: ZygoteProcess, body: BodyProcess) -> None:
        """The kernel says that a body has ended."""
        assert body.pidfd is not None, "a body without a process cannot end"
        self._loop.remove_reader(body.pidfd)
        self._end_soon(zygote, body)

    # Bodies

    def fork(
        self,
        function: DeployedFunction,
        order: ForkBody,
        load: Load,
        bind: Bind | None,
        fds: Sequence[int],
        measurer: BodyStaff | None = None,
        ahead: WorkerId | None = None,
    ) -> None:
        """Fork a body for a function's family, as soon as a zygote can, or go on in the one forked `ahead`, and hand it
        what to load, and the function to bind first, with their descriptors; WorkerError when the system has no room.
        The bind may follow later. A measurer hears of the body in place of the staff.
        """
        body = self.ahead.take_over(ahead, function, order, load, bind, fds)
        if body is None:
            body = self._forked(function, order, load, bind, fds)
        body.printed = function.printed = function.printed or self._records.of(function.family.id)
        if bind is not None:
            body.bindings.begin_first(function, bind)
        self._bodies[order.worker] = body
        if measurer is not None:
            self._measurers[order.worker] = measurer
        self.hear(body)

    def _forked(
        self, function: DeployedFunction, order: ForkBody, load: Load, bind: Bind | None, fds: Sequence[int]
    ) -> BodyProcess:
        try:
            body = BodyProcess(order.worker, function, load, self._log)
        except OSError as error:
            raise WorkerError(f"a body could not be forked: {error}") from error
        shared = 1 if load.source_bytes is None else 2
        try:
            # What cannot be said to the body is found out before anybody forks it.
            body.channel.send(load, fds[:shared])
            if bind is not None:
                body.channel.send(bind, fds[shared:])
            self._order(body, order)
        except UNASKABLE as error:
            body.close()
            raise WorkerError(f"a body could not be forked: {error}") from error
        return body

    def hear(self, body: BodyProcess) -> None:
        """Hear a body from now on."""
        self._loop.add_reader(body.channel.fileno(), self._hear_body, body)

    def _order(self, body: BodyProcess, order: ForkBody) -> None:
        """Ask a zygote for a body, or hold it while the base is not up; UNASKABLE errors."""
        tenant = body.family.tenant
        zygote = self._zygote_for(tenant, order)
        if zygote is None:
            self._held[order.worker] = order
            return
        self._held.pop(order.worker, None)
        self.ask(zygote, body, order)

    def ask(self, zygote: ZygoteProcess, body: BodyProcess, order: ForkBody) -> None:
        """Ask a zygote for a body; UNASKABLE errors."""
        tenant = body.family.tenant
        # Only the base can give it a user of its own.
        its = order if zygote.tenant is None else msgspec.structs.replace(order, uid=None)
        # What a tenant's zygote forks is born in its group.
        with self.zygotes.groups.entry(tenant if zygote.tenant is None else None) as group:
            its = msgspec.structs.replace(its, grouped=bool(group))
            zygote.channel.send(its, [body.there.fileno(), body.words.there, *body.tray_fds(), *group])
        body.close_there()
        zygote.owed[order.worker] = 0
        zygote.bodies[order.worker] = body

    def bind(self, body: BodyProcess, function: DeployedFunction, fds: Sequence[int], told: Told) -> None:
        """Let a body bind a further function; `told` hears of it, unless the body ends before.

        The descriptors are those of the blocks that it lacks (`body.bindings.lacking`), then those of the assets.
        ValueError for a function of another family, or one that it has.
        """
        if function.family != body.family:
            raise ValueError(f"{function.id} is not of the family of body {body.worker}")
        function.printed = body.printed
        bind = function.bind()
        handed = tuple(body.bindings.lacking(bind))
        body.bindings.begin(function, bind, told)
        self.send(body, msgspec.structs.replace(bind, handed=handed, trial=None), fds)

    def unbind(self, body: BodyProcess, function: FunctionId) -> None:
        """Let a body let go of a function that it has bound, once no run of it is under way; ValueError for others."""
        body.bindings.end(function)
        self.send(body, Unbind(function))

    def _zygote_for(self, tenant: TenantId, order: ForkBody) -> ZygoteProcess | None:
        """The tenant's own, where it can fork at once; else the base, if it is up; a body compiles for itself there."""
        own = self.zygotes.tenants.get(tenant)
        if own is not None and own.can_fork and own.room is not None:
            if own.room.holds(order):
                self.zygotes.used(own)
                return own
            own.small = True
        base = self.zygotes.base
        return None if base is None or "up" in base.owed else base

    def bodies(self) -> list[BodyProcess]:
        """All that were ordered and have not ended; some are not forked yet."""
        return list(self._bodies.values())

    def body(self, worker: WorkerId) -> BodyProcess | None:
        """The body, if it lives."""
        return self._bodies.get(worker)

    def send(self, body: BodyProcess, message: ToBody, fds: Sequence[int] = ()) -> None:
        """Tell a body something; one that does not listen is killed, and its end is told as any other."""
        try:
            body.channel.send(message, fds)
        except (ChannelClosedError, OSError):
            self.kill(body)

    def stop(self, worker: WorkerId, kill: bool) -> None:
        """End a body; its end is told when it is gone."""
        body = self._bodies.get(worker) or self.ahead.bodies.get(worker)
        if body is not None and (kill or worker in self._held):
            self.kill(body)
        elif body is not None:
            body.dismissed = True
            self.send(body, Stop())

    def kill(self, body: BodyProcess) -> None:
        """Kill a body, if it still lives; nobody is asked."""
        body.dismissed = True
        if body.worker in self._held or self.ahead.is_unasked(body):
            self.end(body, "it was stopped before it was forked")
        elif not body.over:
            body.kill()

    def _staff_of(self, worker: WorkerId) -> BodyStaff:
        return self._measurers.get(worker, self._staff)

    def _hear_body(self, body: BodyProcess) -> None:
        try:
            message, _ = body.channel.receive()
            self._take(body, message)
        except BlockingIOError:
            return
        except ChannelClosedError:
            # Nothing more will come. Its zygote will tell its end; one that only closed its channel must not linger.
            self._loop.remove_reader(body.channel.fileno())
            self._loop.call_later(LINGER_S, self.kill, body)
        except UNREADABLE as error:
            self.give_up(body, f"it answered nonsense: {error}")

    def _take(self, body: BodyProcess, message: FromBody) -> None:
        """ValueError for what cannot be true: the code of its functions may say anything in its name."""
        match message:
            case Answer():
                self._staff_of(body.worker).body_answered(body, message)
            case Trying():
                _require(not (body.ready or body.tried), "it was tried before")
                body.tried = True
            case Waiting():
                _require(body.is_ahead and not body.waits, "nobody asked it to wait")
                body.waits = True
                self._staff.body_waits(body)
            case Ready():
                _require(not body.ready, "it was ready before")
                body.bindings.answered(body.function)
                body.ready = True
                self._staff_of(body.worker).body_ready(body, message)
            case Bound(function):
                body.bindings.answered(function)(None)
            case BindFailed(function):
                told = body.bindings.answered(function)
                self.unbind(body, FunctionId(function))
                told(failed(message))
            case Measured():
                self._staff_of(body.worker).body_measured(body, message)
            case LoadFailed():
                _require(not body.ready and body.failure is None, "it was loaded before")
                body.failure = failed(message)

    def give_up(self, body: BodyProcess, reason: str) -> None:
        """Hear no more of a body that cannot be trusted, and kill it; its end is told with this reason."""
        body.failure = Failure("WorkerError", reason)
        self._loop.remove_reader(body.channel.fileno())
        self.kill(body)

    def _end_body(self, zygote: ZygoteProcess, worker: WorkerId, ending_: str, this: BodyProcess | None = None) -> None:
        """Tell a body's end, unless it was told. Who calls it dead makes it so."""
        body = zygote.bodies.get(worker)
        if body is None or this not in (None, body):
            return
        del zygote.bodies[worker]
        if this is not None:
            zygote.unheard.add(worker)
        self.end(body, ending_)

    def end(self, body: BodyProcess, ending_: str) -> None:
        """Tell a body's end, of which no zygote knows any more."""
        worker = body.worker
        self._bodies.pop(worker, None)
        self._held.pop(worker, None)
        self.ahead.gone(body)
        body.kill()
        body.over = True
        self._take_last_words(body)
        self._loop.remove_reader(body.channel.fileno())
        if body.pidfd is not None:
            self._loop.remove_reader(body.pidfd)
        body.close()
        failure = body.failure or body.ended(ending_)
        self._staff_of(worker).body_exited(body, failure.error, failure.message)
        self._measurers.pop(worker, None)

    def _take_last_words(self, body: BodyProcess) -> None:
        """A body that could not load says why before it exits, and may exit before it is heard."""
        try:
            while body.failure is None:
                message, _ = body.channel.receive()
                if isinstance(message, LoadFailed):
                    body.failure = failed(message)
                elif isinstance(message, Trying):
                    body.tried = True
                elif isinstance(message, Answer):
                    self._staff_of(body.worker).body_answered(body, message)
        except (BlockingIOError, ChannelClosedError, OSError, *UNREADABLE):
            return

    async def close(self) -> None:
        """Kill everything, and wait until it is gone."""
        self._closing = True
        bodies = [*self._bodies.values(), *self.ahead.bodies.values()]
        for body in bodies:
            body.kill()
        for zygote in self.zygotes.every():
            zygote.bodies.clear()
        await self.zygotes.close()
        pidfds = [os.dup(body.pidfd) for body in bodies if body.pidfd is not None]
        await asyncio.to_thread(wait_over, pidfds, GONE_S)
        for body in bodies:
            self._loop.remove_reader(body.channel.fileno())
            if body.pidfd is not None:
                self._loop.remove_reader(body.pidfd)
            body.close()


def _require(truth: bool, complaint: str) -> None:
    if not truth:
        raise ValueError(complaint)

"""The node's side of workers that are forked ahead: how they are forked, and how a function comes into one.

They are forked by their tenant's zygote once it holds all that it was to prepare. Until one is taken over it has
nothing of any function; then it is a worker as any other, under the name of the worker that goes on in it. A start that
finds its process gone, or too small, forks one as if there had been none.
"""

from collections.abc import Sequence
from typing import Protocol

from overwinter.core.errors import WorkerError
from overwinter.core.ids import TenantId, WorkerId
from overwinter.node.functions import DeployedFunction
from overwinter.node.log import Log
from overwinter.node.preparing import Preparing
from overwinter.node.sparing import Sparing
from overwinter.node.watching import Zygotes
from overwinter.node.workers import WorkerProcess
from overwinter.node.zygotes import Room, ZygoteProcess
from overwinter.worker.channel import ChannelClosedError
from overwinter.worker.messages import Bind, ForkWorker, Load, TakeOver

UNASKABLE = (ChannelClosedError, OSError, OverflowError)
"""What asking for a worker fails with."""


class Forker(Protocol):
    """The processes."""

    zygotes: Zygotes

    def ask(self, zygote: ZygoteProcess, process: WorkerProcess, order: ForkWorker) -> None:
        """Ask a zygote for a worker; UNASKABLE errors."""
        ...

    def hear(self, process: WorkerProcess) -> None:
        """Hear a worker from now on."""
        ...

    def end(self, process: WorkerProcess, ending: str) -> None:
        """Tell a worker's end, of which no zygote knows."""
        ...

    def kill(self, process: WorkerProcess) -> None:
        """Kill a worker, if it still lives."""
        ...


class Ahead:
    """Those that were asked for and not taken over."""

    def __init__(self, forker: Forker, preparing: Preparing, log: Log) -> None:
        self._forker = forker
        self._preparing = preparing
        self._log = log
        self._sparing = Sparing(log)
        self.workers: dict[WorkerId, WorkerProcess] = {}
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
            process = WorkerProcess(worker, function, function.load(bare=True), self._log)
        except OSError as error:
            raise WorkerError(f"a worker could not be forked: {error}") from error
        process.is_ahead = True
        self.workers[worker], self._rooms[worker] = process, None
        self._forker.hear(process)
        self.advance(tenant)

    def look(self) -> None:
        """Ask zygotes again that could not fork when they were to be asked."""
        for tenant in {
            process.family.tenant for worker, process in self.workers.items() if self._rooms[worker] is None
        }:
            self.advance(tenant)

    def advance(self, tenant: TenantId) -> None:
        """Ask the tenant's zygote for those that it can fork now, with all its programs. What waits for that counts as
        starting: it does not wait for a zygote that is gone, or could not fork when it was asked last.
        """
        zygote = self._forker.zygotes.tenants.get(tenant)
        for process in self._unasked(tenant):
            if zygote is None or zygote.room is None or zygote.full:
                self._forker.end(process, "its tenant's zygote is gone, or cannot fork")
            elif zygote.can_fork and not self._preparing.wants(tenant):
                self._rooms[process.worker] = zygote.room
                try:
                    self._forker.ask(zygote, process, ForkWorker(process.worker, None, *zygote.room, ahead=True))
                except UNASKABLE as error:
                    self._forker.end(process, f"it could not be forked: {error}")

    def _unasked(self, tenant: TenantId) -> list[WorkerProcess]:
        return [
            process
            for worker, process in self.workers.items()
            if self._rooms[worker] is None and process.family.tenant == tenant
        ]

    def is_unasked(self, process: WorkerProcess) -> bool:
        """Whether no zygote knows of it."""
        return self._rooms.get(process.worker, process) is None

    def gone(self, process: WorkerProcess) -> None:
        """One has ended."""
        if self.workers.get(process.worker) is process:
            del self.workers[process.worker], self._rooms[process.worker]

    def give_up(self, process: WorkerProcess, why: str) -> None:
        """End one that does more than wait."""
        tenant = process.family.tenant
        self._sparing.say(tenant, f"a process forked ahead for {tenant} is ended: {why}")
        self._forker.kill(process)

    def take_over(
        self,
        worker: WorkerId | None,
        function: DeployedFunction,
        order: ForkWorker,
        load: Load,
        bind: Bind | None,
        fds: Sequence[int],
    ) -> WorkerProcess | None:
        """Let a worker go on in a worker forked ahead; None where that cannot be, and it ends."""
        process = None if worker is None else self.workers.get(worker)
        if worker is None or process is None:
            return None
        assert process.family.tenant == function.family.tenant, "it was forked by another tenant's zygote"
        room, shared = self._rooms[worker], 1 if load.source_bytes is None else 2
        try:
            if room is None or not room.holds(order) or load.concurrency > 1:
                raise OverflowError
            process.channel.send(TakeOver(order.memory_bytes, order.mapped_bytes))
            process.channel.send(load, fds[:shared])
            if bind is not None:
                process.channel.send(bind, fds[shared:])
        except UNASKABLE:
            self._forker.kill(process)
            return None
        self.gone(process)
        process.take_over(order.worker, function, load)
        return process

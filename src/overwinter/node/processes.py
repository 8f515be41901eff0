"""The node's side of its workers: which zygote forks them, their messages, and how they end.

Everything here runs in callbacks of the event loop and never blocks. Workers are requested once the base zygote is
ready, so that its death before that causes no retry. The end of a worker is reported once: when its zygote
reports it, when that zygote is lost, or when the kernel reports the end and the zygote does not.
"""

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence

import msgspec

from overwinter.core.errors import WorkerError
from overwinter.core.ids import FunctionId, TenantId, WorkerId
from overwinter.node.ahead import REQUEST_ERRORS, AheadProcesses
from overwinter.node.answers import reportable
from overwinter.node.bindings import BindCallback
from overwinter.node.functions import DeployedFunction
from overwinter.node.log import Log
from overwinter.node.memory import anonymous_bytes
from overwinter.node.preparing import Preparing
from overwinter.node.process_identity import wait_over
from overwinter.node.recent_output import Records
from overwinter.node.registry import Registry
from overwinter.node.workers import WorkerListener, WorkerProcess, ending
from overwinter.node.zygote_process import ZygoteProcess, ZygoteSettings
from overwinter.node.zygotes import DECODE_ERRORS, Zygotes
from overwinter.worker.channel import ChannelClosedError, close_all
from overwinter.worker.messages import (
    Answer,
    Bind,
    BindFailed,
    Bound,
    Failure,
    Forked,
    ForkWorker,
    FromWorker,
    Load,
    LoadFailed,
    Measured,
    Ready,
    Stop,
    ToWorker,
    Trying,
    Unbind,
    Waiting,
)

GONE_S = 5.0
"""How long a close waits until killed workers have ended."""
LINGER_S = 1.0
"""How long a zygote may take to report the end of a worker, and a worker that closed its channel to exit."""


class Processes:
    """Forks workers from the zygotes, and receives their messages."""

    def __init__(
        self, registry: Registry, environment: Mapping[str, str], log: Log, settings: ZygoteSettings | None = None
    ) -> None:
        self._registry = registry
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._closing = False
        self._workers: dict[WorkerId, WorkerProcess] = {}
        self._records = Records()
        self._held: dict[WorkerId, ForkWorker] = {}
        """The workers that wait for the base zygote, in their order."""
        self.zygotes = Zygotes(self, environment, log, settings or ZygoteSettings())
        self._preparing = Preparing(self.zygotes, registry)
        self.prepare = self._preparing.prepare
        self.ahead = AheadProcesses(self, self._preparing, log)

    def start(self) -> None:
        """Start the base zygote; `is_up` reports when it can fork. Workers requested earlier wait for it."""
        self.zygotes.start()

    def is_up(self) -> bool:
        """Whether workers can be forked, as far as is known."""
        return self.zygotes.is_up()

    def zygote_smaps(self) -> list[int]:
        """The descriptors of the files in which the kernel counts the zygotes' memory."""
        return [zygote.smaps for zygote in self.zygotes.every() if zygote.smaps is not None]

    def worker_smaps(self) -> dict[WorkerId, int]:
        """The descriptors of the workers' `smaps` files; each is closed when its worker ends."""
        return {worker: process.smaps for worker, process in self._workers.items() if process.smaps is not None}

    def worker_pids(self) -> dict[WorkerId, int]:
        """The workers' process ids."""
        return {worker: process.pid for worker, process in self._workers.items() if process.pid is not None}

    # Messages of zygotes

    def worker_forked(self, zygote: ZygoteProcess, message: Forked, pidfd: int | None, smaps: int | None) -> None:
        """A requested worker is running; without a descriptor it has ended already."""
        process = zygote.workers.get(message.worker)
        if process is None or pidfd is None:
            close_all([fd for fd in (pidfd, smaps) if fd is not None])
            self._end_soon(zygote, process)
            return
        process.forked(zygote.channel.sender, pidfd, smaps)
        process.inherited_bytes = anonymous_bytes(zygote.pid or 0) or 0
        self._loop.add_reader(pidfd, self._process_over, zygote, process)

    def _end_soon(self, zygote: ZygoteProcess, process: WorkerProcess | None) -> None:
        """Report the end of a worker that has ended, unless its zygote reports it, with the cause, before LINGER_S."""
        if process is not None:
            self._loop.call_later(LINGER_S, self._end_worker, zygote, process.forked_as, "its process ended", process)

    def worker_ended(self, zygote: ZygoteProcess, worker: WorkerId, status: int | None, reason: str = "") -> None:
        """Handle the end of a worker, or a failed fork."""
        self._end_worker(zygote, worker, ending(status) if status is not None else f"it could not be forked: {reason}")

    def zygote_idle(self, zygote: ZygoteProcess) -> None:
        """A zygote is ready, or has finished a preparation."""
        if zygote.tenant is not None:
            self._preparing.advance(zygote.tenant)
            self.ahead.advance(zygote.tenant)
            return
        for worker, order in list(self._held.items()):
            try:
                self._order(self._workers[worker], order)
            except REQUEST_ERRORS as error:
                self.end(self._workers[worker], f"it could not be forked: {error}")

    def zygote_lost(self, zygote: ZygoteProcess, in_warm_up: bool) -> None:
        """The zygote and its programs are lost; its workers are dead, and are reported here."""
        culprit = self._preparing.lost(zygote.tenant)
        if not self._closing:
            self._registry.zygote_lost(zygote.tenant, culprit if in_warm_up else None, zygote.overran)
        for worker, process in list(zygote.workers.items()):
            process.dismissed = True
            self._end_worker(zygote, worker, ending(-signal.SIGKILL))
        if zygote.tenant is not None:
            self.ahead.advance(zygote.tenant)

    def checked(self) -> None:
        """All zygotes were checked: one may have become idle, and may be stopped for another."""
        self._preparing.check()
        self.ahead.check()
        alive = {process.family.tenant for process in self._workers.values()}
        self.zygotes.groups.keep(alive | self.zygotes.tenants.keys())

    def _process_over(self, zygote: ZygoteProcess, process: WorkerProcess) -> None:
        """Handle the kernel's report that a worker has ended."""
        assert process.pidfd is not None, "a worker without a process cannot end"
        self._loop.remove_reader(process.pidfd)
        self._end_soon(zygote, process)

    # Workers

    def fork(
        self,
        function: DeployedFunction,
        order: ForkWorker,
        load: Load,
        bind: Bind | None,
        fds: Sequence[int],
        listener: WorkerListener,
        ahead: WorkerId | None = None,
    ) -> None:
        """Fork a worker for a function's family as soon as a zygote can, or use `ahead`, which was forked in advance.
        It is sent what to load, and the function to bind first unless that follows later; `fds` are the descriptors of
        both. `listener` receives the worker's events. Raises WorkerError when the system has no resources.
        """
        process = self.ahead.take_over(ahead, function, order, load, bind, fds)
        if process is None:
            process = self._fork_new(function, order, load, bind, fds, listener)
        process.recent_output = function.recent_output = function.recent_output or self._records.of(function.family.id)
        if bind is not None:
            process.bindings.begin_first(function, bind)
        self._workers[order.worker] = process
        self.listen(process)

    def _fork_new(
        self,
        function: DeployedFunction,
        order: ForkWorker,
        load: Load,
        bind: Bind | None,
        fds: Sequence[int],
        listener: WorkerListener,
    ) -> WorkerProcess:
        try:
            process = WorkerProcess(order.worker, function, load, listener, self._log)
        except OSError as error:
            raise WorkerError(f"a worker could not be forked: {error}") from error
        load_fds = 1 if load.source_bytes is None else 2
        try:
            # A message that cannot be sent fails here, before the worker is forked.
            process.channel.send(load, fds[:load_fds])
            if bind is not None:
                process.channel.send(bind, fds[load_fds:])
            self._order(process, order)
        except REQUEST_ERRORS as error:
            process.close()
            raise WorkerError(f"a worker could not be forked: {error}") from error
        return process

    def listen(self, process: WorkerProcess) -> None:
        """Receive the messages of a worker from now on."""
        self._loop.add_reader(process.channel.fileno(), self._receive_from_worker, process)

    def _order(self, process: WorkerProcess, order: ForkWorker) -> None:
        """Ask a zygote for a worker, or wait for the base zygote; raises one of REQUEST_ERRORS."""
        zygote = self._zygote_for(process.family.tenant, order)
        if zygote is None:
            self._held[order.worker] = order
            return
        self._held.pop(order.worker, None)
        self.ask(zygote, process, order)

    def ask(self, zygote: ZygoteProcess, process: WorkerProcess, order: ForkWorker) -> None:
        """Ask a zygote for a worker; raises one of REQUEST_ERRORS."""
        tenant = process.family.tenant
        # Only the base zygote can give a process its own user.
        sent = order if zygote.tenant is None else msgspec.structs.replace(order, uid=None)
        # A process that a tenant's zygote forks is in the zygote's group from the start.
        with self.zygotes.groups.entry(tenant if zygote.tenant is None else None) as group:
            sent = msgspec.structs.replace(sent, grouped=bool(group))
            zygote.channel.send(sent, [process.far_end.fileno(), process.output.far_end, *process.buffer_fds(), *group])
        process.close_far_end()
        zygote.pending[order.worker] = 0
        zygote.workers[order.worker] = process

    def bind(self, process: WorkerProcess, function: DeployedFunction, fds: Sequence[int], done: BindCallback) -> None:
        """Let a worker bind a further function; `done` gets the result, unless the worker ends before. `fds` are the
        blocks that it lacks, then the assets. Raises ValueError for a bound function or one of another family.
        """
        if function.family != process.family:
            raise ValueError(f"{function.id} is not of the family of worker {process.worker}")
        function.recent_output = process.recent_output
        bind = function.bind()
        handed = tuple(process.bindings.lacking(bind))
        process.bindings.begin(function, bind, done)
        self.send(process, msgspec.structs.replace(bind, handed=handed, trial=None), fds)

    def unbind(self, process: WorkerProcess, function: FunctionId) -> None:
        """Let a worker unbind a function without runs in progress; raise ValueError for others."""
        process.bindings.end(function)
        self.send(process, Unbind(function))

    def _zygote_for(self, tenant: TenantId, order: ForkWorker) -> ZygoteProcess | None:
        """Return the tenant's zygote if it can fork now, otherwise the base zygote."""
        own = self.zygotes.tenants.get(tenant)
        if own is not None and own.can_fork and own.limits is not None:
            if own.limits.holds(order):
                self.zygotes.mark_used(own)
                return own
            own.small = True
        base = self.zygotes.base
        return None if base is None or "up" in base.pending else base

    def workers(self) -> list[WorkerProcess]:
        """Return all workers that have not ended; some are not forked yet."""
        return list(self._workers.values())

    def process(self, worker: WorkerId) -> WorkerProcess | None:
        """Return the worker, if it exists."""
        return self._workers.get(worker)

    def send(self, process: WorkerProcess, message: ToWorker, fds: Sequence[int] = ()) -> None:
        """Send a message to a worker. A worker that cannot receive it is killed, and its end is reported as usual."""
        try:
            process.channel.send(message, fds)
        except (ChannelClosedError, OSError):
            self.kill(process)

    def stop(self, worker: WorkerId, kill: bool) -> None:
        """Stop a worker; its end is reported when it has ended."""
        process = self._workers.get(worker) or self.ahead.workers.get(worker)
        if process is not None and (kill or worker in self._held):
            self.kill(process)
        elif process is not None:
            process.dismissed = True
            self.send(process, Stop())

    def kill(self, process: WorkerProcess) -> None:
        """Kill a worker, if it still runs."""
        process.dismissed = True
        if process.worker in self._held or self.ahead.is_unasked(process):
            self.end(process, "it was stopped before it was forked")
        elif not process.over:
            process.kill()

    def _receive_from_worker(self, process: WorkerProcess) -> None:
        try:
            message, _ = process.channel.receive()
            self._handle(process, message)
        except BlockingIOError:
            return
        except ChannelClosedError:
            # No further message will come. The zygote reports the exit; kill a worker that only closed its channel.
            self._loop.remove_reader(process.channel.fileno())
            self._loop.call_later(LINGER_S, self.kill, process)
        except DECODE_ERRORS as error:
            self.give_up(process, f"it sent an invalid message: {error}")

    def _handle(self, process: WorkerProcess, message: FromWorker) -> None:
        """Handle a message; raise ValueError for an impossible one: the code of a function may send any message."""
        match message:
            case Answer():
                process.listener.worker_answered(process, message)
            case Trying():
                _require(not (process.ready or process.tried), "its trial had already begun")
                process.tried = True
            case Waiting():
                _require(process.is_ahead and not process.waits, "it was not forked in advance")
                process.waits = True
                self._registry.worker_waits(process)
            case Ready():
                _require(not process.ready, "it was already ready")
                process.bindings.answered(process.function)
                process.ready = True
                process.listener.worker_ready(process, message)
            case Bound(function):
                process.bindings.answered(function)(None)
            case BindFailed(function):
                report = process.bindings.answered(function)
                self.unbind(process, FunctionId(function))
                report(reportable(message))
            case Measured():
                process.listener.worker_measured(process, message)
            case LoadFailed():
                _require(not process.ready and process.failure is None, "it was already loaded")
                process.failure = reportable(message)

    def give_up(self, process: WorkerProcess, reason: str, error: str = "WorkerError") -> None:
        """Stop listening to a worker and kill it; its end is reported with this reason."""
        process.failure = Failure(error, reason)
        self._loop.remove_reader(process.channel.fileno())
        self.kill(process)

    def _end_worker(
        self, zygote: ZygoteProcess, worker: WorkerId, reason: str, this: WorkerProcess | None = None
    ) -> None:
        """Report a worker's end once, and make sure that it has ended. `this`: only if it is still this process."""
        process = zygote.workers.get(worker)
        if process is None or this not in (None, process):
            return
        del zygote.workers[worker]
        if this is not None:
            zygote.unreported_exits.add(worker)
        self.end(process, reason)

    def end(self, process: WorkerProcess, reason: str) -> None:
        """Report the end of a worker that no zygote knows any more."""
        worker = process.worker
        self._workers.pop(worker, None)
        self._held.pop(worker, None)
        self.ahead.gone(process)
        process.kill()
        process.over = True
        self._read_last_messages(process)
        self._loop.remove_reader(process.channel.fileno())
        if process.pidfd is not None:
            self._loop.remove_reader(process.pidfd)
        process.close()
        failure = process.failure or process.ended(reason)
        process.listener.worker_exited(process, failure.error, failure.message)

    def _read_last_messages(self, process: WorkerProcess) -> None:
        """Read the last message of a worker that could not load: it may exit before the message is read."""
        try:
            while process.failure is None:
                message, _ = process.channel.receive()
                if isinstance(message, LoadFailed):
                    process.failure = reportable(message)
                elif isinstance(message, Trying):
                    process.tried = True
                elif isinstance(message, Answer):
                    process.listener.worker_answered(process, message)
        except (BlockingIOError, ChannelClosedError, OSError, *DECODE_ERRORS):
            return

    async def close(self) -> None:
        """Kill all processes, and wait until they have ended."""
        self._closing = True
        workers = [*self._workers.values(), *self.ahead.workers.values()]
        for process in workers:
            process.kill()
        for zygote in self.zygotes.every():
            zygote.workers.clear()
        await self.zygotes.close()
        pidfds = [os.dup(process.pidfd) for process in workers if process.pidfd is not None]
        await asyncio.to_thread(wait_over, pidfds, GONE_S)
        for process in workers:
            self._loop.remove_reader(process.channel.fileno())
            if process.pidfd is not None:
                self._loop.remove_reader(process.pidfd)
            process.close()


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)

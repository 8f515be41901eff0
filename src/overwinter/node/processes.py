"""The node's side of its workers: what they are forked for, what they are told and what they answer."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

from overwinter.core.errors import WorkerError
from overwinter.core.ids import Address, FunctionId, StoreName, WorkerId
from overwinter.node.ahead import AheadProcesses
from overwinter.node.answers import reportable
from overwinter.node.bindings import BindCallback
from overwinter.node.closing import ClosingThread
from overwinter.node.contained import ProcessFiles
from overwinter.node.fair_queue import FairQueue
from overwinter.node.forks import REQUEST_ERRORS, Forks
from overwinter.node.functions import DeployedFunction
from overwinter.node.log import Log
from overwinter.node.output import Outputs
from overwinter.node.preparing import Preparing
from overwinter.node.recent_output import Records
from overwinter.node.registry import Registry
from overwinter.node.workers import WorkerListener, WorkerProcess
from overwinter.node.zygote_process import ZygoteProcess, ZygoteSettings
from overwinter.node.zygotes import Zygotes
from overwinter.worker.messages import (
    Answer,
    Bind,
    BindFailed,
    Bound,
    Forked,
    ForkWorker,
    FromWorker,
    Load,
    LoadFailed,
    Measured,
    PoolCall,
    Ready,
    Trying,
    Unbind,
    Waiting,
    WarmedUp,
)


class Processes:
    """The workers, and the processes forked ahead to become workers."""

    def __init__(
        self, registry: Registry, environment: Mapping[str, str], log: Log, settings: ZygoteSettings | None = None
    ) -> None:
        self._registry = registry
        self.files = ProcessFiles(Outputs(log), ClosingThread())
        self._closing = False
        self._workers: dict[WorkerId, WorkerProcess] = {}
        self._records = Records()
        self.zygotes = Zygotes(self, environment, self.files.outputs, settings or ZygoteSettings())
        self.queue = FairQueue()
        """The queue of the messages of workers and executors, and of checks of what they contain; the tenants take
        turns.
        """
        self.forks = Forks(self.zygotes, self.queue)
        self._preparing = Preparing(self.zygotes, registry)
        self.prepare = self._preparing.prepare
        self.ahead = AheadProcesses(self, self._preparing, self.files)

    def start(self) -> None:
        """Start the base zygote; `is_up` reports when it can fork. Workers requested earlier wait for it. Raises
        OSError.
        """
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
        """A requested process is running; without `pidfd` it has ended already."""
        self.forks.forked(zygote, message, pidfd, smaps)
        self.forks.ask_waiting()

    def worker_ended(self, zygote: ZygoteProcess, worker: WorkerId, status: int | None, reason: str = "") -> None:
        """Handle the end of a process, or a failed fork."""
        self.forks.ended(zygote, worker, status, reason)
        self.forks.ask_waiting()

    def zygote_can_fork(self, zygote: ZygoteProcess) -> None:
        """A zygote is ready, or has finished a preparation."""
        if zygote.tenant is not None:
            self._preparing.advance(zygote.tenant)
            self.ahead.advance(zygote.tenant)
        self.forks.ask_waiting()

    def zygote_lost(self, zygote: ZygoteProcess, in_preparation: bool) -> None:
        """The zygote and its programs are lost; its workers are dead, and are reported here."""
        last_compiled = self._preparing.lost(zygote.tenant)
        if not self._closing:
            compiling = last_compiled if in_preparation else None
            self._registry.zygote_lost(zygote.tenant, compiling, zygote.preparation_timed_out)
        self.forks.lost(zygote)
        self.forks.ask_waiting()
        if zygote.tenant is not None:
            self.ahead.advance(zygote.tenant)

    def checked(self) -> None:
        """All zygotes were checked: one may have become idle, and may be stopped for another."""
        self._preparing.check()
        self.ahead.check()
        self.forks.ask_waiting()
        self.zygotes.groups.keep(self.forks.tenants() | self.zygotes.tenants.keys())

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
        """Fork a worker for a function's family as soon as a zygote can, or use `ahead`, which was forked ahead.
        It is sent what to load, and the function to bind first unless that follows later; `fds` are the descriptors of
        both. `listener` receives the worker's events, unless `ahead` is used, which has a listener. Raises WorkerError
        when the system has no resources, or the node is stopping.
        """
        process = self.ahead.take_over(ahead, function, order, load, bind, fds)
        if process is None:
            process = self._fork_new(function, order, load, bind, fds, listener)
        process.recent_output = function.recent_output = function.recent_output or self._records.of(function.family_id)
        if bind is not None:
            process.bindings.begin_first(function, bind, fds[_load_fds(load) :])
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
        if self.forks.closing:
            raise WorkerError("a worker could not be forked: the node is stopping")
        try:
            process = WorkerProcess(order.worker, function, load, listener, self.files)
        except OSError as error:
            raise WorkerError(f"a worker could not be forked: {error}") from error
        load_fds = _load_fds(load)
        try:
            # A message that cannot be sent fails here, before the worker is forked.
            process.channel.send(load, fds[:load_fds])
            if bind is not None:
                process.channel.send(bind, fds[load_fds:])
            self.forks.request(process, order)
        except REQUEST_ERRORS as error:
            process.close()
            raise WorkerError(f"a worker could not be forked: {error}") from error
        return process

    def listen(self, process: WorkerProcess) -> None:
        """Receive the messages of a worker from now on."""
        self.forks.listen(process, partial(self._handle, process), partial(self._ended, process))

    def bind(
        self, process: WorkerProcess, function: DeployedFunction, bind: Bind, fds: Sequence[int], done: BindCallback
    ) -> None:
        """Let a worker bind a further function with its message; `done` gets the result, unless the worker ends before.
        `fds`: the descriptors of the blocks that the message hands over, then of the assets. Raises ValueError for a
        bound function or one of another family.
        """
        if function.family != process.family:
            raise ValueError(f"{function.id} is not of the family of worker {process.worker}")
        function.recent_output = process.recent_output
        process.bindings.begin(function, bind, done, fds)
        self.forks.send(process, bind, fds)

    def unbind(self, process: WorkerProcess, function: FunctionId) -> None:
        """Let a worker unbind a function without runs in progress; raise ValueError if it is not bound."""
        process.bindings.end(function)
        self.forks.send(process, Unbind(function))

    def workers(self) -> list[WorkerProcess]:
        """Return all workers that have not ended; some are not forked yet."""
        return list(self._workers.values())

    def mark_dropped(self, store: StoreName, addresses: frozenset[Address]) -> None:
        """Record that the files of these blocks were dropped from a host store."""
        blocks = frozenset((store, address) for address in addresses)
        for process in self._workers.values():
            process.bindings.mark_dropped(blocks)

    def process(self, worker: WorkerId) -> WorkerProcess | None:
        """Return the worker, if it exists."""
        return self._workers.get(worker)

    def stop(self, worker: WorkerId, kill: bool) -> None:
        """Stop a worker; its end is reported when it has ended."""
        process = self._workers.get(worker) or self.ahead.workers.get(worker)
        if process is not None:
            self.forks.stop(process, kill)

    def _handle(self, process: WorkerProcess, message: FromWorker) -> None:  # noqa: C901
        """Handle a message; raise ValueError for an impossible one: the code of a function may send any message."""
        match message:
            case Answer():
                process.listener.worker_answered(process, message)
            case PoolCall():
                process.listener.worker_calls(process, message)
            case Trying():
                _require(not (process.ready or process.trial_began), "its trial had already begun")
                process.trial_began = True
            case Waiting():
                _require(process.is_ahead and not process.waits, "it was not forked ahead")
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
            case WarmedUp():
                raise ValueError("only an executor is warmed up")
            case Measured():
                process.listener.worker_measured(process, message)
            case LoadFailed():
                _require(not process.ready and process.failure is None, "its load had already ended")
                process.failure = reportable(message)

    def _ended(self, process: WorkerProcess, how: str) -> None:
        """Report the end of a worker."""
        self._workers.pop(process.worker, None)
        self.ahead.remove(process)
        failure = process.failure or process.end_failure(how)
        process.listener.worker_exited(process, failure.error, failure.message)

    async def close(self) -> None:
        """Kill all processes, and wait until they have ended."""
        self._closing = True
        await self.forks.close()
        await asyncio.to_thread(self.files.closing.end)


def _load_fds(load: Load) -> int:
    """The number of descriptors that are sent with a load."""
    return 1 if load.source_bytes is None else 2


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)

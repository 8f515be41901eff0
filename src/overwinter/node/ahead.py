"""Forks workers ahead, and uses one of them for the next start of a function.

A tenant's zygote forks them after it has prepared all requested programs. Until a start uses such a worker, it has
the tenant's compiled programs, but no weights, assets or handler. Then it is a worker like any other, with the worker
id of that start. If it has ended, its limits are too low or the start needs concurrent runs, the start forks a worker
as usual.
"""

from collections.abc import Sequence
from typing import Protocol

from overwinter.core.errors import WorkerError
from overwinter.core.ids import TenantId, WorkerId
from overwinter.node.contained import ProcessFiles
from overwinter.node.forks import REQUEST_ERRORS, Forks
from overwinter.node.functions import DeployedFunction
from overwinter.node.log_throttle import LogThrottle
from overwinter.node.preparing import Preparing
from overwinter.node.workers import WorkerListener, WorkerProcess
from overwinter.node.zygote_process import ForkLimits
from overwinter.node.zygotes import Zygotes
from overwinter.worker.messages import Bind, ForkWorker, Load, TakeOver


class Forker(Protocol):
    """What this module needs of `Processes`."""

    zygotes: Zygotes
    forks: Forks

    def listen(self, process: WorkerProcess) -> None:
        """Receive the messages of a worker from now on."""
        ...


class AheadProcesses:
    """The processes that were requested ahead and are not used yet."""

    def __init__(self, forker: Forker, preparing: Preparing, files: ProcessFiles) -> None:
        self._forker = forker
        self._preparing = preparing
        self._files = files
        self._throttle = LogThrottle(files.outputs.log)
        self.workers: dict[WorkerId, WorkerProcess] = {}
        self._limits: dict[WorkerId, ForkLimits | None] = {}
        """The limits of the zygote that was asked for each process; None: no zygote was asked yet."""

    def fork(self, function: DeployedFunction, worker: WorkerId, listener: WorkerListener) -> None:
        """Fork a process from the zygote of the function's tenant as soon as possible; raise WorkerError when there is
        no zygote, resources are lacking or the node stops. `listener` receives its events.
        """
        tenant = function.family.tenant
        if self._forker.forks.closing or tenant not in self._forker.zygotes.tenants:
            raise WorkerError(f"no process can be forked ahead: {tenant} has no zygote, or the node is stopping")
        try:
            process = WorkerProcess(worker, function, function.load_message(bare=True), listener, self._files)
        except OSError as error:
            raise WorkerError(f"a worker could not be forked: {error}") from error
        process.is_ahead = True
        self.workers[worker], self._limits[worker] = process, None
        self._forker.listen(process)
        self.advance(tenant)

    def check(self) -> None:
        """Advance the tenants with requested processes for which no zygote was asked yet."""
        for tenant in {
            process.family.tenant for worker, process in self.workers.items() if self._limits[worker] is None
        }:
            self.advance(tenant)

    def advance(self, tenant: TenantId) -> None:
        """Ask the tenant's zygote for the requested processes for which no zygote was asked yet, if it can fork and has
        prepared all its programs.

        If the zygote has ended or its last fork failed, these processes are ended: the scheduler would otherwise count
        them as starting for as long as the zygote cannot fork.
        """
        zygote = self._forker.zygotes.tenants.get(tenant)
        for process in self._unasked(tenant):
            if zygote is None or zygote.limits is None or zygote.fork_failed:
                self._forker.forks.end(process, "its tenant's zygote has ended, or cannot fork")
            elif zygote.can_fork and not self._preparing.has_waiting(tenant):
                self._limits[process.worker] = zygote.limits
                try:
                    self._forker.forks.ask(
                        zygote, process, ForkWorker(process.worker, None, *zygote.limits, ahead=True)
                    )
                except REQUEST_ERRORS as error:
                    self._forker.forks.end(process, f"it could not be forked: {error}")

    def _unasked(self, tenant: TenantId) -> list[WorkerProcess]:
        return [
            process
            for worker, process in self.workers.items()
            if self._limits[worker] is None and process.family.tenant == tenant
        ]

    def remove(self, process: WorkerProcess) -> None:
        """Remove a process that has ended or has become a worker, if it is one of these."""
        if self.workers.get(process.worker) is process:
            del self.workers[process.worker], self._limits[process.worker]

    def give_up(self, process: WorkerProcess, why: str) -> None:
        """Kill a process that uses more memory or computes more than a waiting process may. The log gets `why`, unless
        it got another such line on the tenant recently.
        """
        tenant = process.family.tenant
        self._throttle.log(tenant, f"a process forked ahead for {tenant} was ended: {why}")
        self._forker.forks.kill(process)

    def take_over(
        self,
        worker: WorkerId | None,
        function: DeployedFunction,
        order: ForkWorker,
        load: Load,
        bind: Bind | None,
        fds: Sequence[int],
    ) -> WorkerProcess | None:
        """Make the process forked ahead with the id `worker` the worker that `order` requests, and return it. None:
        there is no such process, or it could not be used and is killed.
        """
        process = None if worker is None else self.workers.get(worker)
        if worker is None or process is None:
            return None
        assert process.family.tenant == function.family.tenant, "it was forked by another tenant's zygote"
        limits, load_fds = self._limits[worker], 1 if load.source_bytes is None else 2
        try:
            if limits is None or not limits.allow(order) or load.concurrency > 1:
                raise OverflowError
            process.channel.send(TakeOver(order.memory_bytes, order.mapped_bytes))
            process.channel.send(load, fds[:load_fds])
            if bind is not None:
                process.channel.send(bind, fds[load_fds:])
        except REQUEST_ERRORS:
            self._forker.forks.kill(process)
            return None
        self.remove(process)
        process.take_over(order.worker, function, load)
        return process

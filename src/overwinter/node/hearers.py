"""Who hears of workers, and of what?"""

from typing import Protocol

from overwinter.core.ids import FunctionId, TenantId
from overwinter.node.preparing import Source
from overwinter.node.workers import WorkerProcess
from overwinter.worker.messages import Answer, Measured, Ready


class WorkerHearer(Protocol):
    """Who hears of a worker: the effects, or whoever measures it."""

    def worker_ready(self, process: WorkerProcess, ready: Ready) -> None:
        """The worker is loaded."""
        ...

    def worker_answered(self, process: WorkerProcess, answer: Answer) -> None:
        """The worker ran something; ValueError if the answer cannot be true."""
        ...

    def worker_measured(self, process: WorkerProcess, measured: Measured) -> None:
        """The worker told of itself; ValueError if nobody asked."""
        ...

    def worker_exited(self, process: WorkerProcess, error: str, reason: str) -> None:
        """The worker is gone."""
        ...


class Hearer(WorkerHearer, Source, Protocol):
    """Who hears of all the processes: the effects."""

    def worker_waits(self, process: WorkerProcess) -> None:
        """A worker that was forked ahead can be taken over."""
        ...

    def zygote_lost(self, tenant: TenantId | None, culprit: FunctionId | None, overran: bool) -> None:
        """What was prepared for a tenant is gone, with None for all; `culprit` was being warmed up, for too long if it
        overran.
        """
        ...

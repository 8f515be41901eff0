"""The interfaces of listeners for events of workers."""

from typing import Protocol

from overwinter.core.ids import FunctionId, TenantId
from overwinter.node.preparing import Source
from overwinter.node.workers import WorkerProcess
from overwinter.worker.messages import Answer, Measured, Ready


class WorkerHearer(Protocol):
    """A listener for events of one worker: the effects, or a measurement."""

    def worker_ready(self, process: WorkerProcess, ready: Ready) -> None:
        """The worker is loaded."""
        ...

    def worker_answered(self, process: WorkerProcess, answer: Answer) -> None:
        """The worker ran something; ValueError if the answer cannot be true."""
        ...

    def worker_measured(self, process: WorkerProcess, measured: Measured) -> None:
        """The worker sent its measurements; ValueError if they were not requested."""
        ...

    def worker_exited(self, process: WorkerProcess, error: str, reason: str) -> None:
        """The worker ended."""
        ...


class Hearer(WorkerHearer, Source, Protocol):
    """The listener for events of all processes: the effects."""

    def worker_waits(self, process: WorkerProcess) -> None:
        """A worker that was forked ahead can be taken over."""
        ...

    def zygote_lost(self, tenant: TenantId | None, culprit: FunctionId | None, overran: bool) -> None:
        """The prepared programs of a tenant are lost, with None of all; `culprit` was being warmed up, for too long if
        it overran.
        """
        ...

"""The interface of the listener for events of all processes."""

from typing import Protocol

from overwinter.core.ids import FunctionId, TenantId
from overwinter.node.preparing import Source
from overwinter.node.workers import WorkerProcess


class Hearer(Source, Protocol):
    """Hears of zygotes and of processes that were forked ahead: the registry."""

    def worker_waits(self, process: WorkerProcess) -> None:
        """A worker that was forked ahead can be taken over."""
        ...

    def zygote_lost(self, tenant: TenantId | None, culprit: FunctionId | None, overran: bool) -> None:
        """The prepared programs of a tenant are lost, with None of all; `culprit` was being warmed up, for too long if
        it overran.
        """
        ...

"""Records of operations in progress: a run, a bind, the start of a worker, the fork of a process in advance (ahead.py),
or a transfer to a device without a run, from its start until an event ends it.
"""

from math import inf
from typing import TYPE_CHECKING

import msgspec

from overwinter.core.ids import FunctionId, OperationId, RequestId, Seconds

if TYPE_CHECKING:
    from overwinter.scheduler.state import Function


class Part(msgspec.Struct, frozen=True, eq=False):
    """The requests of one function in a run."""

    function: "Function"
    requests: tuple[RequestId, ...]


class Operation(msgspec.Struct, eq=False):
    """One operation."""

    function: "Function"
    """The function that runs, that leads a shared run (shared_runs.py), that is bound, whose blocks are brought, or for
    which the process is forked.
    """
    began: Seconds
    ends: float
    """The expected end; the time of the start if nothing is known of the duration."""
    overdue_at: float
    """When it no longer holds its cores, so that a hung operation leaves them to others."""
    hangs_at: float
    """When it counts as hung; infinite: a handler waits for the answer of its program on the pool."""
    parts: tuple[Part, ...] = ()
    """The requests of each function in a run, those of the leading function first."""
    called_pool: bool = False
    """Whether its handler called the pool for a program that may also run in the worker: its time then tells nothing
    about workers.
    """
    id: OperationId | None = None
    """The id that the answer of a bind repeats."""
    drain_until: float = inf
    """When a run on a device must have ended, because others wait for the device, or functions of it are `leaving`."""
    leaving: tuple[FunctionId, ...] = ()
    """The functions that leave the device even if nobody waits for it: they were removed or unloaded, or another tenant
    waits for their bytes in the host store.
    """
    unloaded: tuple[FunctionId, ...] = ()
    """The functions that were unloaded since a run on a device began, even if they are loaded again by now."""

    @property
    def overdue_s(self) -> float:
        """How long it may take before it is overdue."""
        return self.overdue_at - self.began

    @property
    def requests(self) -> tuple[RequestId, ...]:
        """All requests of a run."""
        if len(self.parts) == 1:
            return self.parts[0].requests
        return tuple(id_ for part in self.parts for id_ in part.requests)

    @property
    def functions(self) -> "list[Function]":
        """The functions of the operation: for a run, each with requests in it."""
        return [part.function for part in self.parts] or [self.function]

    def of(self, function: "Function") -> tuple[RequestId, ...]:
        """The requests of one function in the run."""
        return tuple(id_ for part in self.parts if part.function is function for id_ in part.requests)


def hung_text(function: "Function") -> str:
    """Return why a run of the function was stopped, and the way out."""
    timeout_s = function.spec.settings.timeout_s
    return f"its run did not end within its timeout of {timeout_s:g} s: set a longer timeout_s if it may take so long"


def run_limit_s(parts: tuple[Part, ...], overdue_s: float) -> float:
    """Return how long a run may last. A shared run may last half of the shortest timeout, so that each function can
    then be tried separately, or until it is overdue if that is later, but at most the longest timeout.
    """
    if len(parts) == 1:
        return parts[0].function.spec.settings.timeout_s
    timeouts = [part.function.spec.settings.timeout_s for part in parts]
    return min(max(timeouts), max(min(timeouts) / 2, overdue_s))

"""Records of operations under way: a run, a bind, or the start of a worker, from its begin until an event ends it."""

from typing import TYPE_CHECKING

import msgspec

from overwinter.core.ids import OperationId, RequestId, Seconds

if TYPE_CHECKING:
    from overwinter.scheduler.state import Function


class Part(msgspec.Struct, frozen=True, eq=False):
    """The requests of one function in a run."""

    function: "Function"
    requests: tuple[RequestId, ...]


class Operation(msgspec.Struct, eq=False):
    """One operation."""

    function: "Function"
    """For whom: the one that runs, or that leads a run of several, that is bound, or that the worker is forked for."""
    began: Seconds
    ends: float
    """When it should end."""
    overdue_at: float
    """When it is taken to keep its cores no more, so that nothing that hangs keeps others out."""
    hangs_at: float
    """When it will not end any more."""
    parts: tuple[Part, ...] = ()
    """Of a run: the requests of each function in it, those of the one that leads first."""
    id: OperationId | None = None
    """Of a bind: what its answer repeats."""

    @property
    def requests(self) -> tuple[RequestId, ...]:
        """All that a run has."""
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

"""A request as the scheduler sees it: its function, and when it is due."""

import msgspec

from overwinter.core.actions import WARMEST_FIRST, Start
from overwinter.core.ids import FunctionId, RequestId, RunId, Seconds, TenantId, WorkerId


class Request(msgspec.Struct):
    """One request between its arrival and its answer."""

    id: RequestId
    function: FunctionId
    """The function that was called."""
    tenant: TenantId
    arrived: Seconds
    deadline: Seconds
    level: int
    """Lower levels go first."""
    due: float
    """When the SLO is missed; without an SLO, a time after the arrival by which requests are ordered."""
    start: Start = "warm"
    failures: int = 0
    """The attempts that have failed: a worker or an executor died in them, or no worker could start."""
    too_large: bool = False
    """Whether a device lacked the memory for what it computes, so that it goes to no device again."""
    part: FunctionId | None = None
    """The part of the function in whose queue or run the request is: a later slice of the program, or, with
    `device = "any"`, the program on the pool. None: it is in the queue or a run of the function itself.
    """
    earlier_start: Start = "warm"
    """The coldest start that an earlier slice needed."""
    caller: tuple[WorkerId, RunId] | None = None
    """The run of a handler that waits for the answer."""

    @property
    def holder(self) -> FunctionId:
        """The function in whose queue or run it is."""
        return self.part or self.function

    @property
    def coldest_start(self) -> Start:
        """The coldest start that any of its slices needed."""
        return max(self.start, self.earlier_start, key=WARMEST_FIRST.index)

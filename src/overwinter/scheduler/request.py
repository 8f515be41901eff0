"""A request as the scheduler sees it: its function, and when it is due."""

import msgspec

from overwinter.core.actions import Start
from overwinter.core.ids import FunctionId, RequestId, Seconds, TenantId


class Request(msgspec.Struct):
    """One request between its arrival and its answer."""

    id: RequestId
    function: FunctionId
    tenant: TenantId
    arrived: Seconds
    deadline: Seconds
    level: int
    """Lower ones go first."""
    due: float
    """When it is late."""
    start: Start = "warm"
    failures: int = 0
    """Times that a worker died under it, or could not start for it."""

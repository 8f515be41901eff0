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
    """Lower levels go first."""
    due: float
    """When the SLO is missed."""
    start: Start = "warm"
    failures: int = 0
    """How often a worker died while it ran the request, or could not start for it."""

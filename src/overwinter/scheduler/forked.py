"""Records of a process that was forked ahead, and of a tenant's need of such processes."""

import msgspec

from overwinter.core.ids import Address, FunctionId, Seconds, TenantId, WorkerId
from overwinter.scheduler.operation import Operation

AHEAD_BYTES = 4 << 20
"""Private memory that a process forked ahead counts for. It computes nothing, so it takes what it took at first."""


class ForkedAhead(msgspec.Struct, eq=False):
    """One process of a tenant, from its fork until a start uses it, or its exit."""

    id: WorkerId
    tenant: TenantId
    programs: frozenset[Address]
    """Those that its zygote held when it was asked for."""
    since: Seconds
    """When it began to start, wait or stop."""
    start: Operation | None
    """Under way until it waits."""
    stopping: bool = False
    """Told to stop; its exit answers."""


class Need(msgspec.Struct):
    """What determines a tenant's need of processes forked ahead."""

    function: FunctionId = FunctionId("")
    """The last one that was started; empty: none was."""
    started: Seconds = Seconds(0.0)
    """When that was."""
    failures: int = 0
    """Deaths in a row of what was forked ahead."""
    backoff_until: Seconds = Seconds(0.0)

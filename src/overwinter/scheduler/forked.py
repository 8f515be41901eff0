"""Records of a process forked ahead, and of what decides whether more are forked for a tenant."""

import msgspec

from overwinter.core.ids import Address, FunctionId, Seconds, TenantId, WorkerId
from overwinter.scheduler.operation import Operation

AHEAD_BYTES = 4 << 20
"""The private memory that a process forked ahead counts for. It computes nothing, so its memory does not grow."""


class ForkedAhead(msgspec.Struct, eq=False):
    """One process of a tenant, from its fork until a start uses it, or its exit."""

    id: WorkerId
    tenant: TenantId
    programs: frozenset[Address]
    """The programs that its zygote had when it was requested."""
    since: Seconds
    """When it began to start, wait or stop."""
    start: Operation | None
    """The start operation; None when it waits."""
    stopping: bool = False
    """Whether it is stopping; its exit is awaited."""


class ForkFigures(msgspec.Struct):
    """The figures that decide whether processes are forked ahead for a tenant."""

    function: FunctionId = FunctionId("")
    """The last function that was started; empty: none."""
    started: Seconds = Seconds(0.0)
    """The time of that start."""
    failures: int = 0
    """The processes forked ahead that died or hung since a start last used one."""
    backoff_until: Seconds = Seconds(0.0)

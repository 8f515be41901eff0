"""The queue for cores, as data; order.py maintains it."""

import msgspec

from overwinter.core.ids import FunctionId, TenantId


class CoreQueue(msgspec.Struct):
    """The functions whose requests wait for a core."""

    due: list[tuple[int, float, int, FunctionId]] = msgspec.field(default_factory=list)
    """A heap of (level, due, number, function). An entry is valid while it is in `timely`."""
    timely: dict[FunctionId, tuple[int, float, int, FunctionId]] = msgspec.field(default_factory=dict)
    """The functions whose first request is not late, or has a level before ORDINARY. Of equal due times, the longest
    waiting has the lowest number.
    """
    late: dict[FunctionId, None] = msgspec.field(default_factory=dict)
    """The functions with a late request, the longest waiting first."""
    tenants: dict[TenantId, dict[FunctionId, None]] = msgspec.field(default_factory=dict)
    """The functions of each tenant that waits, the longest waiting first."""
    for_workers: dict[FunctionId, None] = msgspec.field(default_factory=dict)
    """Functions whose requests wait for a slot, and that got no further worker while all cores were in use: they are
    asked again when one is free, after the functions that wait for it.
    """
    number: int = 0
    """The number of the last function that joined `timely`."""
    assigned: int = 0
    """How often a core was assigned to `first_for_cores`. Urgent runs and tenants without a core are not counted."""

    @property
    def waits(self) -> bool:
        """Whether any function waits."""
        return bool(self.timely or self.late)

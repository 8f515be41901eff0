"""The record of a tenant: its workers and queues."""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from overwinter.core.ids import Address, FunctionId, StoreName, TenantId, WorkerId
from overwinter.scheduler.forked import ForkFigures

if TYPE_CHECKING:
    from overwinter.scheduler.state import Worker


class Tenant(msgspec.Struct):
    """A tenant's workers and queues, in addition to its claims in the ledger."""

    id: TenantId
    functions: dict[FunctionId, None] = msgspec.field(default_factory=dict)
    held: Counter[tuple[StoreName, Address]] = msgspec.field(default_factory=Counter)
    """The number of its functions that have or await each block in each host store."""
    spare: "dict[WorkerId, Worker]" = msgspec.field(default_factory=dict)
    """Its idle workers for which no request waits, the one spare longest first."""
    draining_without_limit: "dict[WorkerId, Worker]" = msgspec.field(default_factory=dict)
    """Its workers that drain without a time limit."""
    starting: "dict[WorkerId, Worker]" = msgspec.field(default_factory=dict)
    """Its workers that start, in the order in which they began."""
    time_slice_ends: list[tuple[float, WorkerId]] = msgspec.field(default_factory=list)
    """A heap of the ends of the time slices of its serving workers; entries of workers that no longer serve are removed
    later.
    """
    first_workers: dict[FunctionId, None] = msgspec.field(default_factory=dict)
    """Its functions that wait for capacity for their first worker, the longest waiting first."""
    more_workers: dict[FunctionId, None] = msgspec.field(default_factory=dict)
    """Its functions that have a worker, or can be bound in one, and wait for capacity for one more or for memory."""
    fork_figures: ForkFigures = msgspec.field(default_factory=ForkFigures)
    """The figures that decide whether processes are forked ahead for it."""

    def hold(self, store: StoreName, addresses: Iterable[Address]) -> None:
        """Count a function with these blocks in a host store."""
        self.held.update((store, address) for address in addresses)

    def release(self, store: StoreName, addresses: Iterable[Address]) -> None:
        """Count a function with these blocks in a host store no longer."""
        for block in ((store, address) for address in addresses):
            if self.held[block] > 1:
                self.held[block] -= 1
            else:
                del self.held[block]

    @property
    def first_waiting(self) -> FunctionId | None:
        """The first of its functions that wait for capacity."""
        return next(iter(self.first_workers or self.more_workers), None)

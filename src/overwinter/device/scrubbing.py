"""Which tenant's bytes lie in which part of an arena, so that a part is cleared before another tenant gets it."""

from collections.abc import Iterator
from itertools import pairwise

from overwinter.core.ids import TenantId


class Tenancy:
    """The tenant that last had each range of memory; None for memory that holds zeros."""

    def __init__(self, nbytes: int) -> None:
        self._starts: list[tuple[int, TenantId | None]] = [(0, None)]
        """Start and tenant of each range, ascending."""
        self._nbytes = nbytes

    def ranges(self, start: int, stop: int) -> Iterator[tuple[int, int, TenantId | None]]:
        """Yield the ranges between two offsets."""
        for (first, tenant), (end, _) in pairwise([*self._starts, (self._nbytes, None)]):
            if first < stop and end > start:
                yield max(first, start), min(end, stop), tenant

    def others(self, start: int, stop: int, tenant: TenantId) -> list[tuple[int, int]]:
        """Return the ranges that may hold another tenant's bytes."""
        return [(first, end) for first, end, had in self.ranges(start, stop) if had not in (None, tenant)]

    def give(self, start: int, stop: int, tenant: TenantId) -> None:
        """The range now holds this tenant's bytes, and no other's."""
        new = [
            *((first, had) for first, _, had in self.ranges(0, start)),
            (start, tenant),
            *((first, had) for first, _, had in self.ranges(stop, self._nbytes)),
        ]
        self._starts = [each for at, each in enumerate(new) if at == 0 or each[1] != new[at - 1][1]]

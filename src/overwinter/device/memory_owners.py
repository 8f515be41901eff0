"""Which tenant's bytes lie in which part of an arena, so that memory is cleared before another tenant gets it."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from overwinter.core.ids import TenantId


class MemoryOwners:
    """The tenant that last had each range of memory; None for memory that holds zeros."""

    def __init__(self, nbytes: int) -> None:
        self._starts = [0]
        """The start of each range, ascending."""
        self._tenants: list[TenantId | None] = [None]
        """The tenant of each range, never the same as that of the next one."""
        self._nbytes = nbytes

    def ranges(self, start: int, stop: int) -> Iterator[tuple[int, int, TenantId | None]]:
        """Yield the ranges between two offsets: their start, stop and tenant."""
        at = self._at(start)
        while at < len(self._starts) and self._starts[at] < stop:
            end = self._starts[at + 1] if at + 1 < len(self._starts) else self._nbytes
            yield max(self._starts[at], start), min(end, stop), self._tenants[at]
            at += 1

    def others(self, start: int, stop: int, tenant: TenantId) -> list[tuple[int, int]]:
        """Return the ranges that may hold another tenant's bytes."""
        return [(first, end) for first, end, had in self.ranges(start, stop) if had not in (None, tenant)]

    def give(self, start: int, stop: int, tenant: TenantId) -> None:
        """The range now holds this tenant's bytes, and no other's."""
        pieces: list[tuple[int, TenantId | None]] = [(start, tenant)]
        if stop < self._nbytes:
            pieces.append((stop, self._tenants[self._at(stop)]))
        first, last = bisect_left(self._starts, start), bisect_right(self._starts, stop)
        had, starts = self._tenants[max(0, first - 1) : first], []
        for at, each in pieces:
            # A range of the same tenant as the one before it only extends that one.
            if had[-1:] != [each]:
                starts.append(at)
                had.append(each)
        self._starts[first:last] = starts
        self._tenants[max(0, first - 1) : last] = had

    def _at(self, offset: int) -> int:
        """Return the number of the range that contains an offset."""
        return bisect_right(self._starts, offset) - 1

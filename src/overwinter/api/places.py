"""Divides places among callers, so that some are left for callers with few.

A caller is the tenant of a token, or without tokens a client's address.
"""

from collections import Counter

RESERVED_DIVISOR = 4
"""One place in this many is reserved for callers with few."""
FEW_DIVISOR = 256
"""A caller with at most one place in this many, or with one, has few."""


class Places:
    """A number of places. A caller may have as many as are free: a single caller half of them, two a third each
    (Choudhury and Hahne's dynamic thresholds). One that comes after them gets half of what they left, but the last
    places are only for callers with few.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.taken = 0
        self.of: Counter[str] = Counter()
        """The places of each caller that has any."""
        self._reserved = most // RESERVED_DIVISOR
        self._few = max(1, most // FEW_DIVISOR)

    def take(self, caller: str) -> bool:
        """Take a place for a caller; False: it may have no more now."""
        own, free = self.of.get(caller, 0), self.most - self.taken
        if own >= free or (free <= self._reserved and own >= self._few):
            return False
        self.of[caller] = own + 1
        self.taken += 1
        return True

    def leave(self, caller: str) -> None:
        """Give back a place."""
        self.taken -= 1
        if self.of[caller] == 1:
            del self.of[caller]
        else:
            self.of[caller] -= 1

"""Divides places among callers, so that there is always one for a caller with few.

A caller is the tenant of a token, or without tokens a client's address.
"""

from collections import Counter


class Places:
    """A number of places. A caller may have as many as are free: a single caller half of them, two a third each
    (Choudhury and Hahne's dynamic thresholds).
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.taken = 0
        self.of: Counter[str] = Counter()
        """The places of each caller that has any."""

    def take(self, caller: str) -> bool:
        """Take a place for a caller; False: it may have no more now."""
        own = self.of.get(caller, 0)
        if own >= self.most - self.taken:
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

"""Divides slots for concurrent requests or uploads among callers.

A caller is the tenant of a token, or without tokens a client's address.
"""

from collections import Counter

RESERVED_DIVISOR = 4
"""The last `capacity // RESERVED_DIVISOR` free slots are reserved for callers that hold few."""
FEW_DIVISOR = 256
"""A caller holds few while it has fewer than `capacity // FEW_DIVISOR` slots, or none."""


class FairSlots:
    """A fixed number of slots.

    A caller may take another slot while it holds fewer than are free (Choudhury and Hahne's dynamic thresholds). So a
    single caller gets half of the slots, and two get a third each. While only reserved slots are free, callers that do
    not hold few get none.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.taken = 0
        self.by_caller: Counter[str] = Counter()
        """The number of slots of each caller that holds any."""
        self._reserved = capacity // RESERVED_DIVISOR
        self._few = max(1, capacity // FEW_DIVISOR)

    def take(self, caller: str) -> bool:
        """Take a slot for a caller; return False if it may take no more now."""
        own, free = self.by_caller.get(caller, 0), self.capacity - self.taken
        if own >= free or (free <= self._reserved and own >= self._few):
            return False
        self.by_caller[caller] = own + 1
        self.taken += 1
        return True

    def release(self, caller: str) -> None:
        """Return a slot of a caller."""
        self.taken -= 1
        if self.by_caller[caller] == 1:
            del self.by_caller[caller]
        else:
            self.by_caller[caller] -= 1

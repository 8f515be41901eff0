"""The timers of functions, workers and queues: one time for each, and one alarm for the node."""

from heapq import heappop, heappush
from math import inf

from overwinter.core.ids import Seconds

Key = str | int
"""The id of a function, worker, executor or process forked ahead, the name of a queue, `ahead.KEY` or
`device_order.KEY`.
"""


class Timers:
    """The earliest time of the next check of each key. Later times are not stored: the check computes the next time
    from the tables.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Key]] = []
        self._at: dict[Key, float] = {}
        self._order = 0
        self.alarm = inf
        """When the node's alarm fires; at the end of a step no key has an earlier time."""

    def arm(self, key: Key, at: float) -> None:
        """Check `key` at `at`, unless an earlier time is set."""
        before = self._at.get(key)
        if before is None or at < before:
            self._order += 1
            self._at[key] = at
            heappush(self._heap, (at, self._order, key))

    def disarm(self, key: Key) -> None:
        """Do not check `key`."""
        self._at.pop(key, None)

    def at(self, key: Key) -> float | None:
        """The time of the next check of `key`; None: none is set."""
        return self._at.get(key)

    def pop_due(self, now: Seconds, most: int) -> list[Key]:
        """The keys that are due, in order, at most this many; the node's alarm has fired and must be set again."""
        self.alarm = inf
        due: list[Key] = []
        while self._heap and self._heap[0][0] <= now and len(due) < most:
            at, _, key = heappop(self._heap)
            if self._at.get(key) == at:
                del self._at[key]
                due.append(key)
        return due

    def next_alarm(self) -> Seconds | None:
        """The time at which the node must post the alarm, if it is earlier than the time set before."""
        heap = self._heap
        while heap and heap[0][0] < self.alarm:
            at, _, key = heap[0]
            if self._at.get(key) == at:
                self.alarm = at
                return Seconds(at)
            heappop(heap)
        return None

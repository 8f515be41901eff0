"""The queue of simulated actions: a heap of (time, sequence, action). Actions at the same time run in the order of
their scheduling.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf

Callback = Callable[[], None]


class Timeline:
    """The simulated clock and all future actions."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callback]] = []
        self._sequence = 0

    def after(self, seconds: float, callback: Callback) -> None:
        """Run an action this many seconds from now, which are not negative."""
        self._sequence += 1
        heappush(self._heap, (self.now + seconds, self._sequence, callback))

    def at(self, time: float, callback: Callback) -> None:
        """Run an action at this time, or now if the time has passed."""
        self._sequence += 1
        heappush(self._heap, (time if time > self.now else self.now, self._sequence, callback))

    def next_at(self) -> float:
        """The time of the next action; infinite if there is none."""
        return self._heap[0][0] if self._heap else inf

    def run_until(self, time: float) -> None:
        """Run all actions up to this time, also those that they add."""
        heap = self._heap
        while heap and heap[0][0] <= time:
            self.now, _, callback = heappop(heap)
            callback()
        self.now = time

    def step(self) -> None:
        """Run the next action."""
        self.now, _, callback = heappop(self._heap)
        callback()

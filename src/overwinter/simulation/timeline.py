"""The queue of future callbacks of a simulation: a heap of (time, sequence, callback). Callbacks at the same time run
in the order of their scheduling.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf

Callback = Callable[[], None]


class Timeline:
    """The simulated clock and all future callbacks."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callback]] = []
        self._sequence = 0

    def after(self, seconds: float, callback: Callback) -> None:
        """Call back this many seconds from now; the number is not negative."""
        self._sequence += 1
        heappush(self._heap, (self.now + seconds, self._sequence, callback))

    def at(self, time: float, callback: Callback) -> None:
        """Call back at this time, or now if the time has passed."""
        self._sequence += 1
        heappush(self._heap, (time if time > self.now else self.now, self._sequence, callback))

    def next_at(self) -> float:
        """The time of the next callback; infinite if there is none."""
        return self._heap[0][0] if self._heap else inf

    def run_until(self, time: float) -> None:
        """Run all callbacks up to this time, also those that they add."""
        heap = self._heap
        while heap and heap[0][0] <= time:
            self.now, _, callback = heappop(heap)
            callback()
        self.now = time

    def step(self) -> None:
        """Run the next callback."""
        self.now, _, callback = heappop(self._heap)
        callback()

"""When to look again at what: one alarm a function or body, and one clock time for the node to keep."""

from heapq import heappop, heappush

from overwinter.core.ids import FunctionId, Seconds, WorkerId

Key = FunctionId | WorkerId


class Alarms:
    """The earliest time at which each key wants to be looked at. Later wishes of a key are not kept: whoever
    is looked at says anew when to come again.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Seconds, int, Key]] = []
        self._at: dict[Key, Seconds] = {}
        self._order = 0
        self._announced: Seconds | None = None

    def watch(self, key: Key, at: Seconds) -> None:
        """Look at `key` at `at`, unless it is looked at earlier anyway."""
        before = self._at.get(key)
        if before is None or at < before:
            self._order += 1
            self._at[key] = at
            heappush(self._heap, (at, self._order, key))

    def forget(self, key: Key) -> None:
        """Do not look at `key`."""
        self._at.pop(key, None)

    def pop_due(self, now: Seconds) -> list[Key]:
        """The keys whose time has come, in order; the node's alarm has rung and must be set again."""
        self._announced = None
        due: list[Key] = []
        while self._heap and self._heap[0][0] <= now:
            at, _, key = heappop(self._heap)
            if self._at.get(key) == at:
                del self._at[key]
                due.append(key)
        return due

    def due_change(self) -> Seconds | None:
        """The time at which the node must ring, if it is earlier than what it was told before."""
        while self._heap and self._at.get(self._heap[0][2]) != self._heap[0][0]:
            heappop(self._heap)
        at = self._heap[0][0] if self._heap else None
        if at is None or (self._announced is not None and self._announced <= at):
            return None
        self._announced = at
        return at

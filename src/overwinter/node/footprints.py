"""How much memory does each worker take, now? The scheduler is told whenever it says something new.

Between two looks a worker can grow by a GiB a second on each core. So it is looked at ten times a second, and more
often while the sum grows towards its bound. Who has not computed since takes what it took, and who has computed most
can have taken most: a look costs a microsecond for each worker, and more for those few that are measured. What is
counted is the kernel's own account, which anybody may read: pages that the process alone may write to, and those of the
buffers that it shares with the node. A process that was forked ahead has a fixed claim; one that takes far more ends.

What a fork shares with its zygote is not the worker's as long as neither writes to it. When it is forked that is what
its zygote has; later, what the full account (accounting.py) finds to be shared still.
"""

import asyncio
from collections.abc import Callable
from heapq import nlargest
from typing import NamedTuple

from overwinter.core.events import Event, MemoryMeasured
from overwinter.core.ids import Seconds, WorkerId
from overwinter.node import clock
from overwinter.node.faults import Faults
from overwinter.node.processes import Processes
from overwinter.node.telemetry.memory import anonymous_bytes
from overwinter.node.workers import WorkerProcess
from overwinter.scheduler.forked import AHEAD_BYTES
from overwinter.scheduler.memory import SLACK, SLACK_BYTES
from overwinter.scheduler.state import State

CALM_S = 0.1
"""Between two looks."""
HURRY_S = 0.01
"""Between two looks at the least."""
LOOKS = 4
"""How often it is looked at in the time in which the bound would be reached."""
SHARE = 0.05
"""Of the loop's time, what looks may take at the most."""
MEASURED = 64
"""Workers that are measured in one look."""
NEWS = 1 / 128
"""Of the bound: what the scheduler may know too little of all workers together."""
NOISE_BYTES = 256 << 10
"""Of a worker: what is never told."""

AHEAD_MOST = int(AHEAD_BYTES * SLACK) + SLACK_BYTES
"""What a process that was forked ahead may take before it is ended: as a worker, before it is far beyond its need."""


class _Seen(NamedTuple):
    computed_s: float
    nbytes: int


UNSEEN = _Seen(-1.0, 0)


class Footprints:
    """Belongs to the loop's thread."""

    def __init__(
        self, state: State, processes: Callable[[], Processes], most_bytes: int, post: Callable[[Event], None]
    ) -> None:
        """`most_bytes`: what all workers together may take."""
        self._state = state
        self._processes = processes
        self._most_bytes = most_bytes
        self._post = post
        self._seen: dict[WorkerId, _Seen] = {}
        self._last_bytes = 0
        self._last_at = Seconds(0.0)

    async def run(self, faults: Faults) -> None:
        """Look for ever."""
        while True:
            began, pause_s = clock.now(), CALM_S
            with faults.contained("workers' memory"):
                pause_s = self.look(began)
            await asyncio.sleep(max(pause_s, (clock.now() - began) / SHARE))

    def look(self, now: Seconds) -> float:
        """Measure all, and tell what is new; seconds until the next look."""
        processes = self._processes()
        every = [*processes.workers(), *processes.ahead.workers.values()]
        workers = [process for process in every if process.pid is not None]
        self._seen = {process.worker: self._seen.get(process.worker, UNSEEN) for process in workers}
        for process, computed_s in self._to_measure(workers):
            nbytes = _measured(process)
            if nbytes is not None:
                self._seen[process.worker] = _Seen(computed_s, nbytes)
        total = sum(seen.nbytes for seen in self._seen.values())
        if total > self._most_bytes:
            served = self._state.workers
            self._end_measuring(
                [process for process in workers if process.worker not in served and not process.is_ahead]
            )
        self._end_ahead([process for process in workers if process.is_ahead])
        self._tell()
        return self._pause(total, now)

    def _to_measure(self, workers: list[WorkerProcess]) -> list[tuple[WorkerProcess, float]]:
        """Those that may take something else than before, with what they have computed."""
        found = []
        for process in workers:
            assert process.pid is not None, "a worker without a process takes nothing"
            computed_s = clock.computed_s(process.pid)
            # What the node lays into buffers, or takes out of them, costs the worker nothing.
            if computed_s is not None and (computed_s != self._seen[process.worker].computed_s or process.is_large()):
                found.append((process, computed_s))
        if len(found) <= MEASURED:
            return found
        return nlargest(MEASURED, found, key=lambda each: each[1] - self._seen[each[0].worker].computed_s)

    def _tell(self) -> None:
        workers = self._state.workers
        changed = {
            worker: seen.nbytes
            for worker, seen in self._seen.items()
            if worker in workers and abs(seen.nbytes - workers[worker].expected) > NOISE_BYTES
        }
        news = sum(abs(nbytes - workers[worker].expected) for worker, nbytes in changed.items())
        if news > NEWS * self._most_bytes:
            self._post(MemoryMeasured(tuple(changed.items())))

    def _end_measuring(self, beside: list[WorkerProcess]) -> None:
        """Workers that are only measured make room for those that serve."""
        for process in beside:
            mib = self._seen[process.worker].nbytes >> 20
            self._processes().give_up(process, f"it took {mib} MiB, and others need the memory (--memory-bytes)")

    def _end_ahead(self, ahead: list[WorkerProcess]) -> None:
        """One that waits for a function takes what all do: what it counts for in the ledger, about."""
        for process in ahead:
            nbytes = self._seen[process.worker].nbytes
            if nbytes > AHEAD_MOST:
                self._processes().ahead.give_up(process, f"it took {nbytes >> 20} MiB")

    def _pause(self, total: int, now: Seconds) -> float:
        grown, passed_s = total - self._last_bytes, now - self._last_at
        self._last_bytes, self._last_at = total, now
        if grown <= 0:
            return CALM_S
        return min(CALM_S, max(HURRY_S, (self._most_bytes - total) * passed_s / grown / LOOKS))


def _measured(process: WorkerProcess) -> int | None:
    """What a worker takes; None: it ends, and its memory is not given back yet."""
    assert process.pid is not None, "a worker without a process takes nothing"
    private = anonymous_bytes(process.pid)
    return None if private is None else max(0, private - process.inherited_bytes) + process.buffer_bytes()

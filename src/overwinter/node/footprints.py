"""Measures the memory of each worker, and tells the scheduler about changes.

A worker can grow by 1 GiB per second and core. So workers are measured ten times a second, and more often while the sum
grows towards its bound. A worker that has not computed since its last measurement is left out, unless it has large
buffers or is found to share another amount with its zygote. Of the others, those that computed most are measured. So a
pass costs a microsecond for each worker, and more only for these few. The figures are the kernel's own, which any
process may read: anonymous pages, those of the buffers that the worker shares with the node, and page tables beyond the
usual ones. A process that was forked ahead has a fixed claim, and is stopped when it takes far more.

Pages that a fork shares with its zygote do not count for the worker as long as neither writes to them. At the fork
their size is that of the zygote; later it is what the full accounting (accounting.py) finds to be still shared, within
a second or two if the worker may have written to many of them.

Memory that a tenant's control group has, and its processes do not show, counts for all of its workers in equal parts.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Set
from heapq import nlargest
from typing import NamedTuple

from overwinter.core.events import Event, MemoryMeasured
from overwinter.core.ids import Seconds, TenantId, WorkerId
from overwinter.node import clock
from overwinter.node.faults import Faults
from overwinter.node.memory import anonymous_bytes, excess_table_bytes
from overwinter.node.process_identity import has_ended
from overwinter.node.process_stat import lacks_first_thread
from overwinter.node.processes import Processes
from overwinter.node.workers import WorkerProcess
from overwinter.scheduler.forked import AHEAD_BYTES
from overwinter.scheduler.memory import SLACK, SLACK_BYTES

EVERY_S = 0.1
"""The time between two measurements, unless the memory grows fast or a measurement takes long (SHARE)."""
EVERY_LEAST_S = 0.01
"""The shortest time between two measurements."""
CHECKS_AHEAD = 4
"""How many measurements are made before the limit would be reached at the last rate of growth."""
SHARE = 0.05
"""The largest share of the event loop's time for measurements."""
MEASURED = 64
"""The most workers that are measured at once."""
REPORTED_CHANGE = 1 / 128
"""The largest unreported change of all workers together, as a share of the limit."""
NOISE_BYTES = 256 << 10
"""A change of a worker's memory that is too small to report."""
UNATTRIBUTED_BYTES = 32 << 20
"""The memory of a tenant that may be in none of its processes: a process that is being forked, or has just ended, has
some.
"""
UNATTRIBUTED_CHECKS = 5
"""The consecutive checks in which such memory must be found. A process that has ended may still have to free some."""

HIDDEN_CHECKS = 5
"""The consecutive checks after which a worker is stopped whose first thread has ended."""
AHEAD_BYTES_MAX = int(AHEAD_BYTES * SLACK) + SLACK_BYTES
"""The most memory of a process forked ahead: like a worker, it is stopped when it is far beyond its need."""


class _Seen(NamedTuple):
    cpu_time_s: float
    inherited_bytes: int
    """What it was known to share with its zygote."""
    nbytes: int
    own_bytes: int
    """The part that the kernel counts for its tenant: without its page tables, and without its buffers for inputs,
    which the node writes.
    """


UNSEEN = _Seen(-1.0, 0, 0, 0)


class Footprints:
    """Measures the memory of workers. Used on the event loop's thread only."""

    def __init__(
        self,
        expected: Callable[[], Mapping[WorkerId, int]],
        processes: Processes,
        most_bytes: int,
        post: Callable[[Event], None],
    ) -> None:
        """`expected`: the memory of each worker, as the scheduler estimates it. `most_bytes`: the bound on the memory
        of all workers.
        """
        self._expected = expected
        self._processes = processes
        self._most_bytes = most_bytes
        self._post = post
        self._seen: dict[WorkerId, _Seen] = {}
        self._hidden: dict[WorkerId, int] = {}
        """The consecutive checks in which a worker's first thread had ended: the kernel then shows no memory."""
        self._unattributed: dict[TenantId, deque[int]] = {}
        """The memory of each tenant that none of its processes showed in the last checks."""
        self._last_bytes = 0
        self._last_at = Seconds(0.0)

    async def run(self, faults: Faults) -> None:
        """Measure periodically, without end."""
        while True:
            began, pause_s = clock.now(), EVERY_S
            with faults.contained("workers' memory"):
                pause_s = self.check(began)
            await asyncio.sleep(max(pause_s, (clock.now() - began) / SHARE))

    def check(self, now: Seconds) -> float:
        """Measure the workers that may have changed, and report changes; returns the seconds until the next check."""
        processes = self._processes
        every = [*processes.workers(), *processes.ahead.workers.values()]
        workers = [process for process in every if process.pid is not None]
        self._seen = {process.worker: self._seen.get(process.worker, UNSEEN) for process in workers}
        due = self._to_measure(workers)
        for process, cpu_time_s in due:
            measured = _measured(process)
            if measured is not None:
                self._seen[process.worker] = _Seen(cpu_time_s, process.inherited_bytes, *measured)
            else:
                self._hidden.setdefault(process.worker, 0)
        self._end_hidden(workers)
        self._find_unattributed(workers, {process.tenant for process, _ in due if process.tenant is not None})
        taken = self._taken(workers)
        total = sum(taken.values())
        expected = self._expected()
        if total > self._most_bytes:
            measuring = [process for process in workers if process.worker not in expected and not process.is_ahead]
            self._end_measuring(measuring, taken)
        self._end_ahead([process for process in workers if process.is_ahead])
        self._report(expected, taken)
        return self._pause(total, now)

    def _to_measure(self, workers: list[WorkerProcess]) -> list[tuple[WorkerProcess, float]]:
        """The workers whose memory may have changed, with their CPU time; at most the MEASURED that computed most."""
        found = []
        for process in workers:
            assert process.pid is not None, "a worker without a process has no memory"
            cpu_time_s = clock.cpu_time_s(process.pid)
            seen = self._seen[process.worker]
            # Without computing, a worker's memory changes only by what the node writes to its buffers or frees from
            # them. What it shares with its zygote is found later.
            has_changed = cpu_time_s != seen.cpu_time_s or process.inherited_bytes != seen.inherited_bytes
            if cpu_time_s is not None and (has_changed or process.is_large()):
                found.append((process, cpu_time_s))
        if len(found) <= MEASURED:
            return found
        return nlargest(MEASURED, found, key=lambda each: each[1] - self._seen[each[0].worker].cpu_time_s)

    def _find_unattributed(self, workers: Iterable[WorkerProcess], measured: Set[TenantId]) -> None:
        """Compare what the control groups of tenants have with what their processes show. The difference changes only
        when one of a tenant's processes computes or ends.
        """
        zygotes = self._processes.zygotes
        memory = zygotes.groups.memory
        if memory is None:
            return
        shown: Counter[TenantId | None] = Counter()
        for process in workers:
            shown[process.tenant] += self._seen[process.worker].own_bytes
        for tenant in measured | self._unattributed.keys():
            zygote = zygotes.tenants.get(tenant)
            if zygote is not None and zygote.pid is not None:
                shown[tenant] += anonymous_bytes(zygote.pid) or 0
            unattributed = memory.charged_bytes(tenant) - shown[tenant]
            if unattributed > UNATTRIBUTED_BYTES:
                self._unattributed.setdefault(tenant, deque(maxlen=UNATTRIBUTED_CHECKS)).append(unattributed)
            else:
                self._unattributed.pop(tenant, None)

    def _taken(self, workers: Iterable[WorkerProcess]) -> dict[WorkerId, int]:
        """Return the memory that counts for each worker, with its part of what none of its tenant's processes shows."""
        number = Counter(process.tenant for process in workers if not process.is_ahead)
        parts: dict[TenantId | None, int] = {
            tenant: min(found) // number[tenant]
            for tenant, found in self._unattributed.items()
            if number[tenant] and len(found) == UNATTRIBUTED_CHECKS
        }
        return {
            process.worker: self._seen[process.worker].nbytes
            + (0 if process.is_ahead else parts.get(process.tenant, 0))
            for process in workers
        }

    def _report(self, expected: Mapping[WorkerId, int], taken: Mapping[WorkerId, int]) -> None:
        changed = {
            worker: nbytes
            for worker, nbytes in taken.items()
            if worker in expected and abs(nbytes - expected[worker]) > NOISE_BYTES
        }
        change = sum(abs(nbytes - expected[worker]) for worker, nbytes in changed.items())
        if change > REPORTED_CHANGE * self._most_bytes:
            self._post(MemoryMeasured(tuple(changed.items())))

    def _end_measuring(self, measuring: list[WorkerProcess], taken: Mapping[WorkerId, int]) -> None:
        """Stop workers that only measure profiles, in favour of those that serve."""
        for process in measuring:
            mib = taken[process.worker] >> 20
            self._processes.forks.give_up(process, f"it took {mib} MiB, and others need the memory (--memory-bytes)")

    def _end_hidden(self, workers: list[WorkerProcess]) -> None:
        """Stop workers that have ended their first thread, which takes their memory out of the measurement."""
        hidden = [process for process in workers if process.worker in self._hidden and _lacks_first_thread(process)]
        self._hidden = {process.worker: self._hidden[process.worker] + 1 for process in hidden}
        for process in hidden:
            if self._hidden[process.worker] >= HIDDEN_CHECKS:
                self._processes.forks.give_up(process, "its first thread has ended")

    def _end_ahead(self, ahead: list[WorkerProcess]) -> None:
        """Stop processes forked ahead that use far more than their claim."""
        for process in ahead:
            nbytes = self._seen[process.worker].nbytes
            if nbytes > AHEAD_BYTES_MAX:
                self._processes.ahead.give_up(process, f"it took {nbytes >> 20} MiB")

    def _pause(self, total: int, now: Seconds) -> float:
        grown, passed_s = total - self._last_bytes, now - self._last_at
        self._last_bytes, self._last_at = total, now
        if grown <= 0:
            return EVERY_S
        return min(EVERY_S, max(EVERY_LEAST_S, (self._most_bytes - total) * passed_s / grown / CHECKS_AHEAD))


def _lacks_first_thread(process: WorkerProcess) -> bool:
    """Whether the first thread of a worker has ended, and others have not."""
    assert process.pid is not None
    assert process.pidfd is not None, "it was forked"
    return lacks_first_thread(process.pid) and not has_ended(process.pidfd)


def _measured(process: WorkerProcess) -> tuple[int, int] | None:
    """The memory of a worker, and the part of it that the kernel counts for its tenant; None: it is ending, and its
    memory is not released yet, or its first thread has ended.
    """
    assert process.pid is not None, "a worker without a process has no memory"
    private = anonymous_bytes(process.pid)
    if private is None:
        return None
    inputs, outputs = process.buffer_bytes()
    own = max(0, private - process.inherited_bytes) + outputs
    return own + inputs + excess_table_bytes(process.pid), own

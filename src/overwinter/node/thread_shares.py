"""Keeps threads free for the workers of all tenants.

All processes of the node's control groups together may have a bounded number of threads (`cgroups.py`), and no tenant
could wake a function if the sleeping threads of others used all of them. So when most are in use, workers are ended:
each time, of the tenant with the most threads, the worker with the most. Before any worker, tenants' zygotes with many
threads are ended.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

from overwinter.core.ids import TenantId, WorkerId
from overwinter.node.cgroups import Groups
from overwinter.node.faults import Faults
from overwinter.node.log import Log
from overwinter.node.log_throttle import LogThrottle
from overwinter.node.process_stat import THREADS, stat_field
from overwinter.node.processes import Processes
from overwinter.node.threads import Threads

CHECK_INTERVAL_S = 0.25
FULL, ENOUGH = 0.75, 0.5
"""Workers are ended when more than the first share of the threads is in use, until only the second share is."""
USUAL = 8
"""A worker or zygote with at most this many threads is not ended."""


class ThreadShares:
    """Counts threads, and ends workers that have too many. Used on the event loop's thread only."""

    def __init__(self, processes: Processes, groups: Groups, log: Log) -> None:
        self._processes = processes
        self._groups = groups
        self._reader = Threads(1, "threads of workers")
        self._throttle = LogThrottle(log)

    async def run(self, faults: Faults) -> None:
        """Check periodically, without end."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            with faults.contained("threads of workers"):
                await self.check()

    async def check(self) -> None:
        """End zygotes with many threads, or else workers, if most threads are in use."""
        taken, most = self._groups.threads()
        if most is None or taken <= FULL * most or self._end_zygotes():
            return
        pids = {each.worker: each.pid for each in self._processes.workers() if each.pid is not None and not each.over}
        counts = await asyncio.get_running_loop().run_in_executor(self._reader, partial(_counts, pids))
        tenants = {each.worker: each.family.tenant for each in self._processes.workers() if each.worker in counts}
        for worker in to_end(counts, tenants.get, taken - int(ENOUGH * most)):
            self._end(worker, counts[worker], most)

    def _end_zygotes(self) -> bool:
        """End the tenants' zygotes with more than USUAL threads, which only a compromised one has; return whether there
        were some.
        """
        zygotes = self._processes.zygotes
        found = [each for each in zygotes.tenants.values() if stat_field(each.pid or 0, THREADS) > USUAL]
        for zygote in found:
            zygotes.lose(zygote, f"it has more than {USUAL} threads")
        return bool(found)

    def _end(self, worker: WorkerId, count: int, most: int) -> None:
        process = self._processes.process(worker)
        if process is None or process.over or process.dismissed:
            return
        reason = f"it had {count} threads, and all workers together may have {most}"
        message = f"worker {worker} of {process.function} is stopped: {reason}"
        self._throttle.log(process.family.tenant, message)
        self._processes.forks.give_up(process, reason)


def to_end(
    counts: Mapping[WorkerId, int], tenant_of: Callable[[WorkerId], TenantId | None], excess: int
) -> list[WorkerId]:
    """Return workers with more than USUAL threads whose end frees `excess` threads, or else all of them. `counts`: the
    threads of each worker.
    """
    left, found = {worker: count for worker, count in counts.items() if count > USUAL}, []
    together: Counter[TenantId | None] = Counter()
    for worker, count in counts.items():
        together[tenant_of(worker)] += count
    while left and excess > 0:
        worker = max(left, key=lambda each: (together[tenant_of(each)], left[each], each))
        count = left.pop(worker)
        found.append(worker)
        together[tenant_of(worker)] -= count
        excess -= count
    return found


def _counts(pids: Mapping[WorkerId, int]) -> dict[WorkerId, int]:
    """Return the number of threads of each process. Reads /proc."""
    return {worker: stat_field(pid, THREADS) for worker, pid in pids.items()}

"""Ends processes that tenants' zygotes forked and did not report, which only a compromised zygote has.

Nothing would count the memory of such a process, or stop it when its function is removed. It is in the control group of
its tenant, where the kernel lists it whatever its parent is. Without control groups it is not found.
"""

import asyncio
import os
import re
from collections.abc import Callable, Collection, Mapping, Set
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from overwinter.core.ids import TenantId
from overwinter.node.faults import Faults
from overwinter.node.forks import Forks
from overwinter.node.process_identity import has_ended, kill
from overwinter.node.process_stat import PARENT, count_of
from overwinter.node.threads import Threads
from overwinter.node.zygotes import Zygotes

T = TypeVar("T")

CHECK_INTERVAL_S = 1.0
UNKNOWN_CHECKS = 5
"""The consecutive checks after which an unknown process is ended. One that is being forked, or has just ended, may be
unknown before that.
"""
ENDED_MAX = 256
"""The most processes of a tenant that one check ends, because a descriptor is opened for each."""


class UnreportedProcesses:
    """Looks for unknown processes in the control groups of tenants. Used on the event loop's thread only."""

    def __init__(self, zygotes: Zygotes, forks: Forks) -> None:
        self._zygotes = zygotes
        self._forks = forks
        self._reader = Threads(1, "unreported processes")
        self._unknown: dict[TenantId, dict[int, int]] = {}
        """The unknown processes of each tenant, with the number of consecutive checks; the first found are first."""

    async def run(self, faults: Faults) -> None:
        """Check periodically, without end."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            with faults.contained("unreported processes"):
                await self.check()

    async def check(self) -> None:
        """Look for unknown processes, and end those that were unknown in the last checks too."""
        listings = self._zygotes.groups.listings()
        listed = await self._read(lambda: {tenant: _listed(listing) for tenant, listing in listings.items()})
        # What is reported after this was read is known here.
        pids = {process.pid for process in self._forks.living()} | {zygote.pid for zygote in self._zygotes.every()}
        found = await self._read(lambda: _unknown(listed, pids))
        unknown: dict[TenantId, dict[int, int]] = {}
        for tenant, processes in found.items():
            before = self._unknown.get(tenant, {})
            checks = {pid: count + 1 for pid, count in before.items() if pid in processes}
            unknown[tenant] = checks | dict.fromkeys(processes - checks.keys(), 1)
        self._unknown = unknown
        for tenant, counts in unknown.items():
            lasting = [pid for pid, count in counts.items() if count >= UNKNOWN_CHECKS][self._expected(tenant) :]
            zygote = self._zygotes.tenants.get(tenant)
            parents = await self._read(partial(_end, lasting[:ENDED_MAX], listings[tenant])) if lasting else set()
            if zygote is not None and zygote.pid in parents:
                self._zygotes.lose(zygote, "it forked processes that it did not report")

    async def _read(self, work: Callable[[], T]) -> T:
        """Run what reads files of the kernel in the thread for it."""
        return await asyncio.get_running_loop().run_in_executor(self._reader, work)

    def _expected(self, tenant: TenantId) -> int:
        """Return how many processes of a tenant may still be reported."""
        zygote = self._zygotes.tenants.get(tenant)
        return 0 if zygote is None else len(zygote.pending)


def _listed(listing: Path) -> set[int]:
    """Return the processes or threads that a control group's file lists; none if the group was removed."""
    try:
        return {int(number) for number in listing.read_text().split()}
    except OSError:
        return set()


def _unknown(listed: Mapping[TenantId, set[int]], known: Set[int | None]) -> dict[TenantId, set[int]]:
    """Return the listed processes of each tenant that are not known. Reads /proc."""
    found = {}
    for tenant, numbers in listed.items():
        left = numbers.difference(known)
        for process in numbers.intersection(known) if left else ():
            left -= _threads_of(process)
        found[tenant] = {process for process in map(_process_of, left) if process is not None}
    return found


def _end(processes: Collection[int], listing: Path) -> set[int]:
    """End these processes of a control group; return their parents."""
    pidfds: dict[int, int] = {}
    parents: set[int] = set()
    for pid in processes:
        with suppress(OSError):
            pidfds[pid] = os.pidfd_open(pid)
    # Another process may have got a pid before its descriptor was opened.
    listed = set(map(_process_of, _listed(listing)))
    for pid, pidfd in pidfds.items():
        if pid in listed and not has_ended(pidfd):
            parents.add(count_of(pid, PARENT))
            kill(pidfd)
        os.close(pidfd)
    return parents


def _threads_of(process: int) -> set[int]:
    try:
        return set(map(int, os.listdir(f"/proc/{process}/task")))
    except OSError:
        return set()


def _process_of(thread: int) -> int | None:
    """Return the process of a thread; None if it has ended."""
    try:
        status = Path(f"/proc/{thread}/status").read_text()
    except OSError:
        return None
    named = re.search(r"^Tgid:\s*(\d+)$", status, re.MULTILINE)
    return None if named is None else int(named[1])

"""Ends tenants' zygotes that have processes which they did not report. Only a compromised zygote has such processes.

Nothing would stop such a process when its function is removed, and its memory would count only where tenants have a
memory group (`tenant_memory.py`). It is in the control group of its tenant, or in that of a demoted process, where the
kernel lists it whatever its parent is. Without control groups it is not found. When a tenant's zygote ends, the base
zygote kills all processes of that zygote (worker/orphans.py).
"""

import asyncio
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from overwinter.core.ids import TenantId
from overwinter.node.faults import Faults
from overwinter.node.forks import Forks
from overwinter.node.threads import Threads
from overwinter.node.zygotes import Zygotes

T = TypeVar("T")

CHECK_INTERVAL_S = 1.0
CHECKS = 5
"""The consecutive checks with unknown processes after which a zygote is ended. A process that is being forked, or has
just ended, may be unknown in one.
"""
MANY, CHECKS_OF_MANY = 64, 2
"""The node never has so many forks of a tenant in progress. More unknown processes may use up all process ids, so the
zygote is ended sooner.
"""
KILLED = 1 << (signal.SIGKILL - 1)
"""The bit of a pending SIGKILL in /proc/PID/status."""


class UnreportedProcesses:
    """Looks for unknown processes in the control groups of tenants. Used on the event loop's thread only."""

    def __init__(self, zygotes: Zygotes, forks: Forks) -> None:
        self._zygotes = zygotes
        self._forks = forks
        self._reader = Threads(1, "unreported processes")
        self._checks: dict[TenantId, int] = {}
        """The consecutive checks in which a tenant had unknown processes, not necessarily the same ones."""

    async def run(self, faults: Faults) -> None:
        """Check periodically, without end."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            with faults.contained("unreported processes"):
                await self.check()

    async def check(self) -> None:
        """Look for unknown processes; end the zygotes of tenants that had some in the last checks too."""
        listings = self._zygotes.groups.listings()
        listed = await self._read(lambda: {tenant: _listed(files) for tenant, files in listings.items()})
        # After the listing, so that the processes that were reported meanwhile are known.
        pids = {process.pid for process in self._forks.living()} | {zygote.pid for zygote in self._zygotes.every()}
        unreported = Counter(tenant for zygote in self._zygotes.every() for tenant in zygote.unreported_tenants())
        found = await self._read(lambda: _unknown(listed, pids))
        checks, self._checks = self._checks, {}
        for tenant, unknown in found.items():
            zygote = self._zygotes.tenants.get(tenant)
            if zygote is None or len(unknown) <= unreported[tenant]:
                continue
            self._checks[tenant] = checks.get(tenant, 0) + 1
            if self._checks[tenant] >= (CHECKS if len(unknown) <= MANY else CHECKS_OF_MANY):
                del self._checks[tenant]
                self._zygotes.lose(zygote, f"it has {len(unknown)} processes that it did not report")

    async def _read(self, work: Callable[[], T]) -> T:
        """Run `work`, which reads files of the kernel, in the reader thread."""
        return await asyncio.get_running_loop().run_in_executor(self._reader, work)


def _listed(files: Iterable[Path]) -> set[int]:
    """Return the processes or threads that the files of control groups list. Removed groups are skipped."""
    found: set[int] = set()
    for file in files:
        with suppress(OSError):
            found.update(map(int, file.read_text().split()))
    return found


def _unknown(listed: Mapping[TenantId, set[int]], known: Set[int | None]) -> dict[TenantId, set[int]]:
    """Return the listed processes of each tenant that are not known and were not killed. Reads /proc."""
    found = {}
    for tenant, numbers in listed.items():
        left = numbers.difference(known)
        for process in numbers.intersection(known) if left else ():
            left -= _threads_of(process)
        found[tenant] = {process for process in map(_living_process_of, left) if process is not None}
    return found


def _threads_of(process: int) -> set[int]:
    try:
        return set(map(int, os.listdir(f"/proc/{process}/task")))
    except OSError:
        return set()


def _living_process_of(thread: int) -> int | None:
    """Return the process of a thread; None if it has ended, or was killed and may still be freeing its memory."""
    try:
        # A process may choose any bytes as its name.
        status = Path(f"/proc/{thread}/status").read_text(errors="replace")
    except OSError:
        return None
    fields = dict(re.findall(r"^(Tgid|SigPnd|ShdPnd):\s*(\w+)$", status, re.MULTILINE))
    pending = int(fields.get("SigPnd", "0"), 16) | int(fields.get("ShdPnd", "0"), 16)
    return None if pending & KILLED or "Tgid" not in fields else int(fields["Tgid"])

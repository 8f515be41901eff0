"""Gives priority to the tenants that used less of the cores recently, while cores are scarce.

The kernel divides the cores among the tenants that need them at the moment, whatever they used before. A tenant that
computes for some milliseconds now and then would wait for a kernel time slice of each of the others. So a tenant that
used about its share or more has a lower CPU weight while the cores are scarce, as in fair-share schedulers with
decaying usage (Kay and Lauder, A fair share scheduler, 1988). Runs that can still meet an SLO come first, as in the
queue for cores: their use counts only if it slows down another tenant that has such runs and used less than its share.
A tenant whose workers computed outside runs has the lower CPU weight for some seconds, whatever it used. Without
control groups nothing is done.
"""

import asyncio
from collections import defaultdict
from math import exp

from overwinter.core.ids import Seconds, TenantId, WorkerId
from overwinter.node import clock
from overwinter.node.faults import Faults
from overwinter.node.processes import Processes

CHECK_INTERVAL_S = 0.1
DECAY_S = 0.3
"""The time constant of the decay: after this time, past usage counts 1/e."""
SCARCE = 0.6
"""The cores are scarce while at least this share of them is in use."""
NEARLY = 0.75
"""The part of its fair share above which a tenant's CPU weight is lowered."""
LEAST = 0.02
"""Usage below this part of a core counts as none."""
OUTSIDE_RUNS = 0.1
"""The usage of a core that a tenant's workers may have outside runs."""
OUTSIDE_RUNS_S = 10.0
"""How long a tenant's CPU weight stays lowered after its workers exceeded that."""
LOWERED_S = 2.0
"""How long a tenant's CPU weight stays lowered after it used about its share. Without a fixed time the weight would
change several times a second, because the tenant uses less while it is lowered.
"""


class CoreShares:
    """Adjusts the CPU weights of tenants by their use of cores. Used on the event loop's thread only: a check costs
    some microseconds per process.
    """

    def __init__(self, processes: Processes, cores: float) -> None:
        self._processes = processes
        self._cores = cores
        self._seen: dict[int, float] = {}
        """The CPU seconds of each process at the last check."""
        self._last = Seconds(0.0)
        self._used: dict[TenantId, float] = {}
        """The cores that each tenant's workers, zygote and own executors used recently."""
        self._used_for_slo: dict[TenantId, float] = {}
        """The part of them that workers with an SLO used while none of their runs had computed for longer than that."""
        self._cpu_time_outside_runs_s: dict[WorkerId, float] = {}
        """The CPU seconds that each worker used outside runs, until the last check."""
        self._used_outside_runs: dict[TenantId, float] = {}
        """The cores that each tenant's workers used recently outside runs."""
        self._until: dict[TenantId, Seconds] = {}
        """Until when each tenant's CPU weight is lowered."""

    async def run(self, faults: Faults) -> None:
        """Check periodically, without end."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            with faults.contained("tenants' shares"):
                self.check(clock.now())

    def check(self, now: Seconds) -> None:
        """Lower the CPU weights of tenants that used about their share or more, or that computed outside runs."""
        processes = self._processes
        if not processes.zygotes.groups.shares_cores:
            return
        passed_s, self._last = now - self._last, now
        spent, spent_for_slo = self._spent(processes)
        self._used = _decayed(self._used, spent, passed_s)
        self._used_for_slo = _decayed(self._used_for_slo, spent_for_slo, passed_s)
        self._used_outside_runs = _decayed(self._used_outside_runs, self._spent_outside_runs(processes), passed_s)
        for tenant in tenants_to_lower(self._used, self._used_for_slo, self._cores):
            self._until[tenant] = max(self._until.get(tenant, now), Seconds(now + LOWERED_S))
        self._until |= {
            tenant: Seconds(now + OUTSIDE_RUNS_S)
            for tenant, each in self._used_outside_runs.items()
            if each > OUTSIDE_RUNS
        }
        self._until = {tenant: until for tenant, until in self._until.items() if until > now}
        processes.zygotes.groups.lower(self._until.keys())

    def _spent(self, processes: Processes) -> tuple[dict[TenantId, float], dict[TenantId, float]]:
        """Return the CPU seconds of each tenant's processes since the last check: all, and those of workers whose
        runs can meet an SLO.
        """
        last, self._seen = self._seen, {}
        spent: dict[TenantId, float] = defaultdict(float)
        for_slo: dict[TenantId, float] = defaultdict(float)
        pids = [(process.tenant, process.pid, process) for process in processes.forks.living()]
        zygotes = [(tenant, zygote.pid, None) for tenant, zygote in processes.zygotes.tenants.items()]
        for tenant, pid, process in (*pids, *zygotes):
            cpu_time_s = None if pid is None else clock.cpu_time_s(pid)
            if tenant is not None and pid is not None and cpu_time_s is not None:
                self._seen[pid] = cpu_time_s
                part_s = max(0.0, cpu_time_s - last.get(pid, cpu_time_s))
                spent[tenant] += part_s
                if process is not None and process.can_meet_slo(cpu_time_s):
                    for_slo[tenant] += part_s
        return spent, for_slo

    def _spent_outside_runs(self, processes: Processes) -> dict[TenantId, float]:
        """Return the CPU seconds since the last check that each tenant's workers used outside runs."""
        last, self._cpu_time_outside_runs_s = self._cpu_time_outside_runs_s, {}
        spent: dict[TenantId, float] = defaultdict(float)
        for worker in processes.workers():
            self._cpu_time_outside_runs_s[worker.worker] = worker.cpu_time_outside_runs_s()
            spent[worker.family.tenant] += self._cpu_time_outside_runs_s[worker.worker] - last.get(worker.worker, 0.0)
        return spent


def _decayed(used: dict[TenantId, float], spent: dict[TenantId, float], passed_s: float) -> dict[TenantId, float]:
    """Return the recent use of cores, from the earlier value and the CPU seconds since."""
    fresh = 1 - exp(-passed_s / DECAY_S)
    both = {
        tenant: fresh * spent.get(tenant, 0.0) / passed_s + (1 - fresh) * used.get(tenant, 0.0)
        for tenant in spent.keys() | used.keys()
    }
    return {tenant: each for tenant, each in both.items() if each > LEAST}


def tenants_to_lower(used: dict[TenantId, float], for_slo: dict[TenantId, float], cores: float) -> set[TenantId]:
    """Return the tenants whose CPU weight is to be lowered: while the cores are scarce, those that used nearly their
    share or more.

    `used`: the cores that each tenant used; `for_slo`: the part of it for runs that can meet an SLO. This part counts
    only if another tenant with such a part used less than its share.
    """
    if sum(used.values()) < SCARCE * cores:
        return set()
    most = NEARLY * cores / len(used)
    above = {tenant for tenant, each in used.items() if each > most}
    if for_slo.keys() & used.keys() - above:
        return above
    return {tenant for tenant in above if used[tenant] - for_slo.get(tenant, 0.0) > most}

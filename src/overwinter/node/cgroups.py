"""Shares cores among tenants and bounds the threads of their processes by control groups, where the system allows it.

All processes that the base zygote forks are in one control group, with one group below it for each tenant. Per core,
this common group has a lower CPU weight than other processes. All tenants have the same CPU weight, except those whose
weight is lowered (`core_shares.py`). Demoted processes, which get only idle cores, are in a second group next to the
common one, with one group below it for each process. Threads are bounded, so that the system keeps process ids for
other programs. Memory is counted for each tenant (`tenant_memory.py`), but not bounded: see docs/decisions/sandbox.md.

A process with a single thread that enters a group by itself, through the file for threads, needs 50 µs. Moving a
process from outside takes 6 to 20 ms, during which no process of the system can fork.
"""

import fcntl
import os
import secrets
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from overwinter.core.ids import TenantId
from overwinter.node.cgroup_files import group_of, number_in, remove_group
from overwinter.node.tenant_memory import TenantMemory

NAME_PREFIX = "overwinter-"
IDLE_SUFFIX = "-idle"
"""The suffix of the group of all demoted processes, next to the node's own group."""
CONTROLLERS = {
    "pids": "threads are not bounded together",
    "cpu": "cores are not shared among tenants",
    "memory": "memory that the processes of a tenant do not show is not found",
}
"""The controllers, and the consequence of not having each."""
PID_MAX = Path("/proc/sys/kernel/pid_max")
TASKS_USUAL = 32_768
"""The limit of processes and threads that is assumed if the system does not report one."""
PIDS_SHARE = 0.5
"""The share of the system's process ids that a bounded group of the node may use."""
SHARES, SHARES_LEAST = 1024, 2
"""The usual and the least CPU share of a group in control groups version 1."""
WEIGHT, WEIGHT_LEAST = 100, 1
"""The usual and the least CPU weight of a group in control groups version 2."""
NODE_DIVISOR = 8
"""The factor by which the CPU weight of all workers together is below that of other processes, per core. With the usual
weight, threads that often wait for each other can keep a core from all other processes for more than a minute: see
docs/decisions/sandbox.md.
"""
LOWERED_DIVISOR = 16
"""The factor by which the CPU weight of a tenant is lowered (`core_shares.py`)."""
EMPTY_S, PAUSE_S = 1.0, 0.02
"""How long killed processes may take to leave their groups when the node ends, and the time between two checks."""


class Groups:
    """The node's control groups, one in each hierarchy that has a controller, and the groups below and next to them."""

    def __init__(self) -> None:
        self.name = f"{NAME_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        """The name of the node's own group. A part is random: nodes in other namespaces may have the same process id.
        """
        self.missing: list[str] = []
        """A message for each controller without a group."""
        self._parents: dict[str, Path] = {}
        self._locks: dict[Path, int] = {}
        """The groups that this node has locked, so that other nodes do not remove them."""
        self._tenants_parent: Path | None = None
        """The parent of the tenants' groups; None: tenants have no groups."""
        self._demoted_parent: Path | None = None
        """The parent of the groups of demoted processes; None: nothing was demoted."""
        self._demoted: dict[Path, TenantId | None] = {}
        """The groups of demoted processes."""
        self._restored: set[Path] = set()
        """Those of them that have their CPU weight again, because their process is ending."""
        self.memory: TenantMemory | None = None
        """The groups that count each tenant's memory; None: there are none."""
        self._tenants: dict[TenantId, Path] = {}
        self._lowered: set[TenantId] = set()
        """The tenants with a lowered CPU weight."""
        self._last, self._last_demoted = 0, 0
        for controller in CONTROLLERS:
            parent = group_of(controller)
            if controller == "memory" and parent is not None and not allows_tenant_groups(parent):
                self._lacks(controller, "only control groups version 1 have one for each tenant")
            elif parent is not None and os.access(parent, os.W_OK):
                self._parents[controller] = parent
            else:
                self._lacks(controller, "the system does not let this node create one")
        self._clean()

    def _lacks(self, controller: str, why: object) -> None:
        self.missing.append(f"{CONTROLLERS[controller]}, because there is no control group for {controller} ({why})")

    # The node's own groups

    def make(self) -> list[str]:
        """Create the node's groups if they do not exist; return the files by which the base zygote enters them."""
        directories = []
        for controller, parent in list(self._parents.items()):
            directory = parent / self.name
            try:
                self._claim(directory)
                if controller == "memory":
                    self.memory = self.memory or TenantMemory(directory)
                else:
                    _configure(controller, directory)
                if controller == "cpu":
                    self._allow_tenants(directory)
            except OSError as error:
                del self._parents[controller]
                self._lacks(controller, error)
            else:
                directories.append(str(directory / "cgroup.procs"))
        return sorted(set(directories))

    def _claim(self, directory: Path) -> None:
        """Create the group, and lock it against other nodes."""
        directory.mkdir(exist_ok=True)
        while directory not in self._locks:
            lock = _locked(directory, fcntl.LOCK_EX)
            if lock is not None:
                self._locks[directory] = lock
            else:
                # Another node considered the group abandoned, and removed it before it was locked.
                directory.mkdir(exist_ok=True)

    def _allow_tenants(self, directory: Path) -> None:
        """Allow groups of tenants below this group."""
        if _is_version_2(directory):
            (directory / "cgroup.subtree_control").write_text("+cpu")
        self._tenants_parent = directory

    # Groups of tenants

    @contextmanager
    def entry(self, tenant: TenantId | None, counts_memory: bool = True) -> Iterator[list[int]]:
        """Open the tenant's groups, which a forked process enters by writing "0" to each descriptor. The one that
        counts its memory is left out unless `counts_memory`.

        Yields none for the tenant None, and none for a group that the system does not allow; creates the others if
        necessary.
        """
        fds: list[int] = []
        with suppress(OSError):
            if self._tenants_parent is not None and tenant is not None:
                fds.append(os.open(self._entry_file(tenant, self._tenants_parent), os.O_WRONLY | os.O_CLOEXEC))
        with suppress(OSError):
            if self.memory is not None and tenant is not None and counts_memory:
                fds.append(self.memory.open(tenant))
        try:
            yield fds
        finally:
            for fd in fds:
                os.close(fd)

    def _entry_file(self, tenant: TenantId, parent: Path) -> Path:
        """Return the file by which single threads enter the tenant's group; create the group if necessary."""
        directory = self._tenants.get(tenant)
        if directory is None:
            self._last += 1
            directory = parent / f"{self._last}"
            directory.mkdir()
            if _is_version_2(directory):
                # Threads can enter a version 2 group separately from their process only if it is threaded.
                (directory / "cgroup.type").write_text("threaded")
            self._tenants[tenant] = directory
        return directory / ("cgroup.threads" if _is_version_2(directory) else "tasks")

    def listings(self) -> dict[TenantId, list[Path]]:
        """Return the files that list each tenant's processes, also demoted ones; in version 2 they list threads."""
        directories = {tenant: [directory] for tenant, directory in self._tenants.items()}
        for directory, tenant in list(self._demoted.items()):
            if tenant is not None:
                directories.setdefault(tenant, []).append(directory)
        return {tenant: [_listing(directory) for directory in found] for tenant, found in directories.items()}

    def keep(self, tenants: Collection[TenantId]) -> None:
        """Remove the groups of all other tenants and of demoted processes, if they are empty."""
        if self.memory is not None:
            self.memory.keep(tenants)
        for tenant, directory in list(self._tenants.items()):
            if tenant not in tenants and remove_group(directory):
                del self._tenants[tenant]
                self._lowered.discard(tenant)
        for directory in list(self._demoted):
            if remove_group(directory):
                del self._demoted[directory]

    def lower(self, tenants: Collection[TenantId]) -> None:
        """Give these tenants a lower CPU weight than all others, until the next call."""
        for tenant, directory in self._tenants.items():
            if (tenant in tenants) != (tenant in self._lowered):
                self._lowered ^= {tenant}
                _set_weight(directory, LOWERED_DIVISOR if tenant in tenants else 1)

    @property
    def lowered(self) -> frozenset[TenantId]:
        """The tenants with a lower CPU weight."""
        return frozenset(self._lowered)

    # Threads

    def threads(self) -> tuple[int, int | None]:
        """Return the number of threads in the node's groups, 0 if they are not counted, and the bound on those of its
        own group, if any.
        """
        parent = self._parents.get("pids")
        if parent is None:
            return 0, None
        own = parent / self.name
        directories = (own, own.with_name(own.name + IDLE_SUFFIX))
        return sum(number_in(directory / "pids.current") or 0 for directory in directories), number_in(own / "pids.max")

    # Demoted processes

    @property
    def shares_cores(self) -> bool:
        """Whether tenants have separate groups, and demoted processes can have them too."""
        return self._tenants_parent is not None

    def demote(self, pid: int, tenant: TenantId | None) -> Path:
        """Demote a process of a tenant, so that it gets only idle cores; return its group. Raise OSError if that fails.
        Takes milliseconds.
        """
        parent = self._demoted_parent or self._make_demoted_parent()
        self._last_demoted += 1
        directory = parent / f"{self._last_demoted}"
        directory.mkdir()
        try:
            _make_idle(directory)
            (directory / "cgroup.procs").write_text(f"{pid}")
        finally:
            # From now on, `keep` removes it when it is empty.
            self._demoted[directory] = tenant
        return directory

    def _make_demoted_parent(self) -> Path:
        """Create the group of all demoted processes. For the kernel they compete with the others as one: with a group
        for each at this level, a worker that woke up beside them waited ten times as long.
        """
        if self._tenants_parent is None:
            raise FileNotFoundError("there are no control groups")
        directory = self._tenants_parent.with_name(f"{self.name}{IDLE_SUFFIX}")
        self._claim(directory)
        if (directory / "pids.max").exists():
            _configure("pids", directory)
        if _is_version_2(directory):
            (directory / "cgroup.subtree_control").write_text("+cpu")
        _make_idle(directory)
        self._demoted_parent = directory
        return directory

    def restore(self, directory: Path) -> None:
        """Give the process of this group, which was demoted, the CPU weight of the node's own group. Takes
        microseconds, and applies to a process that is ending, too. Must be followed by `ended`.
        """
        if self._demoted_parent is None:
            return
        self._restored.add(directory)
        with suppress(OSError):
            for each in (directory, self._demoted_parent):
                _end_idle(each)
            _set_weight(directory, 1)
            _configure("cpu", self._demoted_parent)

    def ended(self, directory: Path) -> None:
        """The process of this group has ended. Unless another restored one is left, all demoted processes get only idle
        cores again.
        """
        if directory in self._restored:
            self._restored.discard(directory)
            if not self._restored and self._demoted_parent is not None:
                with suppress(OSError):
                    _make_idle(self._demoted_parent)

    # Shutdown

    def _clean(self) -> None:
        """Remove groups that killed nodes left."""
        for parent in set(self._parents.values()):
            for directory in parent.glob(f"{NAME_PREFIX}*"):
                with suppress(OSError):
                    _remove_left(directory)

    def close(self) -> None:
        """Remove the groups. Their processes must have been killed; waits up to EMPTY_S for the last to end."""
        checks = int(EMPTY_S / PAUSE_S)
        while checks and sum(not _remove_all(directory) for directory in list(self._locks)):
            time.sleep(PAUSE_S)
            checks -= 1
        for lock in self._locks.values():
            os.close(lock)
        self._locks.clear()
        self._tenants.clear()
        self._demoted.clear()
        self._restored.clear()
        self._tenants_parent = self._demoted_parent = self.memory = None


def _listing(directory: Path) -> Path:
    return directory / ("cgroup.threads" if _is_version_2(directory) else "cgroup.procs")


def _is_version_2(directory: Path) -> bool:
    return (directory / "cgroup.type").exists()


def allows_tenant_groups(directory: Path) -> bool:
    """Whether tenants' groups can be created below a group of the memory controller: only in version 1."""
    return (directory / "memory.usage_in_bytes").exists()


def _configure(controller: str, directory: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    if controller == "pids":
        most = int(PIDS_SHARE * (number_in(PID_MAX) or TASKS_USUAL))
        (directory / "pids.max").write_text(f"{most}")
    elif _is_version_2(directory):
        (directory / "cpu.weight").write_text(f"{min(10000, WEIGHT * cores // NODE_DIVISOR)}")
    else:
        (directory / "cpu.shares").write_text(f"{SHARES * cores // NODE_DIVISOR}")


def _set_weight(directory: Path, divisor: int) -> None:
    """Give a group the usual CPU weight, divided by `divisor`."""
    with suppress(OSError):
        if _is_version_2(directory):
            (directory / "cpu.weight").write_text(f"{max(WEIGHT_LEAST, WEIGHT // divisor)}")
        else:
            (directory / "cpu.shares").write_text(f"{max(SHARES_LEAST, SHARES // divisor)}")


def _make_idle(directory: Path) -> None:
    """Give a group only idle cores; without that possibility, the least CPU weight."""
    if (directory / "cpu.idle").exists():
        (directory / "cpu.idle").write_text("1")
    else:
        _set_weight(directory, SHARES)


def _end_idle(directory: Path) -> None:
    if (directory / "cpu.idle").exists():
        (directory / "cpu.idle").write_text("0")


def _locked(directory: Path, how: int) -> int | None:
    """A descriptor that locks the group; None: the group does not exist, was replaced, or another node has it."""
    try:
        lock = os.open(directory, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, how)
        if os.path.samestat(os.fstat(lock), os.stat(directory)):
            return lock
    except (FileNotFoundError, BlockingIOError):
        pass
    except OSError:
        os.close(lock)
        raise
    os.close(lock)
    return None


def _remove_left(directory: Path) -> None:
    """Remove a group unless a running node has it: a lock ends with its holder."""
    lock = _locked(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if lock is not None:
        # No other node can lock it meanwhile.
        _remove_all(directory)
        os.close(lock)


def _remove_all(directory: Path) -> bool:
    """Remove a group and those below it; return whether it is gone."""
    for below in directory.glob("*/"):
        remove_group(below)
    return remove_group(directory)

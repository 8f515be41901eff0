"""The control groups in which the kernel counts the memory of each tenant, where the system has them.

What a process shows of its memory may be too little: a handler can make system calls that the readers of `/proc` do not
expect. The kernel charges each page to the group of the process that touched it first, whatever that process does with
it later. So `footprints.py` finds the memory that a tenant's group has, and its processes do not show. Executors are
not in these groups: their memory is bounded with that of the devices.
"""

import os
import re
from collections.abc import Collection
from pathlib import Path

from overwinter.core.ids import TenantId
from overwinter.node.cgroup_files import remove_group

STAT_BYTES = 4096
_CHARGED = re.compile(rb"^(?:rss|shmem) (\d+)$", re.MULTILINE)
"""Anonymous pages (rss), and those of tmpfs files and shared memory (shmem), such as buffers."""


class TenantMemory:
    """The groups of tenants below the node's group of the memory controller, in control groups version 1: groups of
    version 2 that single threads may enter have no memory controller.
    """

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self._tenants: dict[TenantId, Path] = {}
        self._last = 0

    def open(self, tenant: TenantId) -> int:
        """Open the file by which a process with one thread enters the tenant's group. Raises OSError."""
        directory = self._tenants.get(tenant)
        if directory is None:
            self._last += 1
            directory = self._parent / f"memory-{self._last}"
            directory.mkdir()
            self._tenants[tenant] = directory
        return os.open(directory / "tasks", os.O_WRONLY | os.O_CLOEXEC)

    def charged_bytes(self, tenant: TenantId) -> int:
        """Return the memory that the tenant's workers and zygote have, as the kernel counts it; 0 without a group."""
        directory = self._tenants.get(tenant)
        if directory is None:
            return 0
        try:
            with open(directory / "memory.stat", "rb", buffering=0) as stat:
                return sum(map(int, _CHARGED.findall(stat.read(STAT_BYTES))))
        except OSError:
            return 0

    def keep(self, tenants: Collection[TenantId]) -> None:
        """Remove the groups of all other tenants, if they are empty."""
        for tenant in self._tenants.keys() - tenants:
            if remove_group(self._tenants[tenant]):
                del self._tenants[tenant]

"""Detects that the machine runs short of memory, so that the scheduler releases some before anything fails."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from overwinter.core.events import Event, MemoryPressure
from overwinter.node.cgroup_files import number_in
from overwinter.node.faults import Faults

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
EVERY_S = 1.0
KIB = 1024


def total_bytes(cgroup: Path = CGROUP) -> int:
    """Return the memory of the machine, or the limit of this container if it is lower."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # A container has this file only with control groups version 2; it has no number if there is no limit.
    return min(physical, number_in(cgroup / "memory.max") or physical)


def available_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """Return the available memory of the system, or of this container if it is lower; None if unknown."""
    found = []
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) * KIB)
    except (OSError, LookupError, ValueError):
        pass
    try:
        limit = number_in(cgroup / "memory.max")
        if limit is not None:
            cached = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
            used = int((cgroup / "memory.current").read_text()) - int(cached.get("inactive_file", 0))
            found.append(max(0, limit - used))
    except (OSError, ValueError):
        # This is no container with control groups version 2.
        pass
    return min(found, default=None)


async def watch_memory(
    least_bytes: int,
    post: Callable[[Event], None],
    faults: Faults,
    available: Callable[[], int | None] = available_bytes,
) -> None:
    """Periodically compare the available memory with `least_bytes`. If it is less, ask the scheduler to release the
    difference.
    """
    while True:
        with faults.contained("free memory"):
            free = available()
            if free is not None and free < least_bytes:
                post(MemoryPressure(least_bytes - free))
        await asyncio.sleep(EVERY_S)

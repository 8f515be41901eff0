"""Is the machine running short of memory? Then blocks that nothing holds go before anything has to fail."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from overwinter.core.events import Event, Pressed
from overwinter.node.faults import Faults

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
EVERY_S = 1.0
KIB = 1024


def total_bytes(cgroup: Path = CGROUP) -> int:
    """Memory of the machine, or of this container where that is less."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(physical, int((cgroup / "memory.max").read_text()))
    except (OSError, ValueError):
        # No cgroup of its own, or none that limits.
        return physical


def available_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """Memory that could be had: the system's, or this container's where that is less; None where nobody says."""
    found = []
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) * KIB)
    except (OSError, KeyError, ValueError):
        pass
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit != "max":
            cached = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
            used = int((cgroup / "memory.current").read_text()) - int(cached.get("inactive_file", 0))
            found.append(max(0, int(limit) - used))
    except (OSError, ValueError):
        # No cgroup of its own.
        pass
    return min(found, default=None)


async def watch_memory(
    least_bytes: int,
    post: Callable[[Event], None],
    faults: Faults,
    available: Callable[[], int | None] = available_bytes,
) -> None:
    """Ask the mind, for ever, for what is lacking whenever less than `least_bytes` could be had."""
    while True:
        with faults.contained("free memory"):
            free = available()
            if free is not None and free < least_bytes:
                post(Pressed(least_bytes - free))
        await asyncio.sleep(EVERY_S)

"""How many workers can this machine have, and how much memory may they take, where nobody says?

Workers stay as long as there is room, so both bounds are met sooner or later, and neither may cost the machine
anything. Half of what is there at the start is left: of the memory for blocks, requests, zygotes and whoever else is
there; of the process ids for others, as the node's control group does it (cgroups.py).
"""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from overwinter.core.config import WORKERS_MOST
from overwinter.node.cgroups import PIDS_SHARE, group_of
from overwinter.node.pressure import available_bytes, total_bytes
from overwinter.scheduler.forked import AHEAD_BYTES

MEMORY_SHARE = 0.5
"""Of the memory that is available at the start, what workers may take."""
DESCRIPTORS_SHARE = 0.5
"""Of the descriptors that the node may have open, what is for workers: a quarter is for connections."""
TASKS_PER_WORKER = 2
"""Of a worker that has one run at once; each more takes one: a thread of its own."""
DESCRIPTORS_PER_WORKER = 8
"""The same: a channel, its process and its memory, what it prints, two for its run, and some of the blocks that it is
handed; each more run takes two."""
WORKERS_AHEAD, AHEAD_SHARE = 8, 1 / 16
"""Processes forked ahead where nobody says how many, and what they take at most of the workers' memory."""
PID_MAX = Path("/proc/sys/kernel/pid_max")
THREADS_MAX = Path("/proc/sys/kernel/threads-max")


def memory_bytes() -> int:
    """What all workers together may take."""
    available = available_bytes()
    return int(MEMORY_SHARE * (total_bytes() if available is None else available))


def workers_ahead(memory_bytes: int) -> int:
    """How many processes may be forked ahead where all workers together may take so much."""
    return min(WORKERS_AHEAD, int(AHEAD_SHARE * memory_bytes) // AHEAD_BYTES)


def workers_most(descriptors: int | None = None, tasks: int | None = None) -> int:
    """How many workers there may be, and how many runs they may have at once: one that may have several takes no more
    than as many workers. In place of what this system allows, so many descriptors and tasks.
    """
    if descriptors is None:
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    by_tasks = int(PIDS_SHARE * (min(_tasks()) if tasks is None else tasks)) // TASKS_PER_WORKER
    most = WORKERS_MOST
    if descriptors != resource.RLIM_INFINITY:
        most = int(DESCRIPTORS_SHARE * descriptors) // DESCRIPTORS_PER_WORKER
    return max(1, min(WORKERS_MOST, by_tasks, most))


def _tasks() -> Iterator[int]:
    """Processes and threads that the system, this process's control groups, and its user may have."""
    yield from (int(path.read_text()) for path in (PID_MAX, THREADS_MAX))
    yield from group_tasks(group_of("pids"))
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    # Where the node is root each of its workers is a user of its own, and root has no such limit.
    if os.geteuid() != 0 and most != resource.RLIM_INFINITY:
        yield most


def group_tasks(group: Path | None) -> Iterator[int]:
    """What a control group and all above it allow."""
    while group is not None and (group / "pids.max").is_file():
        most = (group / "pids.max").read_text().strip()
        if most != "max":
            yield int(most)
        group = group.parent

"""Computes the default bounds on the number of workers and on their memory.

Workers stay as long as there is memory, so both bounds are reached sooner or later, and neither may harm the machine.
Half of the available resources at the start is left: of the memory for blocks, requests, zygotes and other programs; of
the process ids for other programs, as in the node's control group (cgroups.py).
"""

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

from overwinter.core.config import WORKERS_MOST
from overwinter.node.cgroups import PID_MAX, PIDS_SHARE, TASKS_USUAL, group_of, number_in
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
THREADS_MAX = Path("/proc/sys/kernel/threads-max")
BYTES_LEAST = 64 << 20
"""That workers may take where the machine says that it has next to nothing left: what idles makes room."""


def memory_bytes(log: Callable[[str], None]) -> int:
    """The bound on the memory of all workers."""
    available = available_bytes()
    share = int(MEMORY_SHARE * (total_bytes() if available is None else available))
    if share < BYTES_LEAST:
        log(f"no more than {2 * share} bytes of memory can be had here: workers may take {BYTES_LEAST} all the same")
    return max(share, BYTES_LEAST)


def workers_ahead(memory_bytes: int) -> int:
    """How many processes may be forked ahead under this bound on the memory of all workers."""
    return min(WORKERS_AHEAD, int(AHEAD_SHARE * memory_bytes) // AHEAD_BYTES)


def workers_most(log: Callable[[str], None], descriptors: int | None = None, tasks: int | None = None) -> int:
    """The maximum of workers, and of their concurrent runs: a worker with several runs takes at most the resources of
    as many workers. The arguments replace the system's limits on descriptors and tasks.
    """
    if descriptors is None:
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    by_tasks = int(PIDS_SHARE * (min(_tasks(log)) if tasks is None else tasks)) // TASKS_PER_WORKER
    most = WORKERS_MOST
    if descriptors != resource.RLIM_INFINITY:
        most = int(DESCRIPTORS_SHARE * descriptors) // DESCRIPTORS_PER_WORKER
    return max(1, min(WORKERS_MOST, by_tasks, most))


def _tasks(log: Callable[[str], None]) -> Iterator[int]:
    """Processes and threads that the system, this process's control groups, and its user may have."""
    for path in (PID_MAX, THREADS_MAX):
        most = number_in(path)
        if most is None:
            log(f"{path} does not say how many processes there may be: {TASKS_USUAL} are counted on")
        yield most or TASKS_USUAL
    yield from group_tasks(group_of("pids"), log)
    allowed = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    # Where the node is root each of its workers is a user of its own, and root has no such limit.
    if os.geteuid() != 0 and allowed != resource.RLIM_INFINITY:
        yield allowed


def group_tasks(group: Path | None, log: Callable[[str], None]) -> Iterator[int]:
    """The tasks that a control group and all above it allow."""
    while group is not None and os.path.isfile(group / "pids.max"):
        most = number_in(group / "pids.max")
        if most is not None:
            yield most
        elif not _is_unbounded(group / "pids.max"):
            log(f"{group / 'pids.max'} does not say how many processes there may be: it bounds no workers")
        group = group.parent


def _is_unbounded(path: Path) -> bool:
    try:
        return path.read_text().strip() == "max"
    except (OSError, ValueError):
        return False

"""Computes the default bounds on the number of workers and on their memory.

Workers stay as long as there is memory, so both bounds are reached sooner or later, and reaching them must not harm the
machine. So workers may use half of the resources that are available at the start. The other half of the memory is for
blocks, requests, zygotes and other programs; the other half of the process ids is for other programs, as in the node's
control group (cgroups.py).
"""

import os
import resource
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from overwinter.core.config import WORKERS_MOST
from overwinter.core.devices import DeviceConfig, gpus_of
from overwinter.core.errors import ConflictError
from overwinter.node.cgroup_files import limiting_group, number_in
from overwinter.node.cgroups import PID_MAX, PIDS_SHARE, TASKS_USUAL
from overwinter.node.pressure import available_bytes, total_bytes
from overwinter.scheduler.forked import AHEAD_BYTES
from overwinter.worker.gpu_files import gpus, lacking_files

MEMORY_SHARE = 0.5
"""The share of the memory that workers may use, of that available at the start and not reserved by devices."""
DESCRIPTORS_SHARE = 0.5
"""The share of the node's descriptors that is for workers; a quarter is for connections."""
TASKS_PER_WORKER = 2
"""The tasks of a worker with one concurrent run. Each further run needs another thread."""
DESCRIPTORS_PER_WORKER = 8
"""The descriptors of a worker with one concurrent run: its channel, process, memory file and output, two for the run,
and some for blocks that are sent. Each further run needs two.
"""
WORKERS_AHEAD, AHEAD_SHARE = 8, 1 / 16
"""The default number of processes forked ahead, and the largest share of the workers' memory that they may use."""
THREADS_MAX = Path("/proc/sys/kernel/threads-max")
BYTES_LEAST = 64 << 20
"""The limit of the workers' memory if the machine reports almost no free memory. Idle workers and blocks are then
removed.
"""


def memory_bytes(log: Callable[[str], None], device_bytes: int = 0) -> int:
    """The bound on the memory of all workers; `device_bytes`: the memory that devices will reserve."""
    available = available_bytes()
    share = int(MEMORY_SHARE * ((total_bytes() if available is None else available) - device_bytes))
    if share < BYTES_LEAST:
        left = max(0, 2 * share)
        log(
            f"only {left} bytes of memory are available besides those of devices: workers may still use {BYTES_LEAST} "
            "bytes"
        )
    return max(share, BYTES_LEAST)


def check_gpus(devices: Sequence[DeviceConfig]) -> None:
    """Raise ConflictError if this machine lacks the GPU of one of these devices or the files of its driver, or PyTorch
    is built for CPUs only.
    """
    if gpus_of(devices) and version("torch").endswith("+cpu"):
        raise ConflictError(
            f"PyTorch {version('torch')} was built without CUDA: install its build for GPUs, or serve with another "
            "--device-kind"
        )
    count = len(gpus())
    for each in devices:
        if each.kind == "cuda" and each.gpu >= count:
            raise ConflictError(
                f"device {each.name!r} would be GPU {each.gpu}, and this machine has {count} NVIDIA GPUs, numbered "
                "from 0: serve with fewer --devices, or with another --device-kind"
            )
    if gpus_of(devices) and (lacking := lacking_files()):
        # An executor, in its sandbox, could not create them.
        raise ConflictError(
            f"this machine has no {' and no '.join(lacking)}, which the driver needs: run `nvidia-modprobe -c 0 -u` as "
            "root (for a container, on its host), and start the node again"
        )


def workers_ahead(memory_bytes: int) -> int:
    """Return how many processes may be forked ahead under this limit of the memory of all workers."""
    return min(WORKERS_AHEAD, int(AHEAD_SHARE * memory_bytes) // AHEAD_BYTES)


def workers_most(log: Callable[[str], None], descriptors: int | None = None, tasks: int | None = None) -> int:
    """Return the most workers, which is also the limit of their concurrent runs: a worker with several runs needs at
    most the resources of as many workers. `descriptors` and `tasks` replace the system's limits.
    """
    if descriptors is None:
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    by_tasks = int(PIDS_SHARE * (min(_tasks(log)) if tasks is None else tasks)) // TASKS_PER_WORKER
    most = WORKERS_MOST
    if descriptors != resource.RLIM_INFINITY:
        most = int(DESCRIPTORS_SHARE * descriptors) // DESCRIPTORS_PER_WORKER
    return max(1, min(WORKERS_MOST, by_tasks, most))


def _tasks(log: Callable[[str], None]) -> Iterator[int]:
    """Yield the limits on tasks of the system, of this process's control groups and of its user."""
    for path in (PID_MAX, THREADS_MAX):
        most = number_in(path)
        if most is None:
            log(f"{path} does not report a limit of processes: {TASKS_USUAL} is assumed")
        yield most or TASKS_USUAL
    yield from group_tasks(limiting_group("pids"), log)
    allowed = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    # If the node is root, workers have other users, and root has no such limit.
    if os.geteuid() != 0 and allowed != resource.RLIM_INFINITY:
        yield allowed


def group_tasks(group: Path | None, log: Callable[[str], None]) -> Iterator[int]:
    """Yield the limits on tasks of a control group and of all above it."""
    while group is not None and os.path.isfile(group / "pids.max"):
        most = number_in(group / "pids.max")
        if most is not None:
            yield most
        elif not _is_unbounded(group / "pids.max"):
            log(f"{group / 'pids.max'} does not report a limit of processes: none is assumed")
        group = group.parent


def _is_unbounded(path: Path) -> bool:
    try:
        return path.read_text().strip() == "max"
    except (OSError, ValueError):
        return False

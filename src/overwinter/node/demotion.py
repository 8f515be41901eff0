"""Demotes a process, so that it gets only idle cores.

The process is moved into a control group for demoted processes. Giving its threads SCHED_IDLE would not change the CPU
weight of its tenant's group. Where there are no control groups, its threads get SCHED_IDLE, which is allowed for
processes of the same user. A thread with SCHED_IDLE passes it on to its new threads and cannot leave it.

The end of a process frees its memory, and takes processor time. So the CPU weight of a process in a control group is
restored when it is killed.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from overwinter.core.ids import TenantId
from overwinter.node.cgroups import Groups
from overwinter.node.process_identity import has_ended

PASSES = 100
"""The most passes over the threads of a process. A thread created during a pass may still have the old priority."""


class Demotion(NamedTuple):
    """A demoted process in a control group."""

    groups: Groups
    group: Path

    def restore(self) -> None:
        """Restore the CPU weight of the process, which is being killed; takes microseconds."""
        self.groups.restore(self.group)

    def ended(self) -> None:
        """The process has ended."""
        self.groups.ended(self.group)


def demote(groups: Groups, pid: int, pidfd: int, tenant: TenantId | None) -> Demotion | None:
    """Demote the process of a tenant, and close `pidfd`. Takes milliseconds. If the process has ended, another process
    with its pid is not affected.

    Returns None if it has ended, or if its CPU weight cannot be restored.
    """
    try:
        if not has_ended(pidfd):
            return Demotion(groups, groups.demote(pid, tenant))
    except OSError:
        # There is no group, or the process has ended.
        _make_idle(pid, pidfd)
    finally:
        os.close(pidfd)
    return None


def _make_idle(pid: int, pidfd: int) -> None:
    for _ in range(PASSES):
        threads = _threads(pid)
        if has_ended(pidfd) or not sum(_make_thread_idle(thread) for thread in threads):
            return


def _threads(pid: int) -> list[int]:
    try:
        return [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []


def _make_thread_idle(thread: int) -> bool:
    """Demote a thread; return whether it was not demoted before."""
    with suppress(ProcessLookupError, PermissionError):
        if os.sched_getscheduler(thread) != os.SCHED_IDLE:
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
            return True
    return False

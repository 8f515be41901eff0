"""How does a process compute from now on only when nobody else wants the core?

It is moved into a control group of such processes; to make its threads idle ones would leave the weight of its tenant's
group as it is. Where there are no groups its threads are made idle ones, which a process may do to those of its user.
A thread that is an idle one makes only such, and may not become another again.
"""

import os
from contextlib import suppress
from pathlib import Path

from overwinter.node.cgroups import Groups
from overwinter.node.proofs import is_over

PASSES = 100
"""At most, over all threads of a process: a thread that was made meanwhile may be as its maker was."""


def put_behind(groups: Groups, pid: int, pidfd: int) -> None:
    """Put the process behind all others, and close its descriptor. Takes milliseconds; one that is over is none, and
    whoever got its number is left alone.
    """
    try:
        if not is_over(pidfd):
            groups.put_behind(pid)
    except OSError:
        # There is none, or the process is gone.
        _make_idle(pid, pidfd)
    finally:
        os.close(pidfd)


def _make_idle(pid: int, pidfd: int) -> None:
    for _ in range(PASSES):
        threads = _threads(pid)
        if is_over(pidfd) or not sum(_make_thread_idle(thread) for thread in threads):
            return


def _threads(pid: int) -> list[int]:
    try:
        return [int(place.name) for place in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []


def _make_thread_idle(thread: int) -> bool:
    """Whether it was none before."""
    with suppress(ProcessLookupError, PermissionError):
        if os.sched_getscheduler(thread) != os.SCHED_IDLE:
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
            return True
    return False

"""Kills the processes that a tenant's zygote leaves when it ends. They normally die with their parent; those of a
compromised zygote may not, and may fork others while they are killed.
"""

import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress

ATTEMPTS, PAUSE_S = 50, 0.01
"""How often this process tries to fork the process that kills all processes of a user, and the pause between."""


def kill_orphans(known: Collection[int], uid: int | None) -> None:
    """Kill the children of this process that are not `known`, and all processes of a user in this process's pid
    namespace; `uid` None: of no user. Waits some milliseconds, longer if they use all process ids.
    """
    for _ in range(ATTEMPTS):
        all_are_killed = uid is None or _kill_all_of(uid)
        for pid in set(_children()).difference(known):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if all_are_killed:
            return
        time.sleep(PAUSE_S)


def _kill_all_of(uid: int) -> bool:
    """Kill the processes of a user together: the kernel lets none of them fork meanwhile. Return False if this process
    cannot fork.
    """
    try:
        pid = os.fork()
    except OSError:
        return False
    if pid == 0:
        try:
            os.setgroups([])
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    return True


def _children() -> list[int]:
    own = os.getpid()
    try:
        with open(f"/proc/{own}/task/{own}/children") as children:
            return [int(pid) for pid in children.read().split()]
    except OSError:
        # The kernel does not list children.
        return []

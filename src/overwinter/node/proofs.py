"""Verifies a zygote's statements about a process with the kernel, because a tenant's zygote is untrusted."""

import ctypes
import os
import re
import select
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PROC_MAGIC = 0x9FA0
_STATFS = ctypes.c_long * 32
"""Larger than what the C library fills in; the kind of file system comes first."""
_libc = ctypes.CDLL(None, use_errno=True)

PARENT_FIELD = 1
"""In /proc/PID/stat, counted from behind the name."""


def child_of(parent: int, pid: int) -> int | None:
    """A descriptor of the process, which stays its own; None when it is gone. ValueError unless `parent` forked it."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    try:
        forked_by = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[PARENT_FIELD])
    except (FileNotFoundError, ProcessLookupError):
        forked_by = None
    # One that ended in between may have been read as another, which got its number.
    if forked_by == parent or is_over(pidfd):
        return pidfd
    os.close(pidfd)
    raise ValueError(f"process {pid} was not forked by the zygote that names it")


def is_over(pidfd: int) -> bool:
    """Whether the process has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def kill(pidfd: int) -> None:
    """End the process, if it still lives."""
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def wait_over(pidfds: Iterable[int], seconds: float) -> None:
    """Wait until these processes have ended, at most so long for each; the descriptors are closed."""
    for pidfd in pidfds:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll(seconds * 1e3)
        os.close(pidfd)


def is_smaps_of(fd: int, pid: int) -> bool:
    """Whether the descriptor is the smaps file of this process, and not another file of that name. It may belong to
    another /proc than the node's, in which the process has another pid.
    """
    place = _STATFS()
    try:
        numbers = re.findall(r"^NSpid:(.*)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        named = re.fullmatch(r"(?:/.*)?/(\d+)/smaps", os.readlink(f"/proc/self/fd/{fd}"))
    except (FileNotFoundError, ProcessLookupError):
        return False
    is_proc = _libc.fstatfs(fd, ctypes.byref(place)) == 0 and place[0] == PROC_MAGIC
    return is_proc and named is not None and any(named[1] in each.split() for each in numbers)

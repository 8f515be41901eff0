"""Asks the kernel whether what a zygote reports about a process is true, because a tenant's zygote is untrusted."""

import ctypes
import os
import re
import select
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from overwinter.node.process_stat import PARENT, stat_field

PROC_MAGIC = 0x9FA0
_STATFS = ctypes.c_long * 32
"""Larger than the structure that the C library fills; its first field is the type of the filesystem."""
_libc = ctypes.CDLL(None, use_errno=True)


def open_child(parent: int, pid: int) -> int | None:
    """Return a descriptor of the process, which refers to it even if its pid is reused; None if it no longer exists.

    Raises ValueError if it runs and `parent` did not fork it, and OSError if the kernel opens no descriptor.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    # If the process ended meanwhile, another process with its pid may have been read.
    if stat_field(pid, PARENT) == parent or has_ended(pidfd):
        return pidfd
    os.close(pidfd)
    raise ValueError(f"process {pid} was not forked by the zygote that reports it")


def has_ended(pidfd: int) -> bool:
    """Whether the process has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def kill(pidfd: int) -> None:
    """Kill the process, if it still runs."""
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def wait_until_ended(pidfds: Iterable[int], seconds: float) -> None:
    """Wait until these processes have ended, for at most `seconds` each; close the descriptors."""
    for pidfd in pidfds:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll(seconds * 1e3)
        os.close(pidfd)


def is_smaps_of(fd: int, pid: int) -> bool:
    """Whether the descriptor is the smaps file of this process, and not another file of that name. It may belong to
    another /proc than the node's, in which the process has another pid.
    """
    filesystem = _STATFS()
    try:
        numbers = re.findall(r"^NSpid:(.*)$", Path(f"/proc/{pid}/status").read_text(errors="replace"), re.MULTILINE)
        named = re.fullmatch(r"(?:/.*)?/(\d+)/smaps", os.readlink(f"/proc/self/fd/{fd}"))
    except (FileNotFoundError, ProcessLookupError):
        return False
    is_proc = _libc.fstatfs(fd, ctypes.byref(filesystem)) == 0 and filesystem[0] == PROC_MAGIC
    return is_proc and named is not None and any(named[1] in each.split() for each in numbers)

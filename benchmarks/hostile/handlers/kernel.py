"""Attempts to reach the kernel and its objects that all processes share. `named.py` passes `asked` to each
attempt; none here needs it.
"""

import contextlib
import ctypes
import os
import socket
import subprocess
import threading
from functools import partial

SYSCALLS = {
    "io_uring": (425, 8, 0),
    "userfaultfd": (323, 1),
    "perf_event_open": (298, 0, 0, -1, -1, 0),
    "bpf": (321, 0, 0, 0),
    "add_key": (248,),
    "keyctl": (250, 0, -3, 1),
    "kexec_load": (246, 0, 0, 0, 0),
    "init_module": (175, 0, 0, 0),
    "mount": (165, 0, 0, 0, 0, 0),
    "pivot_root": (155, 0, 0),
    "setns": (308, -1, 0),
    "name_to_handle_at": (303, -1, 0, 0, 0, 0),
    "open_by_handle_at": (304, -1, 0, 0),
    "process_madvise": (440, -1, 0, 0, 21, 0),
    "pidfd_open": (434, 1, 0),
    "fanotify_init": (300, 0, 0),
    "memfd_secret": (447, 0),
    "modify_ldt": (154, 0, 0, 0),
    "personality": (135, 0x0040000),
    "quotactl": (179, 0, 0, 0, 0),
    "swapon": (167, 0, 0),
    "reboot": (169, 0, 0, 0, 0),
}
BLOCKED_ERRORS = (1, 13, 38)
"""EPERM, EACCES and ENOSYS: the call is blocked. With any other error the kernel has examined the arguments."""
libc = ctypes.CDLL(None, use_errno=True)


def call(number, *arguments):
    """Make a system call; raise OSError if it fails."""
    result = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(each) for each in arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def surface(name, asked):
    """Make a harmless system call; raise OSError if it is blocked."""
    try:
        made = call(*SYSCALLS[name])
    except OSError as error:
        if error.errno in BLOCKED_ERRORS:
            raise
        return f"reached: {error}"
    if name in ("io_uring", "userfaultfd", "perf_event_open", "pidfd_open", "memfd_secret", "fanotify_init"):
        os.close(made)
    return f"made {made}"


def opened(family, kind, protocol=0):
    with socket.socket(family, kind, protocol):
        return "made"


def netlink(asked):
    return opened(16, socket.SOCK_RAW, 0)


def vsock(asked):
    return opened(40, socket.SOCK_STREAM)


def packet(asked):
    return opened(17, socket.SOCK_RAW, 768)


def raw(asked):
    return opened(socket.AF_INET, socket.SOCK_RAW, 1)


def crypto(asked):
    return opened(38, socket.SOCK_SEQPACKET)


def user_namespace(asked):
    call(272, 0x10000000 | 0x40000000)
    return opened(socket.AF_INET, socket.SOCK_RAW, 1)


def mount_namespace(asked):
    call(272, 0x00020000)
    return "left its mounts"


def key_write(asked):
    parts = [ctypes.create_string_buffer(each) for each in (b"user", b"overwinter", b"spied")]
    return call(248, *(ctypes.addressof(each) for each in parts), 5, -2)


def devices(asked):
    found = []
    for name in (
        "/dev/mem",
        "/dev/kmsg",
        "/dev/shm",
        "/dev/vda",
        "/dev/fuse",
        "/dev/kvm",
        "/dev/tty",
        "/sys/kernel/debug",
    ):
        with contextlib.suppress(OSError):
            found.append((name, os.open(name, os.O_RDONLY)))
    if not found:
        raise PermissionError("devices")
    return found


def threads(asked):
    """Start threads until that fails, at most 5000."""
    go = threading.Event()
    made = []
    with contextlib.suppress(RuntimeError):
        for _ in range(5000):
            made.append(threading.Thread(target=go.wait, daemon=True))
            made[-1].start()
    go.set()
    return f"{len(made)} threads"


def fork(asked):
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return "forked"


def execute(asked):
    return subprocess.run(["/bin/true"], check=False).returncode


def sysv_segment(asked):
    made = libc.shmget(0, 1 << 20, 0o1600)
    if made < 0:
        raise OSError(ctypes.get_errno(), "shmget")
    return f"segment {made}"


def sysv_queue(asked):
    made = libc.msgget(0, 0o1600)
    if made < 0:
        raise OSError(ctypes.get_errno(), "msgget")
    return f"queue {made}"


def become_root(asked):
    os.setuid(0)
    return os.getuid()


globals().update({name: partial(surface, name) for name in SYSCALLS})

"""The system calls that a worker may make: their names, and their numbers on x86_64 and aarch64.

No call of `ALLOWED` creates a process, a socket, a pipe, a memory file or a System V object, because these escape the
limits, outlive the worker, or reach other processes. Some calls are allowed with some arguments only (seccomp.py).
"""

from collections.abc import Mapping

Numbers = tuple[int | None, int | None]
"""The numbers of a system call on x86_64 and on aarch64; None where it does not exist."""

ALLOWED: Mapping[str, Numbers] = {
    # Memory; resource limits count it.
    "mmap": (9, 222),
    "munmap": (11, 215),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "brk": (12, 214),
    "msync": (26, 227),
    # Files; Landlock and the mount namespace restrict them.
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),
    "writev": (20, 66),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "open": (2, None),
    "openat": (257, 56),
    "close": (3, 57),
    "close_range": (436, 436),
    "lseek": (8, 62),
    "fstat": (5, 80),
    "stat": (4, None),
    "lstat": (6, None),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "getcwd": (79, 17),
    "getdents": (78, None),
    "getdents64": (217, 61),
    "ftruncate": (77, 46),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    # Waiting for events.
    "poll": (7, None),
    "ppoll": (271, 73),
    "select": (23, None),
    "pselect6": (270, 72),
    "futex": (202, 98),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "sched_yield": (24, 124),
    "restart_syscall": (219, 128),
    # The channel of the worker; creating a socket is not allowed, and neither is sending descriptors: if the node
    # received the last one of a removed file, it would free the file's memory on its loop.
    "sendto": (44, 206),
    "recvfrom": (45, 207),
    "recvmsg": (47, 212),
    "getsockname": (51, 204),
    "getsockopt": (55, 209),
    # Creating and ending threads.
    "clone": (56, 220),
    "set_robust_list": (273, 99),
    "set_tid_address": (218, 96),
    "rseq": (334, 293),
    "membarrier": (324, 283),
    "arch_prctl": (158, None),
    "prctl": (157, 167),
    "exit": (60, 93),
    "exit_group": (231, 94),
    # The process's own signals.
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "kill": (62, 129),
    "tgkill": (234, 131),
    "alarm": (37, None),
    "setitimer": (38, 103),
    # Identity and time.
    "getpid": (39, 172),
    "getppid": (110, 173),
    "gettid": (186, 178),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getresuid": (118, 148),
    "getresgid": (120, 150),
    "getgroups": (115, 158),
    "getrusage": (98, 165),
    "times": (100, 153),
    "getrlimit": (97, 163),
    "prlimit64": (302, 261),
    "getcpu": (309, 168),
    "sched_getaffinity": (204, 123),
    "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120),
    "sched_get_priority_max": (146, 125),
    "sched_get_priority_min": (147, 126),
    "sysinfo": (99, 179),
    "uname": (63, 160),
    "time": (201, None),
    "gettimeofday": (96, 169),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "getrandom": (318, 278),
}

FORKING: Mapping[str, Numbers] = {
    # Forking workers, reaping them and restricting them further.
    "fork": (57, None),
    "sendmsg": (46, 211),
    "wait4": (61, 260),
    "waitid": (247, 95),
    "setpgid": (109, 154),
    "socketpair": (53, 199),
    "pipe2": (293, 59),
    "sched_setaffinity": (203, 122),
    "capset": (126, 91),
    "landlock_restrict_self": (446, 446),
}
"""The further calls that a tenant's zygote may make."""

GPU: Mapping[str, Numbers] = {
    # For the driver of an NVIDIA GPU, in its own threads.
    "eventfd2": (290, 19),
    "sendmsg": (46, 211),
    "pipe2": (293, 59),
    "get_mempolicy": (239, 236),
    # Its library listens at an abstract address, for processes that share memory of a GPU; none can connect.
    "socket": (41, 198),
    "bind": (49, 200),
    "listen": (50, 201),
    "setsockopt": (54, 208),
    # The filter answers these without making them (seccomp.py).
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "connect": (42, 203),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "symlink": (88, None),
    "symlinkat": (266, 36),
}
"""The further calls that the executor of a GPU may make."""

"""The sandbox of a worker. Each step reports what it could not apply on this system.

A worker has its own process group and ends with its parent. It has no descriptors except those passed to it, no files
except those of Python, its libraries and a few of the system (Landlock), no system calls except those that it needs
(seccomp), no privileges, a separate user where the node runs as root, and limits on its resources. Namespaces, which it
shares with its zygote, are in namespaces.py.

There are three kinds (`SandboxKind`). A tenant's zygote has the sandbox of a worker, but may fork, and may open its own
files of /proc. A worker that it forks then enters its own, where it may do neither. The executor of a GPU has the
sandbox of a worker, but may use the GPU's driver, and read what the driver's library reads.
"""

import ctypes
import os
import resource
import signal
from collections.abc import Collection, Iterable
from typing import NamedTuple

from overwinter.worker import namespaces
from overwinter.worker.gpu_files import gpu_devices, gpu_paths
from overwinter.worker.python_paths import python_paths, reach_python, unreadable
from overwinter.worker.seccomp import Filter, SandboxKind

_libc = ctypes.CDLL(None, use_errno=True)

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_READ_FILE, _READ_DIR, _EXECUTE, _WRITE_FILE, _TRUNCATE, _CONTROL_DEVICE = (
    1 << 2,
    1 << 3,
    1 << 0,
    1 << 1,
    1 << 14,
    1 << 15,
)
_FILES_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_NETWORK_ABI, _SCOPE_ABI = 4, 6

PROC = "/proc"
"""A tenant's zygote may open files here: the workers that it forks open their own `smaps` for the node. So may the
executor of a GPU, also for writing: the driver names its threads here.
"""
FIRST_UID = 0x70000000
"""The first user id of workers and tenants' zygotes if the node runs as root. The ids belong to no account, and each
process has its own; workers forked by a tenant's zygote share the zygote's.
"""
UIDS = 1 << 20
WORKER_THREADS_MAX = 1024
"""The thread limit of a worker with its own user."""
ZYGOTE_THREADS_MAX = 8192
"""The thread limit of all workers of a tenant's zygote together. When they use all, the zygote can still fork FORKS_MAX
processes.
"""
FORKS_MAX = 1024
DESCRIPTORS_MAX = 4096
NO_SEPARATE_USER = "no separate user: the node does not run as root"
"""What the sandbox of a process that keeps its user lacks."""

_MACHINE_FILES = ("/proc/cpuinfo", "/proc/meminfo")


def uid_of(worker: int) -> int | None:
    """Return the user id of a worker, or None if the node may not choose one."""
    return FIRST_UID + worker % UIDS if os.geteuid() == 0 else None


def zygote_uid_of(number: int) -> int | None:
    """Return the user id of a tenant's zygote, which `uid_of` returns for no worker; None as for `uid_of`."""
    return FIRST_UID + UIDS + number % UIDS if os.geteuid() == 0 else None


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the process `parent` ends. Every change of user resets this."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


class WorkerLimits(NamedTuple):
    """The limits of a worker: private memory, address space for mappings, and the size to which its system calls may
    write files; 0: they write to none, not even to its buffers, which it maps.
    """

    memory_bytes: int
    mapped_bytes: int
    file_bytes: int = 0


class Sandbox:
    """The resources that contain the workers of a zygote, created once and inherited by its forks."""

    def __init__(self, threads_max: int | None = None, uses_gpus: bool = False, readable: Collection[str] = ()) -> None:
        """Create them. `threads_max` limits the threads, together, of all workers that have no separate user; None:
        unlimited. `uses_gpus`: whether executors of GPUs enter it. `readable`: further files that may be read.
        """
        self._python = reach_python()
        places = [*python_paths(), *_MACHINE_FILES, *readable]
        self._rulesets: dict[SandboxKind, int] = {"worker": _ruleset(places), "zygote": _ruleset([*places, PROC])}
        self._filters: dict[SandboxKind, Filter] = {"worker": Filter("worker"), "zygote": Filter("zygote")}
        if uses_gpus:
            self._rulesets["gpu"] = _ruleset([*places, *gpu_paths(), PROC], [*gpu_devices(), PROC])
            self._filters["gpu"] = Filter("gpu")
        self._memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self._held = _held()
        """The memory of this process when this object was created, or when it entered the sandbox."""
        self._data_bytes = self._held.data
        self._threads_max = threads_max

    def fds(self) -> list[int]:
        """Descriptors that must stay open."""
        return [*self._python, *self._ruleset_fds()]

    def _ruleset_fds(self) -> list[int]:
        return [fd for fd in self._rulesets.values() if fd >= 0]

    def enter(
        self, uid: int | None, limits: WorkerLimits, keep: Iterable[int], kind: SandboxKind = "worker"
    ) -> list[str]:
        """Put the calling process into a worker's sandbox permanently, or into that of a GPU's executor; return what
        could not be applied.

        `uid` is its new user; None: the user does not change, as in a fork of a tenant's zygote.
        """
        os.setpgid(0, 0)
        missing = self._contain(kind, uid, limits, keep)
        for fd in self._ruleset_fds():
            os.close(fd)
        return missing

    def lower_limits(self, limits: WorkerLimits) -> None:
        """Lower the limits of the calling process, which is in a worker's sandbox."""
        self._set_limits(limits, self._held)

    def enter_as_zygote(self, uid: int | None, limits: WorkerLimits, keep: Iterable[int]) -> list[str]:
        """Put the calling process into the sandbox of a tenant's zygote. Its children may lower `limits`, not raise
        them.
        """
        return self._contain("zygote", uid, limits, keep)

    def _contain(self, kind: SandboxKind, uid: int | None, limits: WorkerLimits, keep: Iterable[int]) -> list[str]:
        parent = os.getppid()
        _close_all_but([*keep, *self.fds()])
        for signal_ in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(signal_, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # In the sandbox the process cannot read these figures, and `lower_limits` needs them.
        self._held = _held()
        self._set_limits(limits, self._held)
        missing = self._become(kind, uid)
        die_with_parent(parent)
        return missing + _restrict(self._rulesets[kind]) + self._filters[kind].install()

    def test(self) -> list[str]:
        """Put a test child into each kind of sandbox except the zygote's; report what they lack."""
        kinds = [kind for kind in self._filters if kind != "zygote"]
        return list(dict.fromkeys(missing for kind in kinds for missing in self._test(kind)))

    def _test(self, kind: SandboxKind) -> list[str]:
        here, there = os.pipe()
        pid = os.fork()
        if pid == 0:
            missing = self.enter(uid_of(0), WorkerLimits(4 << 30, 1 << 30), [there], kind)
            os.write(there, "\n".join([*missing, *unreadable()]).encode())
            os._exit(0)
        os.close(there)
        with open(here) as report:
            missing = [line for line in report.read().split("\n") if line]
        _, status = os.waitpid(pid, 0)
        return missing if status == 0 else ["the sandbox could not be tested: the test process failed"]

    def _become(self, kind: SandboxKind, uid: int | None) -> list[str]:
        """Become the new user, if there is one, limit the threads, and drop all privileges."""
        threads_max = self._threads_max if uid is None else WORKER_THREADS_MAX
        if uid is not None and kind == "zygote":
            threads_max = ZYGOTE_THREADS_MAX + FORKS_MAX
        elif uid is None and os.getuid() >= FIRST_UID:
            threads_max = ZYGOTE_THREADS_MAX
        if threads_max is not None:
            _limit(resource.RLIMIT_NPROC, threads_max)
        if uid is not None:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        namespaces.drop_privileges()
        _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        return [NO_SEPARATE_USER] if uid is None else []

    def _set_limits(self, limits: WorkerLimits, held: "_Held") -> None:
        # The memory of the zygote's programs is not charged to the worker.
        memory_bytes = min(limits.memory_bytes, self._memory_bytes) + max(0, held.data - self._data_bytes)
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_NOFILE, DESCRIPTORS_MAX)
        _limit(resource.RLIMIT_FSIZE, limits.file_bytes)
        _limit(resource.RLIMIT_DATA, memory_bytes)
        # Memory that was written and then made read-only does not count as data. The zygote's mappings are not charged.
        _limit(resource.RLIMIT_AS, held.mapped + memory_bytes + limits.mapped_bytes)


class _Held(NamedTuple):
    """The bytes of this process: its address space, and the part that counts as data."""

    mapped: int
    data: int


def _held() -> _Held:
    with open("/proc/self/statm") as file:
        mapped, _, _, _, _, data, _ = (int(pages) * resource.getpagesize() for pages in file.read().split())
    return _Held(mapped, data)


def _limit(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(kind, (most, most))


def _close_all_but(keep: Iterable[int]) -> None:
    """Close all descriptors except standard streams and these."""
    first = 3
    for fd in sorted(keep):
        if fd >= first:
            os.closerange(first, fd)
            first = fd + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def _landlock_abi() -> int:
    """Return the version of Landlock's interface; below 1 if the system has none."""
    return int(_libc.syscall(_LANDLOCK_CREATE, None, 0, 1))


def _ruleset(paths: list[str], written: Collection[str] = ()) -> int:
    """Create a Landlock ruleset: no files except `paths` and what is below them; writing only to `/dev/null` and to
    those in `written`; and, if the system's version of Landlock can forbid them, no TCP, and no signals or abstract
    sockets to processes outside.

    Returns a descriptor, or a negative number if the system has no Landlock or refuses the ruleset.
    """
    abi = _landlock_abi()
    if abi < 1:
        return -1
    handled = max(mask for least, mask in _FILES_BY_ABI.items() if abi >= least)
    rules = _Ruleset(handled, 0, 0)
    rules.network = 0b11 if abi >= _NETWORK_ABI else 0
    rules.scoped = 0b11 if abi >= _SCOPE_ABI else 0
    size = 24 if abi >= _SCOPE_ABI else 16 if abi >= _NETWORK_ABI else 8
    ruleset = int(_libc.syscall(_LANDLOCK_CREATE, ctypes.byref(rules), size, 0))
    if ruleset < 0:
        return -1
    for path in paths:
        if not os.path.exists(path):
            continue
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = _READ_FILE | _READ_DIR | _EXECUTE if os.path.isdir(path) else _READ_FILE
        allowed = _READ_FILE if path == PROC else allowed
        allowed |= _WRITE_FILE if path == "/dev/null" or path in written else 0
        allowed |= (_TRUNCATE | _CONTROL_DEVICE) & handled if path in written else 0
        _libc.syscall(_LANDLOCK_ADD, ruleset, 1, ctypes.byref(_PathRule(allowed, fd)), 0)
        os.close(fd)
    return ruleset


def _restrict(ruleset: int) -> list[str]:
    if ruleset < 0:
        return ["files are not hidden: this system has no Landlock"]
    failed = _libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0)
    reason = os.strerror(ctypes.get_errno())
    return [f"files are not hidden by Landlock: {reason}"] if failed else []

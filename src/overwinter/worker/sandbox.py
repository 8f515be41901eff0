"""How a body is kept from what is not its own. Each step says what it could not apply on this system.

A body has its own process group and dies with its parent; it has no descriptors but those given to it, no
terminal, no network, no files but Python's own (Landlock), no way to start another process (seccomp), a user of
its own where the node runs as root, and limits on its address space and files.
"""

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Iterable
from typing import NamedTuple

from overwinter.worker.seccomp import refuse_calls

_libc = ctypes.CDLL(None, use_errno=True)

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_READ_FILE, _READ_DIR, _EXECUTE, _WRITE_FILE = 1 << 2, 1 << 3, 1 << 0, 1 << 1
_FILES_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_NETWORK_ABI, _SCOPE_ABI = 4, 6

FIRST_UID = 0x70000000
"""Bodies of a node that runs as root get users from here on: one each, known to nobody."""
UIDS = 1 << 20
THREADS_MAX = 1024


def uid_of(worker: int) -> int | None:
    """The user that a body becomes, or None where the node may not choose."""
    return FIRST_UID + worker % UIDS if os.geteuid() == 0 else None


def die_with_parent(parent: int) -> None:
    """Be killed when the process `parent` ends. Must follow every change of user, which forgets it."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def leave_network() -> list[str]:
    """Move this process and its children to a network with no way out; what could not be applied."""
    flags = _CLONE_NEWNET if os.geteuid() == 0 else _CLONE_NEWNET | _CLONE_NEWUSER
    if _libc.unshare(flags) == 0:
        return []
    return [f"no network of its own: {os.strerror(ctypes.get_errno())}"]


class Limits(NamedTuple):
    """What a body may have: private memory, address space for what it maps, and bytes of one tray."""

    memory_bytes: int
    mapped_bytes: int
    tray_bytes: int


class Shelter:
    """What every body of a zygote needs to be contained, made once: its children inherit it."""

    def __init__(self) -> None:
        self._python = _reach_python()
        # Made while this process may still pass every parent directory of Python's own files.
        self._ruleset = _ruleset(_python_files())

    def fds(self) -> list[int]:
        """Descriptors that must stay open."""
        return self._python if self._ruleset < 0 else [*self._python, self._ruleset]

    def close_in(self, uid: int | None, limits: Limits, keep: Iterable[int]) -> list[str]:
        """Contain the calling process for good; what could not be applied."""
        missing = _contain(uid, limits, [*keep, *self.fds()])
        if uid is None and _landlock_abi() < _SCOPE_ABI:
            missing.append("its signals reach the node's other processes: Landlock cannot keep them in here")
        return missing + _restrict(self._ruleset) + refuse_calls()

    def try_out(self) -> list[str]:
        """Contain a child that does nothing, to tell at start what a body will lack here."""
        here, there = os.pipe()
        pid = os.fork()
        if pid == 0:
            missing = self.close_in(uid_of(0), Limits(4 << 30, 1 << 30, 1 << 20), [there])
            os.write(there, "\n".join(missing).encode())
            os._exit(0)
        os.close(there)
        with open(here) as said:
            missing = [line for line in said.read().split("\n") if line]
        _, status = os.waitpid(pid, 0)
        return missing if status == 0 else ["bodies cannot be contained at all: the trial failed"]


def _contain(uid: int | None, limits: Limits, keep: Iterable[int]) -> list[str]:
    os.setpgid(0, 0)
    _close_all_but(keep)
    for signal_ in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(signal_, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, limits.tray_bytes)
    _limit(resource.RLIMIT_DATA, limits.memory_bytes)
    # Shared memory of its own making is no data; what the zygote had mapped is not the body's doing.
    _limit(resource.RLIMIT_AS, _mapped_bytes() + limits.memory_bytes + limits.mapped_bytes)
    missing = [] if uid is not None else ["no user of its own: the node does not run as root"]
    parent = os.getppid()
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        _limit(resource.RLIMIT_NPROC, THREADS_MAX)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    die_with_parent(parent)
    return missing


def _reach_python() -> list[int]:
    """Make Python's own files reachable for users that may not pass its parent directories (such as /root).

    Directories of `sys.path` below such a parent are opened, and paths through the descriptors take the
    place of their names. Returns the descriptors, which must stay open in every fork.
    """
    renamed: dict[str, str] = {}
    fds: list[int] = []
    for place in sorted({sys.prefix, sys.base_prefix}):
        if os.geteuid() == 0 and not _passable(place):
            fd = os.open(place, os.O_PATH | os.O_DIRECTORY)
            os.set_inheritable(fd, True)
            fds.append(fd)
            renamed[place] = f"/proc/self/fd/{fd}"
    if renamed:
        sys.path[:] = [_renamed(path, renamed) for path in sys.path]
        for module in list(sys.modules.values()):
            path = getattr(module, "__path__", None)
            if isinstance(path, list):
                path[:] = [_renamed(entry, renamed) for entry in path]
    return fds


def _passable(path: str) -> bool:
    """Whether everybody may go through all parents of `path`."""
    parents = [path]
    while parents[-1] != "/":
        parents.append(os.path.dirname(parents[-1]))
    return all(os.stat(parent).st_mode & 0o001 for parent in parents)


def _renamed(path: str, renamed: dict[str, str]) -> str:
    for place, other in renamed.items():
        if path == place or path.startswith(place + "/"):
            return other + path[len(place) :]
    return path


def _mapped_bytes() -> int:
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[0]) * resource.getpagesize()


def _limit(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(kind, (most, most))


def _close_all_but(keep: Iterable[int]) -> None:
    first = 3
    for fd in sorted(keep):
        os.closerange(first, fd)
        first = max(first, fd + 1)
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))


def _python_files() -> list[str]:
    """Where Python, its packages and this package lie: all that a body may read by name."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    places = {sys.prefix, sys.base_prefix, package, "/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache"}
    # Packages need not lie in Python's own directory: those of a user do not, nor those that a .pth file names.
    places |= {path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")}
    places |= {"/dev/null", "/dev/zero", "/dev/urandom", "/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system/cpu"}
    return sorted(place for place in places if os.path.exists(place))


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def _landlock_abi() -> int:
    """What Landlock can do here; below 1 where the system has none."""
    return int(_libc.syscall(_LANDLOCK_CREATE, None, 0, 1))


def _ruleset(paths: list[str]) -> int:
    """Landlock: no file but those below `paths`, read only; no TCP; no signal or abstract socket out of here.

    Returns a descriptor, or a negative number where the system has no Landlock.
    """
    abi = _landlock_abi()
    if abi < 1:
        return -1
    rules = _Ruleset(max(mask for least, mask in _FILES_BY_ABI.items() if abi >= least), 0, 0)
    rules.network = 0b11 if abi >= _NETWORK_ABI else 0
    rules.scoped = 0b11 if abi >= _SCOPE_ABI else 0
    size = 24 if abi >= _SCOPE_ABI else 16 if abi >= _NETWORK_ABI else 8
    ruleset = int(_libc.syscall(_LANDLOCK_CREATE, ctypes.byref(rules), size, 0))
    if ruleset < 0:
        return -1
    for path in paths:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = _READ_FILE | _READ_DIR | _EXECUTE if os.path.isdir(path) else _READ_FILE
        allowed |= _WRITE_FILE if path == "/dev/null" else 0
        _libc.syscall(_LANDLOCK_ADD, ruleset, 1, ctypes.byref(_PathRule(allowed, fd)), 0)
        os.close(fd)
    return ruleset


def _restrict(ruleset: int) -> list[str]:
    if ruleset < 0:
        return ["files are not hidden: this system has no Landlock"]
    failed = _libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0)
    reason = os.strerror(ctypes.get_errno())
    os.close(ruleset)
    return [f"files are not hidden by Landlock: {reason}"] if failed else []

"""The namespaces of the base zygote and all its forks, where the system supports them.

Processes in them have no network and no System V objects. They see only each other, and of the files only a given list.
When the first process ends, the kernel kills the others. Where the node does not run as root, a user namespace gives
the capabilities to create the other namespaces, and these capabilities are dropped again.
"""

import ctypes
import os
import stat
from collections.abc import Sequence

_NEW_NAMESPACES = 0x00020000 | 0x08000000 | 0x20000000 | 0x40000000
"""CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWNET."""
_CLONE_NEWUSER = 0x10000000

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_MNT_DETACH = 2
_MOUNT_SETATTR, _PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_CAPABILITY_VERSION = 0x20080522
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4

_ROOT = "/tmp"
"""The directory on which the new tree is mounted before it becomes the root."""

_libc = ctypes.CDLL(None, use_errno=True)


class _Attributes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "cleared", "propagation", "user"))


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


# Created once, because each wake drops capabilities.
_OF_THIS_PROCESS, _NO_CAPABILITIES = _Header(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()


def enter() -> list[str]:
    """Enter new network, mount and IPC namespaces, and a PID namespace for children; return what could not be
    applied.

    For single-threaded processes only.
    """
    # Some systems give a user namespace and refuse to map its user, which leaves the process without a usable one. So a
    # child tries first.
    fault = _enter_in_child() if os.geteuid() != 0 else ""
    fault = fault or _enter()
    return [f"no namespaces for network, processes and files: {fault}"] if fault else []


def _enter() -> str:
    """Enter the namespaces; return why that failed, if it did."""
    uid, gid = os.geteuid(), os.getegid()
    if _libc.unshare(_NEW_NAMESPACES if uid == 0 else _NEW_NAMESPACES | _CLONE_NEWUSER) != 0:
        return f"unshare: {os.strerror(ctypes.get_errno())}"
    # Map the user to itself: a user that is not mapped could create no file.
    entries = {"setgroups": "deny", "uid_map": f"{uid} {uid} 1", "gid_map": f"{gid} {gid} 1"} if uid != 0 else {}
    try:
        for name, text in entries.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    except OSError as error:
        return f"the user cannot be mapped: {error}"
    return ""


def _enter_in_child() -> str:
    """Return why a child process cannot enter the namespaces, if it cannot."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, _enter().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as report:
        fault = report.read()
    os.waitpid(pid, 0)
    return fault


def show_only(paths: Sequence[str], writable_proc: bool = False) -> list[str]:
    """Replace the file tree by one with only these paths, read-only, and this PID namespace's /proc; return what
    could not be applied. `writable_proc`: whether processes may change their own entries in the new /proc.
    """
    try:
        return _show_only(paths, writable_proc)
    except OSError as error:
        return [f"the names of other files are visible: {error}"]


def _show_only(paths: Sequence[str], writable_proc: bool) -> list[str]:
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    sources = {path: os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC) for path in _outermost(paths)}
    _mount("tmpfs", _ROOT, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "mode=755,size=1m")
    for path, source in sources.items():
        _bind(source, _ROOT + path)
        os.close(source)
    missing = []
    os.makedirs(_ROOT + "/proc")
    _make_readonly(_ROOT)
    readonly = 0 if writable_proc else _MS_RDONLY
    try:
        _mount("proc", _ROOT + "/proc", "proc", readonly | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "hidepid=2")
    except OSError as error:
        missing.append(f"/proc shows other processes: {error}")
        _mount("/proc", _ROOT + "/proc", None, _MS_BIND | _MS_REC)
        _make_readonly(_ROOT + "/proc")
    os.chdir(_ROOT)
    _check(_libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount")
    os.chdir("/")
    return missing


def drop_privileges() -> None:
    """Drop all capabilities, also those that a user namespace gave to a process whose user has none outside."""
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    _check(_libc.capset(ctypes.byref(_OF_THIS_PROCESS), _NO_CAPABILITIES), "capset")


def _outermost(paths: Sequence[str]) -> list[str]:
    """Return those of the paths, and of the targets of links among them, that are not below another one."""
    every = {os.path.abspath(path) for path in paths} | {os.path.realpath(path) for path in paths}
    found: list[str] = []
    for path in sorted(every):
        if os.path.lexists(path) and not any(path.startswith(other + "/") for other in found):
            found.append(path)
    return found


def _bind(source: int, target: str) -> None:
    """Mount the descriptor's directory or file at `target`; a link is created again there."""
    os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
    kind = os.fstat(source).st_mode
    if stat.S_ISLNK(kind):
        os.symlink(os.readlink("", dir_fd=source), target)
        return
    if stat.S_ISDIR(kind):
        os.mkdir(target, 0o755)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o444))
    _mount(f"/proc/self/fd/{source}", target, None, _MS_BIND | _MS_REC)


def _make_readonly(root: str) -> None:
    attributes = _Attributes(_MS_RDONLY | _MS_NOSUID, 0, 0, 0)
    size = ctypes.sizeof(attributes)
    done = _libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, root.encode(), _AT_RECURSIVE, ctypes.byref(attributes), size)
    _check(done, "mount_setattr")


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind, options)]
    done = _libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3])
    _check(done, f"mount {kind or source or ''} at {target}")


def _check(done: int, what: str) -> None:
    if done != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")

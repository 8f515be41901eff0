"""Finds the files of Python and its libraries, and checks whether a worker's user can read them."""

import os
import sys

_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/usr/share/zoneinfo")
_PACKAGES = ("site-packages", "dist-packages")
_DEVICES = ("/dev/null", "/dev/urandom", "/sys/devices/system/cpu")


def python_paths() -> list[str]:
    """Return all that a worker may read by name, except /proc: the directories of Python, its packages and this
    package, and the files that its libraries read.
    """
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    places = {sys.prefix, sys.base_prefix, package, *_LIBRARIES, *_DEVICES}
    # Packages of a user, and those that a .pth file names, are outside of Python's own directory.
    places |= {path for path in sys.path if os.path.basename(path) in _PACKAGES}
    return sorted(place for place in places if os.path.exists(place))


def reach_python() -> list[int]:
    """Make Python's own files reachable for users that may not traverse its parent directories, such as /root. In a
    mount namespace of the node every user may traverse them, and nothing changes.

    Python's own directories below such a parent are opened, and paths through the descriptors replace their names in
    `sys.path` and in imported packages. Returns the descriptors, which must stay open in every fork.
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


def unreadable() -> list[str]:
    """Say which directory of packages the calling process, in its sandbox, cannot read; empty if it can read all."""
    for path in sys.path:
        try:
            if os.path.basename(path) in ("lib-dynload", *_PACKAGES):
                os.listdir(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            return [f"workers cannot import further modules: {error}"]
    return []


def _passable(path: str) -> bool:
    """Whether every user may traverse `path` and all its parents."""
    parents = [path]
    while parents[-1] != "/":
        parents.append(os.path.dirname(parents[-1]))
    return all(os.stat(parent).st_mode & 0o001 for parent in parents)


def _renamed(path: str, renamed: dict[str, str]) -> str:
    for place, other in renamed.items():
        if path == place or path.startswith(place + "/"):
            return other + path[len(place) :]
    return path

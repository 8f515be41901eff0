"""Finds the control groups of a process, reads the kernel's files about them, and removes empty ones."""

import os
from collections.abc import Iterator
from pathlib import Path

from overwinter.node.mounts import mount_lines

PROCESS = Path("/proc/self")


def group_of(controller: str, process: Path = PROCESS) -> Path | None:
    """The group of this process in the hierarchy that has the controller, if the group passes the controller on to
    groups below it; None if the system does not report it.
    """
    return _group(controller, process, "cgroup.subtree_control")


def limiting_group(controller: str, process: Path = PROCESS) -> Path | None:
    """The group of this process whose limits of the controller hold for it; None if the system does not report it."""
    return _group(controller, process, "cgroup.controllers")


def _group(controller: str, process: Path, listed: str) -> Path | None:
    return next((directory for found, directory in _memberships(process, listed) if controller in found), None)


def number_in(path: Path) -> int | None:
    """Return the number in a file of the kernel; None unless it is above zero."""
    try:
        number = int(path.read_text())
    except (OSError, ValueError):
        return None
    return number if number > 0 else None


def remove_group(directory: Path) -> bool:
    """Remove an empty group; return whether it is gone."""
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _memberships(process: Path, listed: str) -> Iterator[tuple[set[str], Path]]:
    """Yield the controllers of each hierarchy, in version 2 those in the file `listed`, and this process's group."""
    mounts = list(_hierarchies(process))
    for line in _read(process / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2) if line.count(":") > 1 else ("", "", "")
        for kind, root, mounted, options in mounts if path else ():
            directory = mounted / os.path.relpath(path, root)
            if controllers and kind == "cgroup" and set(controllers.split(",")) <= options:
                yield set(controllers.split(",")), directory
            elif not controllers and kind == "cgroup2":
                yield set(_read(directory / listed).split()), directory


def _hierarchies(process: Path) -> Iterator[tuple[str, str, Path, set[str]]]:
    """The mounted hierarchies: the type ("cgroup" is version 1, "cgroup2" version 2), the group at the root, the mount
    point, the options.
    """
    for fields in mount_lines(process / "mountinfo"):
        kind = fields[fields.index("-") + 1] if "-" in fields[5:-1] else ""
        if kind in ("cgroup", "cgroup2"):
            yield kind, fields[3], Path(fields[4]), set(fields[-1].split(","))


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="surrogateescape")
    except OSError:
        return ""

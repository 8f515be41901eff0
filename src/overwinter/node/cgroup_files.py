"""Finds the control groups of a process, reads the kernel's files about them, and removes empty ones."""

import os
from collections.abc import Iterator
from pathlib import Path

PROCESS = Path("/proc/self")


def group_of(controller: str, process: Path = PROCESS) -> Path | None:
    """The group of this process in the hierarchy that has the controller; None if the system does not report it."""
    for hierarchy, directory in _memberships(process):
        if controller in hierarchy:
            return directory
    return None


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


def _memberships(process: Path) -> Iterator[tuple[set[str], Path]]:
    """Yield the controllers of each hierarchy, and this process's group in it."""
    mounts = list(_hierarchies(process))
    for line in _read(process / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2) if line.count(":") > 1 else ("", "", "")
        for kind, root, mounted, options in mounts if path else ():
            directory = mounted / os.path.relpath(path, root)
            if controllers and kind == "cgroup" and set(controllers.split(",")) <= options:
                yield set(controllers.split(",")), directory
            elif not controllers and kind == "cgroup2":
                # Only controllers that the group passes on to its children.
                yield set(_read(directory / "cgroup.subtree_control").split()), directory


def _hierarchies(process: Path) -> Iterator[tuple[str, str, Path, set[str]]]:
    """The mounted hierarchies: the version, the group at the root, the mount point, the options."""
    for line in _read(process / "mountinfo").splitlines():
        before, _, mount = line.partition(" - ")
        fields, kind, options = before.split(), mount.partition(" ")[0], mount.rpartition(" ")[2]
        if len(fields) > 4 and kind in ("cgroup", "cgroup2"):
            yield kind, fields[3], Path(fields[4]), set(options.split(","))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

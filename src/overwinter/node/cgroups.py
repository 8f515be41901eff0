"""What may all workers together take of the machine, where the system lets this node say so?

One control group for all that the zygote forks. It is entered once, before the first fork: moving a process may take
20 ms, and what is born in a group costs nothing. Threads are bounded, so that the system keeps process ids for others,
and cores are shared so that no number of busy workers takes the daemon's. Memory is not: see docs/decisions/sandbox.md.
"""

import os
from collections.abc import Iterator
from pathlib import Path

NAME = "overwinter-"
CONTROLLERS = ("pids", "cpu")
PIDS_SHARE = 0.5
"""Of the system's process ids."""
SHARES = 1024
"""Of a core, by the scale of the first version: as much as a process without a group."""
WEIGHT = 100
"""The same by the scale of the second."""


class Groups:
    """The node's control groups, one in each hierarchy that has a controller."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        """What could not be bounded."""
        self._parents: dict[str, Path] = {}
        for controller in CONTROLLERS:
            parent = _own(controller)
            if parent is not None and os.access(parent, os.W_OK):
                self._parents[controller] = parent
            else:
                self.missing.append(f"no control group for {controller}: the system lets this node make none")
        self._clean()

    def make(self) -> list[str]:
        """Make them if they are not there; the files by which a process enters them."""
        places = []
        for controller, parent in list(self._parents.items()):
            place = parent / f"{NAME}{os.getpid()}"
            try:
                place.mkdir(exist_ok=True)
                _bound(controller, place)
            except OSError as error:
                del self._parents[controller]
                self.missing.append(f"no control group for {controller}: {error}")
            else:
                places.append(str(place / "cgroup.procs"))
        return sorted(set(places))

    def _clean(self) -> None:
        """Remove those that killed nodes left: only an empty one can be removed."""
        for parent in set(self._parents.values()):
            for place in parent.glob(f"{NAME}*"):
                _remove(place)

    def close(self) -> None:
        """Remove them; no process may be left."""
        for parent in set(self._parents.values()):
            _remove(parent / f"{NAME}{os.getpid()}")


def _own(controller: str) -> Path | None:
    """The group in which this process is, in the hierarchy that has the controller."""
    for hierarchy, place in _memberships():
        if controller in hierarchy:
            return place
    return None


def _memberships() -> Iterator[tuple[set[str], Path]]:
    """The controllers of each hierarchy, and the group in it in which this process is."""
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for fields in mounts:
            kind, _, options = fields[fields.index("-") + 1 :]
            place = Path(fields[4]) / os.path.relpath(path, fields[3])
            if controllers and kind == "cgroup" and set(controllers.split(",")) <= set(options.split(",")):
                yield set(controllers.split(",")), place
            elif not controllers and kind == "cgroup2":
                # Only what the group hands on to its children.
                yield set(_read(place / "cgroup.subtree_control").split()), place


def _bound(controller: str, place: Path) -> None:
    if controller == "pids":
        most = int(PIDS_SHARE * int(_read(Path("/proc/sys/kernel/pid_max"))))
        (place / "pids.max").write_text(f"{most}")
    elif (place / "cpu.shares").exists():
        (place / "cpu.shares").write_text(f"{SHARES * len(os.sched_getaffinity(0))}")
    else:
        (place / "cpu.weight").write_text(f"{min(10000, WEIGHT * len(os.sched_getaffinity(0)))}")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _remove(place: Path) -> None:
    try:
        place.rmdir()
    except OSError:
        # Somebody is in it, or it is not there.
        return

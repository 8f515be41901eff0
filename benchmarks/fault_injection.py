"""Injects faults into a node: kills or stops its processes, fills its disks, deletes or changes its blocks.

Each fault has a description, may last until it is undone, and is drawn from a seeded generator. A daemon that is killed
is started again at once.
"""

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import NamedTuple

from benchmarks.nodes import Node, parents_of_all
from overwinter.store.blocks import address_of

MEMORY_BYTES = 64 << 20
DISK_BYTES = 64 << 20
"""The size of the tmpfs for memory and for disk, small so that they fill quickly."""
STOP_S = (0.5, 4.0)
FULL_S = (1.0, 4.0)
RESTART_S = 0.25
PR_SET_CHILD_SUBREAPER = 36

Undo = Callable[[], None]


class Fault(NamedTuple):
    """A fault: what was done, for how long, and how it ends."""

    what: str
    lasts_s: float = 0.0
    undo: Undo | None = None


class Span(NamedTuple):
    """A period; `until` is infinite while it lasts."""

    begin: float
    until: float

    def overlaps(self, other: "Span") -> bool:
        """Whether the two periods overlap."""
        return self.begin <= other.until and other.begin <= self.until


class SupervisedNode:
    """A node whose daemon is killed and started again, and the directories of its blocks."""

    def __init__(self, node: Node, mounts: dict[str, Path]) -> None:
        """Create it. `mounts`: the small filesystems `memory` and `disk`, if they could be mounted."""
        self.node = node
        self.mounts = mounts
        self.down: list[Span] = []
        self.refused_starts: list[str] = []
        self.lock = threading.Lock()
        """Only one thread at a time acts on the daemon."""

    def restart(self) -> None:
        """Kill the daemon and start it again, repeatedly if necessary."""
        began = time.monotonic()
        self.down.append(Span(began, float("inf")))
        assert self.node.process is not None
        self.node.process.kill()
        self.node.process.wait()
        while True:
            try:
                self.node.start()
                break
            except (RuntimeError, OSError) as error:
                self.refused_starts.append(str(error))
                time.sleep(RESTART_S)
        self.down[-1] = Span(began, time.monotonic())

    def was_down(self, span: Span) -> bool:
        """Whether the daemon was down during a part of the period."""
        return any(span.overlaps(each) for each in self.down)

    def blocks(self, place: str) -> list[Path]:
        """Return the files of blocks in memory or on disk."""
        root = self.node.host_store if place == "memory" else self.node.data / "blocks"
        return sorted(path for path in root.rglob("*") if len(path.name) == 64 and path.is_file())


def process_fault(supervised: SupervisedNode, random: Random) -> Fault:
    """Kill or stop one process."""
    with supervised.lock:
        kind = random.choice(("worker", "worker", "zygote", "daemon"))
        pid = any_process(supervised.node, kind, random)
        if not pid:
            return Fault(f"no {kind} runs")
        if random.random() < 0.5:
            _signal(pid, signal.SIGSTOP)
            return Fault(f"SIGSTOP {kind}", random.uniform(*STOP_S), lambda: _signal(pid, signal.SIGCONT))
        if kind == "daemon":
            supervised.restart()
        else:
            _signal(pid, signal.SIGKILL)
        return Fault(f"SIGKILL {kind}")


def any_process(node: Node, kind: str, random: Random) -> int:
    """Return the pid of one worker, zygote or daemon; 0 if there is none."""
    workers = node.worker_pids()
    daemon, *others = node.pids() or [0]
    pids = {"worker": workers, "zygote": [pid for pid in others if pid not in workers], "daemon": [daemon]}[kind]
    return random.choice(pids) if pids and daemon else 0


def kill(node: Node, kind: str, random: Random) -> bool:
    """Kill one process; return whether there was one."""
    if pid := any_process(node, kind, random):
        _signal(pid, signal.SIGKILL)
    return bool(pid)


def storage_fault(supervised: SupervisedNode, random: Random, flipped: Callable[[Path], None]) -> Fault:
    """Fill a filesystem, also during a start, or lose or change a block. `flipped` is called with a changed block in
    memory.
    """
    place = random.choice(("memory", "disk"))
    kind = random.choice(("full", "full at start", "delete", "flip", "flip"))
    if kind.startswith("full"):
        if place not in supervised.mounts:
            return Fault(f"{place} cannot be filled")
        with supervised.lock:
            filler = fill(supervised.mounts[place])
            if kind == "full at start":
                # Free the space only after a while: until then the supervisor retries.
                threading.Timer(FULL_S[1], filler.unlink, [True]).start()
                supervised.restart()
        return Fault(f"{place} {kind}", random.uniform(*FULL_S), lambda: filler.unlink(missing_ok=True))
    blocks = supervised.blocks(place)
    if not blocks:
        return Fault(f"no block in {place}")
    block = random.choice(blocks)
    with suppress(FileNotFoundError):
        if kind == "delete":
            if address_of(block.read_bytes()) != block.name:
                # Workers that have mapped it would go on with it, and the node could not read it to find the change.
                return Fault(f"changed block in {place} kept")
            block.unlink()
        else:
            flip(block, random)
            if place == "memory":
                flipped(block)
    return Fault(f"{kind} block in {place}")


def fill(place: Path) -> Path:
    """Create a file that takes all space of a filesystem."""
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    return filler


def flip(block: Path, random: Random) -> None:
    """Change one bit as failing hardware would, without changing permissions or times."""
    before = block.stat()
    os.chmod(block, 0o600)
    with block.open("r+b", buffering=0) as file:
        at = random.randrange(max(1, before.st_size))
        file.seek(at)
        [byte] = file.read(1) or b"\0"
        file.seek(at)
        file.write(bytes([byte ^ 1 << random.randrange(8)]))
    os.chmod(block, before.st_mode)
    os.utime(block, ns=(before.st_atime_ns, before.st_mtime_ns))


@contextmanager
def small_filesystems(root: Path) -> Iterator[dict[str, Path]]:
    """Mount two small filesystems, and return them. At the first that this process may not mount, print why."""
    made: dict[str, Path] = {}
    try:
        for name, nbytes in (("memory", MEMORY_BYTES), ("disk", DISK_BYTES)):
            (root / name).mkdir()
            options = f"size={nbytes},mode=700"
            command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(root / name)]
            completed = subprocess.run(command, capture_output=True, text=True, check=False)
            if completed.returncode:
                print(f"the {name} is not filled: {completed.stderr.strip()}")
                break
            made[name] = root / name
        yield made
    finally:
        for path in made.values():
            subprocess.run(["umount", "--lazy", str(path)], check=True)


def adopt_orphans() -> None:
    """Become the parent of a killed daemon's orphans, so that they can be found."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """Return the children of a process, their children, and so on."""
    found, parents = [pid], parents_of_all()
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)

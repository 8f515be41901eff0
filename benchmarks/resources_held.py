"""Measures the resources of an idle node without clients, and their growth since an earlier measurement.

Memory is anonymous and shared PSS with the pages of the host store; files are those of the host store.
"""

import time
from typing import NamedTuple

from benchmarks.measure import MIB, descriptors, memory, occupied_bytes, resident_bytes
from benchmarks.nodes import Node

IDLE_S = 1.0
READINGS = 8
CHECK_INTERVAL_S = 0.25
"""Verification opens blocks for moments, so the lowest count of descriptors in several readings this far apart is
taken.
"""
HEADER = (
    f"{'MiB at rest':26}"
    + "".join(f"{name:>10}" for name in ("daemon", "zygotes", "shared", "store", "sum", "RSS"))
    + f"{'descriptors':>13}{'processes':>11}{'files':>7}{'s':>9}"
)


class ResourcesHeld(NamedTuple):
    """What an idle node holds."""

    daemon: int
    zygotes: int
    """The anonymous PSS of all zygotes with the process that started the base zygote, and of workers if there
    are any.
    """
    shared: int
    """The PSS of memory files and mapped blocks."""
    store: int
    """The pages of the host store."""
    resident: int
    descriptors: int
    processes: int
    files: int

    @property
    def nbytes(self) -> int:
        """All memory of the node."""
        return self.daemon + self.zygotes + self.shared + self.store


def at_rest(node: Node) -> ResourcesHeld:
    """Return what the node holds when it is idle; its client's connections are closed first."""
    node.close_connections()
    node.wait_quiet()
    time.sleep(IDLE_S)
    pids = node.pids()
    return ResourcesHeld(
        *(memory(part).anonymous for part in (pids[:1], pids[1:])),
        shared=memory(pids).shared,
        store=occupied_bytes(node.host_store),
        resident=resident_bytes(pids),
        descriptors=_descriptors(pids),
        processes=len(pids),
        files=sum(path.is_file() for path in node.host_store.rglob("*")),
    )


def _descriptors(pids: list[int]) -> int:
    counts = [descriptors(pids)]
    for _ in range(READINGS - 1):
        time.sleep(CHECK_INTERVAL_S)
        counts.append(descriptors(pids))
    return min(counts)


def row(title: str, held: ResourcesHeld, took: float | None) -> str:
    """Return a line of the table, under HEADER; `took` is in seconds."""
    parts = (*held[:4], held.nbytes, held.resident)
    sizes = "".join(f"{part / MIB:10.2f}" for part in parts)
    counts = f"{held.descriptors:13}{held.processes:11}{held.files:7}"
    return f"{title:26}{sizes}{counts}" + ("" if took is None else f"{took:9.1f}")


def growth(start: ResourcesHeld, end: ResourcesHeld) -> dict[str, float]:
    """Return by how much the second reading exceeds the first."""
    return {
        "growth_mib": (end.nbytes - start.nbytes) / MIB,
        "descriptors": end.descriptors - start.descriptors,
        "processes": end.processes - start.processes,
        "shm_files": end.files - start.files,
    }

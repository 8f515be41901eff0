"""Tracks the peak memory of a node: a cheap estimate all the time, and a full measurement now and then.

A full measurement (PSS) of many workers takes a core for a while, so it is done once in each phase, at its end. In
between, the private memory of each process is estimated from its page counts, which any user may read.
"""

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.measure import memory, memory_file_bytes, occupied_bytes
from benchmarks.nodes import Node, parents_of_all

EVERY_S = 1.0
PAGE = os.sysconf("SC_PAGE_SIZE")


class PeakMemory:
    """The peak of a node's memory, sampled in a thread until it is stopped."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._over = threading.Event()
        self._peak = 0
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._over.wait(EVERY_S):
            self._peak = max(self._peak, estimated_bytes(self._node))

    def take(self) -> int:
        """Return the peak since the last call in bytes, including a full measurement now."""
        peak, self._peak = max(self._peak, measured_bytes(self._node)), 0
        return peak

    def stop(self) -> None:
        """Stop sampling."""
        self._over.set()
        self._thread.join(10)


def estimated_bytes(node: Node) -> int:
    """Return the private memory of all processes, the host store, and the memory files of tensors."""
    return estimated_private_bytes(node.pids()) + shared_bytes(node)


def measured_bytes(node: Node) -> int:
    """Return the PSS of all processes, and for shared memory at least the bytes of host store and memory files; an
    estimate if PSS cannot be read.
    """
    try:
        held = memory(node.pids())
    except PermissionError:
        # An ordinary user cannot read the PSS of workers.
        return estimated_bytes(node)
    return held.anonymous + held.files + max(held.shared, shared_bytes(node))


def process_bytes(pids: Sequence[int]) -> int:
    """Return the memory of these processes, with their share of files if this user may read their PSS."""
    try:
        return memory(pids).total
    except PermissionError:
        return estimated_private_bytes(pids)


def estimated_private_bytes(pids: Sequence[int]) -> int:
    """Return an estimate of the private bytes of these processes: what a fork shares with its parent counts once."""
    private = {pid: _resident_private_bytes(pid) for pid in pids}
    parents = parents_of_all()
    # This is too low if a fork has written to inherited pages or its parent has grown, and too high if the parent has
    # freed inherited pages.
    return sum(max(0, nbytes - private.get(parents.get(pid, 0), 0)) for pid, nbytes in private.items())


def _resident_private_bytes(pid: int) -> int:
    with suppress(OSError):
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
        return (resident - shared) * PAGE
    return 0


def shared_bytes(node: Node) -> int:
    """Return the memory that belongs to no single process."""
    with suppress(OSError):
        daemon = node.process.pid if node.process is not None else 0
        return occupied_bytes(node.host_store) + memory_file_bytes(daemon)
    return 0

"""Ends workers whose handler keeps deleted blocks of functions that were unbound.

A worker receives descriptors of its functions' blocks. Its handler can copy these, or map them again, and so keep the
memory of a function that was removed or evicted, which the host stores no longer count. The kernel's tables show what a
process has open and mapped, and the node knows which blocks it has handed out for the bound functions.

A worker may be slow to release a block: it reads the unbind message when one of its threads is free. So it is ended
only if it still keeps a block at a check after the runs and binds have ended that were in progress when the block was
found.
"""

import asyncio
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from overwinter.core.ids import RunId, WorkerId
from overwinter.node import clock
from overwinter.node.faults import Faults
from overwinter.node.log import Log
from overwinter.node.log_throttle import LogThrottle
from overwinter.node.processes import Processes
from overwinter.node.threads import Threads
from overwinter.node.workers import WorkerProcess

CHECK_INTERVAL_S = 5.0
SHARE = 0.01
"""The largest share of one core for checks."""
READ_BYTES = 1 << 20


class _Kept(NamedTuple):
    """What a worker has kept since a check."""

    inodes: frozenset[int]
    work: frozenset[RunId | str]
    """What has been in progress since then."""


class KeptBlocks:
    """Checks workers that have a handler and were told to unbind a function. Used on the event loop's thread only."""

    def __init__(self, processes: Processes, host_store: Path, log: Log) -> None:
        """`host_store`: the directory of all host stores."""
        self._processes = processes
        self._directory = os.path.realpath(host_store)
        self._thread = Threads(1, "kept blocks")
        self._throttle = LogThrottle(log)
        self._found: dict[WorkerId, _Kept] = {}

    async def run(self, faults: Faults) -> None:
        """Check periodically, without end."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            with faults.contained("kept blocks"):
                await self.check()

    async def check(self) -> None:
        """Check these workers once, and end those that have kept a block since an earlier check."""
        workers = self._processes.workers()
        self._found = {each.worker: self._found[each.worker] for each in workers if each.worker in self._found}
        for process in workers:
            if process.has_handler and process.bindings.has_unbound and _is_alive(process):
                began = clock.now()
                await self._check(process)
                await asyncio.sleep((clock.now() - began) / SHARE)

    async def _check(self, process: WorkerProcess) -> None:
        assert process.pid is not None
        assert process.smaps is not None
        # A duplicate, because the node closes its descriptor when the worker ends, while the thread may still read.
        look = partial(deleted_files, process.pid, os.dup(process.smaps), self._directory)
        found = await asyncio.get_running_loop().run_in_executor(self._thread, look)
        kept, before = found - process.bindings.inodes, self._found.pop(process.worker, None)
        if before is not None and kept & before.inodes:
            kept, work = kept & before.inodes, before.work & process.in_progress
        else:
            before, work = None, process.in_progress
        if kept and _is_alive(process):
            if before is not None and not work:
                self._end(process)
            else:
                self._found[process.worker] = _Kept(frozenset(kept), work)

    def _end(self, process: WorkerProcess) -> None:
        reason = "it kept blocks of a function that it was told to unbind"
        message = f"worker {process.worker} of {process.function} is stopped: {reason}"
        self._throttle.log(process.family.tenant, message)
        self._processes.forks.give_up(process, reason)


def _is_alive(process: WorkerProcess) -> bool:
    """Whether the worker has a process that may run on, and whose mappings the node can read."""
    return process.pid is not None and process.smaps is not None and not (process.over or process.dismissed)


def deleted_files(pid: int, smaps: int, directory: str) -> set[int]:
    """Return the inodes of deleted files, in or below a directory, that a process has open or mapped. Closes `smaps`,
    the file that the process opened itself. A node that does not run as root finds only those that are mapped.
    """
    # The descriptors first: a file that is open can become mapped meanwhile, but a mapping gives no descriptor.
    return {*_open_files(pid, directory), *_mapped_files(smaps, directory)}


def _open_files(pid: int, directory: str) -> Iterator[int]:
    for path in _descriptors(pid):
        with suppress(OSError):
            if _is_deleted(os.readlink(path), directory):
                yield os.stat(path).st_ino


def _descriptors(pid: int) -> list[str]:
    """The descriptors of a process, which its threads share. A thread that has ended, perhaps the first, shows none."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    for thread in threads:
        fds = f"/proc/{pid}/task/{thread}/fd"
        with suppress(OSError):
            if names := os.listdir(fds):
                return [f"{fds}/{name}" for name in names]
    return []


def _mapped_files(smaps: int, directory: str) -> Iterator[int]:
    """Yield the inodes of the deleted files that are mapped."""
    at, rest, within = 0, b"", f"{directory}/".encode()
    try:
        with suppress(OSError):
            # `pread` does not move the file offset, which duplicates of the descriptor share.
            while data := os.pread(smaps, READ_BYTES, at):
                at += len(data)
                lines, _, rest = (rest + data).rpartition(b"\n")
                yield from _inodes(lines, within, directory)
    finally:
        os.close(smaps)


def _inodes(lines: bytes, within: bytes, directory: str) -> Iterator[int]:
    end = 0
    while (at := lines.find(within, end)) >= 0:
        start, end = lines.rfind(b"\n", 0, at) + 1, lines.find(b"\n", at)
        end = len(lines) if end < 0 else end
        # Addresses, permissions, offset, device, inode, path.
        fields = lines[start:end].decode(errors="replace").split(None, 5)
        if len(fields) > 5 and _is_deleted(fields[5], directory):
            yield int(fields[4])


def _is_deleted(path: str, directory: str) -> bool:
    return path.startswith(f"{directory}/") and path.endswith(" (deleted)")

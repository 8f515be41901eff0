"""Releases the memory of large buffers while their process is idle.

The kernel locks a file while it removes memory from it, and a worker can keep that lock (`worker/buffer.py`). So a
thread does it, and a run of the process that begins meanwhile waits until the thread has stopped.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import chain

from overwinter.core.ids import RunId, TenantId
from overwinter.node.contained import ContainedProcess
from overwinter.node.threads import Threads
from overwinter.worker.buffer import SharedBuffer

THREADS = 4
IDLE_S = 1.0
"""The memory of large buffers is released when a process was idle for this long."""


class _Release:
    """The release of one process's buffers."""

    def __init__(self, buffers: Iterable[SharedBuffer]) -> None:
        self._buffers = buffers
        self.is_stopped = False
        self.then: list[Callable[[], None]] = []
        """What waits for its end."""

    def work(self) -> None:
        """Release the memory, piece by piece, until stopped. What the system refuses to release is kept."""
        with suppress(OSError):
            for _ in chain.from_iterable(buffer.release() for buffer in self._buffers):
                if self.is_stopped:
                    return


class Releases:
    """All releases of a node, one at a time for each tenant. Used on the event loop's thread only."""

    def __init__(self) -> None:
        self._threads = Threads(THREADS, "releases")
        self._loop = asyncio.get_running_loop()
        self._in_progress: dict[ContainedProcess, _Release] = {}

    def run_ended(self, process: ContainedProcess, run: RunId) -> None:
        """Release the buffers of the process if they are large and this run was its last one for a while."""
        if process.is_idle_since(run) and process.is_large():
            self._loop.call_later(IDLE_S, self._begin, process, run)

    def when_stopped(self, process: ContainedProcess, then: Callable[[], None]) -> None:
        """Stop the release of the process's buffers, and then call `then`, unless the process has ended meanwhile; at
        once if there is none.
        """
        release = self._in_progress.get(process)
        if release is None:
            then()
        else:
            release.is_stopped = True
            release.then.append(then)

    def _begin(self, process: ContainedProcess, run: RunId) -> None:
        if not process.is_idle_since(run):
            return
        if process.tenant in self._tenants() or len(self._in_progress) == THREADS:
            self._loop.call_later(IDLE_S, self._begin, process, run)
            return
        release = self._in_progress[process] = _Release(chain.from_iterable(process.slots))

        def ended(_: object) -> None:
            del self._in_progress[process]
            process.thread_ended()
            for then in release.then if not process.over else ():
                then()

        process.thread_begins()
        self._loop.run_in_executor(self._threads, release.work).add_done_callback(ended)

    def _tenants(self) -> set[TenantId | None]:
        return {process.tenant for process in self._in_progress}

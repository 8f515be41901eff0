"""Copies large tensors to and from buffers without blocking the loop.

A few threads copy them by system calls that release the GIL. Small tensors are copied in place, which takes less time
than starting work in a thread.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from overwinter.node.contained import ContainedProcess
from overwinter.node.threads import Threads
from overwinter.worker.buffer import LARGE_BYTES

THREADS = 2
FAULTS = (OSError, MemoryError, ValueError, TypeError)
"""What a copy may raise because of the system or of a worker."""

T = TypeVar("T")


class Copies:
    """All copies between the node and its workers' buffers. Used on the event loop's thread only."""

    def __init__(self) -> None:
        self._threads = Threads(THREADS, "copies")

    def make(
        self,
        process: ContainedProcess,
        nbytes: int,
        work: Callable[[], T],
        done: Callable[[T], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Call `work`, which copies this many bytes, and then `done` or `failed`.

        Small copies are made at once. After a larger one, neither is called if the worker has ended meanwhile: its last
        answers are lost.
        """
        if nbytes <= LARGE_BYTES:
            try:
                result = work()
            except FAULTS as error:
                failed(error)
            else:
                done(result)
            return
        if process.over:
            return

        def report(copied: asyncio.Future[T]) -> None:
            process.copy_ended()
            error = copied.exception()
            if isinstance(error, FAULTS):
                if not process.over:
                    failed(error)
            elif not process.over:
                done(copied.result())

        process.copy_begins()
        asyncio.get_running_loop().run_in_executor(self._threads, work).add_done_callback(report)

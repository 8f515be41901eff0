"""Copies tensors to and from buffers, and checks them, without blocking the loop.

A few threads copy large tensors by system calls that release the GIL. Small tensors are copied on the event loop's
thread, which takes less time than starting work in another. The check of many elements holds the GIL, so it takes turns
with the messages and the checks of other tenants' workers.
"""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from overwinter.node.contained import ContainedProcess
from overwinter.node.fair_queue import FairQueue
from overwinter.node.threads import Threads
from overwinter.worker.buffer import LARGE_BYTES

THREADS = 2
STEP_COST = 4
"""A step of a check takes about as long as this many messages."""
COPIED_BYTES_PER_MESSAGE = 64 << 10
"""The bytes copied on the event loop's thread that take about as long as one message."""
FAULTS = (OSError, MemoryError, ValueError, TypeError)
"""What a copy may raise because of the system or of a worker."""

T = TypeVar("T")


class Copies:
    """All copies between the node and its workers' buffers. Used on the event loop's thread only."""

    def __init__(self, queue: FairQueue) -> None:
        """`queue`: the one in which the messages of workers wait."""
        self._threads = Threads(THREADS, "copies")
        self._queue = queue

    def make(
        self,
        process: ContainedProcess,
        nbytes: int,
        work: Callable[[], T],
        done: Callable[[T], None],
        failed: Callable[[Exception], None],
        check: Callable[[T], Iterator[None]] | None = None,
    ) -> None:
        """Call `work`, which copies this many bytes, then run the steps of `check`, then call `done` or `failed`.

        Small copies are made at once, and the first step of a check directly after its copy. If the worker ends before
        a larger copy is complete or a later step begins, neither `done` nor `failed` is called: its answer is lost.
        """
        copied = done if check is None else partial(self._check, process, check, done, failed)
        if nbytes <= LARGE_BYTES:
            try:
                result = work()
            except FAULTS as error:
                failed(error)
            else:
                self._queue.spend(nbytes // COPIED_BYTES_PER_MESSAGE)
                copied(result)
            return
        if process.over:
            return

        def report(made: asyncio.Future[T]) -> None:
            process.copy_ended()
            error = made.exception()
            if isinstance(error, FAULTS):
                if not process.over:
                    failed(error)
            elif not process.over:
                copied(made.result())

        process.copy_begins()
        asyncio.get_running_loop().run_in_executor(self._threads, work).add_done_callback(report)

    def _check(
        self,
        process: ContainedProcess,
        check: Callable[[T], Iterator[None]],
        done: Callable[[T], None],
        failed: Callable[[Exception], None],
        result: T,
    ) -> None:
        """Run the first step of a check now, and each other one when it is the turn of the process's tenant."""
        steps = check(result)

        def step() -> None:
            try:
                next(steps)
            except StopIteration:
                done(result)
            except FAULTS as error:
                failed(error)
            else:
                self._queue.add(process.client, step_later, STEP_COST)

        def step_later() -> None:
            if not process.over:
                step()

        step()

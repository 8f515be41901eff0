"""Runs long work in steps, so that it does not block the event loop.

Such work is a generator that yields after each bounded step and returns its result. Short work need not yield. A
thread would not help: while it holds the GIL, the loop waits.
"""

import asyncio
from collections.abc import Generator
from typing import TypeVar

from overwinter.node.fair_lock import FairLock
from overwinter.node.fair_queue import FairQueue

STEP_BYTES = 64 << 10
"""The approximate number of bytes that one step reads or writes. Such a step takes well under a millisecond."""

T = TypeVar("T")
Steps = Generator[None, None, T]


def finish(steps: Steps[T]) -> T:
    """Run all steps at once, and return the result."""
    while (done := _step(steps)) is None:
        pass
    return done[0]


class StepRunner:
    """Runs the work of all requests. The first step of each piece of work runs at once. All further steps take turns,
    one step in each iteration of the event loop, with the callers in rotation.
    """

    def __init__(self) -> None:
        self._turns = FairLock()
        self.body_queue = FairQueue()
        """The start of the work on complete request bodies: some in each iteration, round-robin by caller."""

    async def run(self, caller: str, steps: Steps[T]) -> T:
        """Run all steps and return the result."""
        done = _step(steps)
        while done is None:
            # Each step is a turn of its own: the turns rotate among callers, and among the requests of each caller.
            async with self._turns.turn(caller):
                await asyncio.sleep(0)
                done = _step(steps)
        return done[0]


def _step(steps: Steps[T]) -> tuple[T] | None:
    """Run the next step; return a tuple with the result if it was the last, otherwise None."""
    try:
        next(steps)
    except StopIteration as done:
        return (done.value,)
    return None

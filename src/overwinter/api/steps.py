"""Runs long work in steps, so that it does not block the loop.

Such work is a generator that yields after each bounded step and returns its result. Short work never yields. Threads
would not help: work that holds the GIL in a thread also blocks the loop.
"""

import asyncio
from collections.abc import Generator
from typing import TypeVar

from overwinter.api.starts import Starts

STEP_BYTES = 64 << 10
"""The approximate bytes that one step reads or makes: well below a millisecond of work, for any kind of element."""

T = TypeVar("T")
Steps = Generator[None, None, T]


def finish(steps: Steps[T]) -> T:
    """Run all steps without a pause, and return the result."""
    while (done := _step(steps)) is None:
        pass
    return done[0]


class Turns:
    """Runs one step per iteration of the event loop.

    Concurrent pieces of work take their steps in turn. Otherwise many together would block the loop as long as one
    without pauses.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self.bodies = Starts()
        """In which order complete bodies are handled; their further steps follow as those of other work."""

    async def run(self, steps: Steps[T]) -> T:
        """Run the steps and return the result; work of one step is done at once."""
        done = _step(steps)
        while done is None:
            # The lock is fair: each waiting request runs a step before this one runs its next.
            async with self._turn:
                await asyncio.sleep(0)
                done = _step(steps)
        return done[0]


def _step(steps: Steps[T]) -> tuple[T] | None:
    """Run one step; returns the result after the last."""
    try:
        next(steps)
    except StopIteration as done:
        return (done.value,)
    return None

"""How is long work done without keeping the loop from others?

Such work is a generator that yields after each bounded step and returns its result. Work that is short never yields.
Threads would not do: what holds the interpreter's lock in one stops the loop all the same.
"""

import asyncio
from collections.abc import Generator
from typing import TypeVar

STEP_BYTES = 64 << 10
"""About what a step reads or makes: well under a millisecond of work, with any kind of element."""

T = TypeVar("T")
Steps = Generator[None, None, T]


def finish(steps: Steps[T]) -> T:
    """The result, without a pause."""
    while (done := _step(steps)) is None:
        pass
    return done[0]


class Turns:
    """Lets the loop go round between two steps. Those that take more than one step take theirs by turns, one in each
    round: many would together keep the loop as long as one that never pauses, and none waits for another's end.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def run(self, steps: Steps[T]) -> T:
        """The result; what is done in one step is done at once."""
        done = _step(steps)
        while done is None:
            # Who comes first goes first: each of the others has a step before this one has its next.
            async with self._turn:
                await asyncio.sleep(0)
                done = _step(steps)
        return done[0]


def _step(steps: Steps[T]) -> tuple[T] | None:
    """Go one step; the result when it was the last."""
    try:
        next(steps)
    except StopIteration as done:
        return (done.value,)
    return None

"""Starts all threads that the node needs before it serves, so that it works when the system allows no more threads."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from overwinter.core.errors import MachineError


class Threads(ThreadPoolExecutor):
    """An executor that starts all its threads when it is created, so that work is never refused later."""

    def __init__(self, number: int, name: str, begin: Callable[[], None] | None = None) -> None:
        """`begin` is called first in each thread. MachineError when the system does not allow so many threads."""
        super().__init__(number, name, begin)
        meeting = Barrier(number)
        try:
            # Each takes a thread of its own, for all others wait for it.
            for _ in range(number):
                self.submit(meeting.wait)
        except RuntimeError as error:
            meeting.abort()
            self.shutdown(wait=False)
            raise MachineError(
                f"the system lets this node start no more threads ({error}): raise the limit on its processes "
                "(ulimit -u, or pids.max of its control group)"
            ) from error


def usual() -> int:
    """How many an event loop's own executor has."""
    return min(32, (os.cpu_count() or 1) + 4)

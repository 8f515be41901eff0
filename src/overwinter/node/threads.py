"""Starts all threads that the node needs before it serves, so that it works when the system allows no more threads."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from overwinter.core.errors import MachineError


class Threads(ThreadPoolExecutor):
    """An executor that starts all its threads when it is created, so that work is never refused later."""

    def __init__(self, number: int, name: str, begin: Callable[[], None] | None = None) -> None:
        """Start the threads; each calls `begin` first. Raises MachineError when the system does not allow so many
        threads.
        """
        super().__init__(number, name, begin)
        meeting = Barrier(number)
        try:
            # All calls wait for each other, so each starts a thread.
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
    """Return the number of threads of an event loop's default executor."""
    return min(32, (os.cpu_count() or 1) + 4)

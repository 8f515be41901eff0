"""Closes and removes memory files in a thread.

The kernel frees a file's memory when its last descriptor is closed or when it is removed, at 3 to 7 GiB a second. A
worker determines how much it writes to the buffers that it shares with the node, and a tenant how large its functions
are, so in the event loop one tenant could delay all others.
"""

import asyncio
import os
from collections.abc import Callable

from overwinter.node.threads import Threads


class ClosingThread:
    """The thread in which files are closed and removed."""

    def __init__(self) -> None:
        """Start the thread. Raises MachineError as `Threads` does."""
        self._thread = Threads(1, "closing")

    def close_file(self, fd: int) -> None:
        """Close a file soon."""
        self._thread.submit(os.close, fd)

    def run(self, work: Callable[[], None]) -> asyncio.Future[None]:
        """Do this work soon; the result has what it raises."""
        return asyncio.wrap_future(self._thread.submit(work))

    def end(self) -> None:
        """Do what remains, and end the thread."""
        self._thread.shutdown(wait=True)

"""Closes memory files in a thread.

The kernel frees a file's memory when its last descriptor is closed, about 3 GiB a second, and a worker decides how much
it has written to the buffers that it shares with the node.
"""

import os

from overwinter.node.threads import Threads


class ClosingThread:
    """The thread in which files are closed."""

    def __init__(self) -> None:
        """Start the thread. Raises MachineError as `Threads` does."""
        self._thread = Threads(1, "closing")

    def close_file(self, fd: int) -> None:
        """Close a file soon."""
        self._thread.submit(os.close, fd)

    def end(self) -> None:
        """Close all files, and end the thread."""
        self._thread.shutdown(wait=True)

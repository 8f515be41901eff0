"""A lock for threads and processes, shared or exclusive.

The kernel grants a shared lock while others hold it, even if a caller waits for the exclusive one. Shared holders that
overlap would starve that caller. So each caller first takes a second lock, the turn, and holds it until the lock is
granted.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from overwinter.store.disk import disk_errors


class Lock:
    """A lock by two files in a directory, `lock` and `turn`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the lock together with other shared holders."""
        with self._granted(fcntl.LOCK_SH):
            yield

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock alone."""
        with self._granted(fcntl.LOCK_EX):
            yield

    @contextmanager
    def _granted(self, kind: int) -> Iterator[None]:
        with self._file("lock") as lock:
            with self._file("turn") as turn:
                fcntl.flock(turn, fcntl.LOCK_EX)
                fcntl.flock(lock, kind)
            yield

    @contextmanager
    def _file(self, name: str) -> Iterator[int]:
        """Open a file. Closing it releases its lock."""
        with disk_errors("lock the repository", self._directory):
            descriptor = os.open(self._directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

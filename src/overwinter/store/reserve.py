"""A reserve file. It lets a node start, and lets functions be removed, while the disk is full.

The file is deleted before such an operation when the disk has less free space than the file should have, and created
again when none is in progress, as far as there is space. So a removal frees the space that the next removal needs.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from overwinter.store.disk import free_bytes

RESERVE_BYTES = 4 << 20
"""The space for the write-ahead logs of the catalog and the usage file, with the indexes of these logs."""
DISK_DIVISOR = 16
"""The reserve is at most the size of the disk divided by this."""


class Reserve:
    """Reserved disk space in a directory, for operations that must not fail there."""

    def __init__(self, path: Path, nbytes: int = RESERVE_BYTES) -> None:
        self._path = path
        state = os.statvfs(path.parent)
        self._nbytes = min(nbytes, state.f_blocks * state.f_frsize // DISK_DIVISOR)
        self._lock = threading.Lock()
        self._in_progress = 0

    @contextmanager
    def released(self) -> Iterator[None]:
        """Let the operation in this `with` statement use the reserved space. Any thread may call it."""
        with self._lock:
            self._in_progress += 1
            # If the space cannot be released, the operation may succeed without it, or it raises an error that says
            # what failed.
            with suppress(OSError):
                if free_bytes(self._path.parent) < self._nbytes:
                    self._path.unlink(missing_ok=True)
        try:
            yield
        finally:
            with self._lock:
                self._in_progress -= 1
                # An operation of another thread may still need the space.
                if not self._in_progress:
                    self._fill()

    def _fill(self) -> None:
        """Reserve the space, as far as it is available. If the file system refuses, no more is reserved."""
        with suppress(OSError):
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                missing = self._nbytes - os.fstat(descriptor).st_size
                nbytes = min(missing, free_bytes(self._path.parent))
                if nbytes > 0:
                    os.posix_fallocate(descriptor, self._nbytes - missing, nbytes)
            finally:
                os.close(descriptor)

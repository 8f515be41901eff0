"""How do a node's start and a removal succeed on a full disk? A file holds the room that they need.

It is let go before such an operation when the disk has less than that free, and taken again after it, as far as there
is room. So what was removed makes the room that the next removal needs.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from overwinter.store.sealing import free_bytes

RESERVE_BYTES = 4 << 20
"""For the write-ahead logs of two catalogs and their indexes."""
SHARE = 16
"""Of a small disk, it takes one part in so many."""


class Reserve:
    """Room on the disk of a directory for what must not fail there."""

    def __init__(self, path: Path, nbytes: int = RESERVE_BYTES) -> None:
        self._path = path
        state = os.statvfs(path.parent)
        self._nbytes = min(nbytes, state.f_blocks * state.f_frsize // SHARE)

    @contextmanager
    def spent(self) -> Iterator[None]:
        """What is done within may use the room."""
        if free_bytes(self._path.parent) < self._nbytes:
            self._path.unlink(missing_ok=True)
        try:
            yield
        finally:
            self._fill()

    def _fill(self) -> None:
        """Take the room, or what there is of it. A disk that cannot be asked for room beforehand keeps none."""
        with suppress(OSError):
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                lacking = self._nbytes - os.fstat(descriptor).st_size
                room = min(lacking, free_bytes(self._path.parent))
                if room > 0:
                    os.posix_fallocate(descriptor, self._nbytes - lacking, room)
            finally:
                os.close(descriptor)

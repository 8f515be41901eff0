"""Where tensors lie between two processes: a memory file that only grows, mapped by both."""

import fcntl
import mmap
import os
from collections.abc import Iterable, Iterator

from overwinter.core.tensor import TensorMeta

ALIGNMENT = 64
FIRST_BYTES = 64 << 10


def offsets(metas: Iterable[TensorMeta]) -> Iterator[int]:
    """Where each tensor starts in a tray that holds them in this order; the last value is the tray's size."""
    at = 0
    for meta in metas:
        yield at
        at += -(-meta.nbytes // ALIGNMENT) * ALIGNMENT
    yield at


class Tray:
    """A mapped memory file. Sealed against shrinking, so that no process can pull it from under another."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self.map = mmap.mmap(fd, nbytes)
        self.view = memoryview(self.map)

    @classmethod
    def make(cls, name: str) -> "Tray":
        """A new tray; the name is for people who look at a process's maps."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, FIRST_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return cls(fd, FIRST_BYTES)

    @classmethod
    def open(cls, fd: int) -> "Tray":
        """A tray that another process made."""
        return cls(fd, os.fstat(fd).st_size)

    def hold(self, nbytes: int) -> None:
        """Make room for `nbytes`; OSError when the system has none."""
        if nbytes > self.nbytes:
            grown = max(nbytes, 2 * self.nbytes)
            os.ftruncate(self.fd, grown)
            self._remap(grown)

    def follow(self, nbytes: int) -> None:
        """Map as much as the other process says it has; ValueError if the file is shorter."""
        if nbytes > self.nbytes:
            if os.fstat(self.fd).st_size < nbytes:
                raise ValueError(f"a tray of {os.fstat(self.fd).st_size} bytes is said to hold {nbytes}")
            self._remap(nbytes)

    def _remap(self, nbytes: int) -> None:
        # The old map stays alive as long as a tensor lies in it.
        self.map = mmap.mmap(self.fd, nbytes)
        self.view = memoryview(self.map)
        self.nbytes = nbytes

    def close(self) -> None:
        """Close the file; the map goes with its last user."""
        os.close(self.fd)

"""Shared-memory buffers through which tensors pass between two processes.

A buffer is a memory file that both processes map. Its size only grows, so neither process can truncate it under the
other.
"""

import fcntl
import mmap
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from overwinter.core.tensor import Buffer, TensorMeta

ALIGNMENT = 64
FIRST_BYTES = 64 << 10
KEPT_BYTES = 1 << 20
"""Memory that a buffer nobody uses may keep, so that small runs find their pages."""
GIVEN_BYTES = 4 << 20
"""Given back at a time: for more, the kernel takes as long as a request."""
LARGE_BYTES = 1 << 20
"""Above that, tensors are copied by calls of the system: other threads run meanwhile, and no page is cleared first."""


def offsets(metas: Iterable[TensorMeta]) -> Iterator[int]:
    """Where each tensor starts in a buffer that holds them in this order; the last value is the buffer's size."""
    at = 0
    for meta in metas:
        yield at
        at += -(-meta.nbytes // ALIGNMENT) * ALIGNMENT
    yield at


class SharedBuffer:
    """A mapped memory file. Sealed against shrinking, so that no process can pull it from under another, and against
    further seals, so that none can keep another from growing it.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self._grown = nbytes
        """The file, as far as this process made it so large, which may not have found room to map it."""
        self.map = mmap.mmap(fd, nbytes)
        self.view = memoryview(self.map)

    @classmethod
    def make(cls, name: str) -> "SharedBuffer":
        """A new buffer; its name appears in the maps of a process. OSError without descriptors."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, FIRST_BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            return cls(fd, FIRST_BYTES)
        except OSError:
            os.close(fd)
            raise

    @classmethod
    def open(cls, fd: int) -> "SharedBuffer":
        """A buffer that another process made."""
        return cls(fd, os.fstat(fd).st_size)

    def hold(self, nbytes: int) -> None:
        """Grow to `nbytes`; OSError when the system has no memory."""
        if nbytes > self.nbytes:
            grown = max(nbytes, 2 * self.nbytes, self._grown)
            os.ftruncate(self.fd, grown)
            self._grown = grown
            self._remap(grown)

    def follow(self, nbytes: int) -> None:
        """Map as much as the other process says it has; ValueError if the file is shorter."""
        if nbytes > self.nbytes:
            if os.fstat(self.fd).st_size < nbytes:
                raise ValueError(f"a buffer of {os.fstat(self.fd).st_size} bytes is said to hold {nbytes}")
            self._remap(nbytes)

    def put(self, at: int, data: Buffer) -> None:
        """Copy bytes to this offset; they must fit. OSError when the system has no memory."""
        if len(data) <= LARGE_BYTES:
            self.view[at : at + len(data)] = data
            return
        rest = memoryview(data).cast("B")
        while rest:
            written = os.pwrite(self.fd, rest, at)
            rest, at = rest[written:], at + written

    def take(self, at: int, nbytes: int) -> Buffer:
        """A copy of so many bytes from this offset; ValueError if they do not exist, OSError or MemoryError when this
        process has no memory for them.
        """
        if nbytes <= LARGE_BYTES:
            return bytes(self.view[at : at + nbytes])
        taken = memoryview(mmap.mmap(-1, nbytes))
        rest = taken
        while rest:
            read = os.preadv(self.fd, [rest], at)
            if not read:
                raise ValueError(f"{nbytes} bytes do not lie in a buffer of {os.fstat(self.fd).st_size}")
            rest, at = rest[read:], at + read
        return taken.toreadonly()

    def give_back(self) -> Iterator[None]:
        """Release the memory beyond KEPT_BYTES in both processes, piece by piece: its bytes are zero afterwards. The
        size does not change.
        """
        for at in range(KEPT_BYTES, self.nbytes, GIVEN_BYTES):
            self.map.madvise(mmap.MADV_REMOVE, at, min(GIVEN_BYTES, self.nbytes - at))
            yield

    def _remap(self, nbytes: int) -> None:
        # The old map stays alive as long as a tensor lies in it.
        self.map = mmap.mmap(self.fd, nbytes)
        self.view = memoryview(self.map)
        self.nbytes = nbytes

    def close(self) -> None:
        """Close the mapping and the file; no tensor may be in it any more."""
        self.view.release()
        self.map.close()
        os.close(self.fd)


class Slot(NamedTuple):
    """The buffers of one run."""

    inputs: SharedBuffer
    outputs: SharedBuffer

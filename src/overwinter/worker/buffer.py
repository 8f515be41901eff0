"""Shared-memory buffers through which tensors pass between two processes.

A buffer is a memory file that both processes map. Its size only grows, so neither process can truncate it under the
other.
"""

import errno
import fcntl
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from overwinter.core.tensor import Buffer, TensorMeta

ALIGNMENT = 64
FIRST_BYTES = 64 << 10
KEPT_BYTES = 1 << 20
"""The memory that an idle buffer keeps, so that small runs find their pages mapped."""
RELEASED_BYTES = 4 << 20
"""The memory that one call releases; for more the kernel would take as long as a request."""
LARGE_BYTES = 1 << 20
"""Larger tensors are copied by system calls, which let other threads run and do not clear pages first."""


def offsets(metas: Iterable[TensorMeta]) -> Iterator[int]:
    """Yield the offset of each tensor in a buffer with tensors in this order; the last value is the buffer's size."""
    at = 0
    for meta in metas:
        yield at
        at += -(-meta.nbytes // ALIGNMENT) * ALIGNMENT
    yield at


class SharedBuffer:
    """A mapped memory file.

    It is sealed against shrinking, so that no process can remove memory that another uses, and against further seals,
    so that no process can keep another from growing it.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self._grown = nbytes
        """The size to which this process has grown the file; mapping that size may have failed for lack of memory."""
        self.map = mmap.mmap(fd, nbytes)
        self.view = memoryview(self.map)

    @classmethod
    def make(cls, name: str) -> "SharedBuffer":
        """Create a buffer; its name appears in the maps of a process. Raises OSError without descriptors."""
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
        """Map a buffer that another process created."""
        return cls(fd, os.fstat(fd).st_size)

    def grow(self, nbytes: int) -> None:
        """Grow to `nbytes`; raise OSError when the system lacks memory, or has no files of this size."""
        if nbytes > self.nbytes:
            grown = max(nbytes, 2 * self.nbytes, self._grown)
            if grown > sys.maxsize:
                # Neither call below takes such a number.
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            os.ftruncate(self.fd, grown)
            self._grown = grown
            self._remap(grown)

    def follow(self, nbytes: int) -> None:
        """Map as much as the other process reports; raise ValueError if the file is shorter."""
        if nbytes > self.nbytes:
            if os.fstat(self.fd).st_size < nbytes:
                raise ValueError(f"a buffer of {os.fstat(self.fd).st_size} bytes is said to hold {nbytes}")
            self._remap(nbytes)

    def put(self, at: int, data: Buffer) -> None:
        """Copy bytes to this offset; they must fit. Raises OSError when the system lacks memory."""
        if len(data) <= LARGE_BYTES:
            self.view[at : at + len(data)] = data
            return
        rest = memoryview(data).cast("B")
        while rest:
            written = os.pwrite(self.fd, rest, at)
            rest, at = rest[written:], at + written

    def take(self, at: int, nbytes: int) -> Buffer:
        """Return a copy of this many bytes from this offset.

        They must be mapped (`follow`). Raises ValueError if the file ends before them, OSError or MemoryError when this
        process lacks memory.
        """
        if nbytes <= LARGE_BYTES:
            return bytes(self.view[at : at + nbytes])
        taken = memoryview(mmap.mmap(-1, nbytes))
        rest = taken
        while rest:
            read = os.preadv(self.fd, [rest], at)
            if not read:
                raise ValueError(f"{nbytes} bytes do not fit in a buffer of {os.fstat(self.fd).st_size}")
            rest, at = rest[read:], at + read
        return taken.toreadonly()

    def release(self) -> Iterator[None]:
        """Release the memory beyond KEPT_BYTES in both processes, piece by piece: its bytes are zero afterwards. The
        size does not change.
        """
        for at in range(KEPT_BYTES, self.nbytes, RELEASED_BYTES):
            self.map.madvise(mmap.MADV_REMOVE, at, min(RELEASED_BYTES, self.nbytes - at))
            yield

    def _remap(self, nbytes: int) -> None:
        # The old map stays alive while a tensor uses it.
        self.map = mmap.mmap(self.fd, nbytes)
        self.view = memoryview(self.map)
        self.nbytes = nbytes

    def close(self, close_file: Callable[[int], object] = os.close) -> None:
        """Close the mapping and, by `close_file`, the file; no tensor may use it any more."""
        self.view.release()
        self.map.close()
        close_file(self.fd)


class Slot(NamedTuple):
    """The buffers of one run."""

    inputs: SharedBuffer
    outputs: SharedBuffer

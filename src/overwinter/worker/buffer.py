"""Shared-memory buffers through which tensors pass between two processes.

A buffer is a memory file that both processes map, as far as they use it. Its size is fixed, so neither process can
truncate it under the other. Only pages that were written take memory.
"""

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from overwinter.core.tensor import Buffer, TensorMeta

ALIGNMENT = 64
FILE_BYTES = 1 << 36
"""The usual size of the file: enough for a run of a thousand of the largest requests."""
FIRST_BYTES = 64 << 10
"""What is mapped at first."""
KEPT_BYTES = 1 << 20
"""The memory that an idle buffer keeps, so that small runs find their pages mapped."""
RELEASED_BYTES = 4 << 20
"""The memory that one call releases; for more the kernel would take as long as a request."""
LARGE_BYTES = 1 << 20
"""Larger tensors are copied by system calls, which let other threads run and do not clear the buffer's pages first."""


def offsets(metas: Iterable[TensorMeta]) -> Iterator[int]:
    """Yield the offset of each tensor in a buffer that has them in this order; the last value is the bytes of all."""
    at = 0
    for meta in metas:
        yield at
        at += -(-meta.nbytes // ALIGNMENT) * ALIGNMENT
    yield at


class SharedBuffer:
    """A mapped memory file.

    It is sealed against changes of its size, so that no process can remove memory that another uses, and against
    further seals, so that no process can keep another from writing. The kernel locks a file while a system call writes
    to it or changes its size, and the node must not wait for a worker's call: in a worker all such calls fail at once.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._file_bytes = os.fstat(fd).st_size
        self.nbytes = FIRST_BYTES
        """The bytes that are mapped."""
        self.map = mmap.mmap(fd, FIRST_BYTES)
        self.view = memoryview(self.map)

    @classmethod
    def make(cls, name: str, nbytes: int = FILE_BYTES) -> "SharedBuffer":
        """Create a buffer of at least `nbytes`; its name appears in the maps of a process. Raises OSError if no
        descriptor or memory is left.
        """
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, max(nbytes, FIRST_BYTES))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(fd)
        except OSError:
            os.close(fd)
            raise

    @classmethod
    def open(cls, fd: int) -> "SharedBuffer":
        """Map a buffer that another process created."""
        return cls(fd)

    def grow(self, nbytes: int) -> None:
        """Map at least `nbytes`; raise OSError when the system lacks memory, or the file is smaller."""
        if nbytes > self._file_bytes:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        if nbytes > self.nbytes:
            # The old map stays alive while a tensor uses it.
            nbytes = min(max(nbytes, 2 * self.nbytes), self._file_bytes)
            self.map = mmap.mmap(self.fd, nbytes)
            self.view = memoryview(self.map)
            self.nbytes = nbytes

    def put(self, at: int, data: Buffer) -> None:
        """Copy bytes to this offset. Raises OSError as `grow` does."""
        self.grow(at + len(data))
        if len(data) <= LARGE_BYTES:
            self.view[at : at + len(data)] = data
            return
        rest = memoryview(data).cast("B")
        while rest:
            written = os.pwrite(self.fd, rest, at)
            rest, at = rest[written:], at + written

    def take(self, at: int, nbytes: int) -> Buffer:
        """Return a copy of this many bytes from this offset. Raises OSError as `grow` does, or MemoryError."""
        self.grow(at + nbytes)
        if nbytes <= LARGE_BYTES:
            return bytes(self.view[at : at + nbytes])
        taken = memoryview(mmap.mmap(-1, nbytes))
        rest = taken
        while rest:
            read = os.preadv(self.fd, [rest], at)
            rest, at = rest[read:], at + read
        return taken.toreadonly()

    def release(self) -> Iterator[None]:
        """Release the mapped memory beyond KEPT_BYTES in both processes, piece by piece: its bytes are zero
        afterwards. The size does not change.
        """
        for at in range(KEPT_BYTES, self.nbytes, RELEASED_BYTES):
            self.map.madvise(mmap.MADV_REMOVE, at, min(RELEASED_BYTES, self.nbytes - at))
            yield

    def close(self, close_file: Callable[[int], object] = os.close) -> None:
        """Close the mapping and, by `close_file`, the file; no tensor may use it any more."""
        self.view.release()
        self.map.close()
        close_file(self.fd)


class Slot(NamedTuple):
    """The buffers of one run."""

    inputs: SharedBuffer
    outputs: SharedBuffer

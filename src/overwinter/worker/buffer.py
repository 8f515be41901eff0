"""Shared-memory buffers through which tensors pass between two processes.

A buffer is a memory file that both processes map. Its size only grows, so neither process can truncate it under the
other. The kernel locks the file while a process changes its size, writes to it by a system call, or removes memory from
it. A worker can thus keep that lock, so the node does none of these to a file that a worker has, except in a thread.
"""

import ctypes
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
"""Larger tensors are copied by system calls, which let other threads run."""

_libc = ctypes.CDLL(None, use_errno=True)
_KEEP_SIZE_AND_PUNCH_HOLE = 3


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

    def __init__(self, fd: int, nbytes: int, name: str = "") -> None:
        self.fd = fd
        self._name = name
        self.nbytes = nbytes
        self._grown = nbytes
        """The size to which this process has grown the file; mapping that size may have failed for lack of memory."""
        self.map = mmap.mmap(fd, nbytes)
        self.view = memoryview(self.map)

    @classmethod
    def make(cls, name: str, nbytes: int = FIRST_BYTES) -> "SharedBuffer":
        """Create a buffer; its name appears in the maps of a process. Raises OSError without descriptors."""
        fd = _new_file(name, nbytes)
        try:
            return cls(fd, nbytes, name)
        except OSError:
            os.close(fd)
            raise

    @classmethod
    def open(cls, fd: int) -> "SharedBuffer":
        """Map a buffer that another process created."""
        return cls(fd, os.fstat(fd).st_size)

    def grow(self, nbytes: int) -> None:
        """Grow to `nbytes`; raise OSError when the system lacks memory, or has no files of this size. The node uses
        `replace` instead.
        """
        if nbytes > self.nbytes:
            grown = max(nbytes, 2 * self.nbytes, self._grown)
            _set_size(self.fd, grown)
            self._grown = grown
            self._remap(grown)

    def follow(self, nbytes: int) -> None:
        """Map as much as the other process reports; raise ValueError if the file is shorter."""
        if nbytes > self.nbytes:
            if os.fstat(self.fd).st_size < nbytes:
                raise ValueError(f"a buffer of {os.fstat(self.fd).st_size} bytes is said to hold {nbytes}")
            self._remap(nbytes)

    def replace(self, nbytes: int, close_file: Callable[[int], object] = os.close) -> None:
        """Use a new and empty file, of at least twice the size; `close_file` closes the old one. The other process must
        `take_over` the new one. Only the process that created the buffer may call this. Raises OSError, and then keeps
        the old file.
        """
        size = max(nbytes, 2 * self.nbytes)
        fd = _new_file(self._name, size)
        try:
            self._remap(size, fd)
        except OSError:
            os.close(fd)
            raise
        self.fd, old = fd, self.fd
        close_file(old)

    def take_over(self, fd: int) -> None:
        """Use the new file that the other process uses now."""
        self._remap(os.fstat(fd).st_size, fd)
        self.fd, old = fd, self.fd
        self._grown = self.nbytes
        os.close(old)

    def put(self, at: int, data: Buffer) -> None:
        """Copy bytes to this offset; they must fit. Raises OSError when the system lacks memory."""
        if len(data) <= LARGE_BYTES:
            self.view[at : at + len(data)] = data
            return
        # The kernel copies to the mapping, by way of a small file of this process.
        rest, own = memoryview(data).cast("B"), os.memfd_create("overwinter-copy", os.MFD_CLOEXEC)
        try:
            while rest:
                written = os.pwrite(own, rest[:LARGE_BYTES], 0)
                read = os.preadv(own, [self.view[at : at + written]], 0)
                rest, at = rest[read:], at + read
        finally:
            os.close(own)

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
        size does not change. Another process can delay it. Raises OSError.
        """
        for at in range(KEPT_BYTES, self.nbytes, RELEASED_BYTES):
            place = ctypes.c_long(at), ctypes.c_long(min(RELEASED_BYTES, self.nbytes - at))
            # Unlike `mmap.madvise`, this lets other threads run meanwhile.
            if _libc.fallocate(self.fd, _KEEP_SIZE_AND_PUNCH_HOLE, *place):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            yield

    def _remap(self, nbytes: int, fd: int | None = None) -> None:
        # The old map stays alive while a tensor uses it.
        self.map = mmap.mmap(self.fd if fd is None else fd, nbytes)
        self.view = memoryview(self.map)
        self.nbytes = nbytes

    def close(self, close_file: Callable[[int], object] = os.close) -> None:
        """Close the mapping and, by `close_file`, the file; no tensor may use it any more."""
        self.view.release()
        self.map.close()
        close_file(self.fd)


def _new_file(name: str, nbytes: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        _set_size(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


def _set_size(fd: int, nbytes: int) -> None:
    if nbytes > sys.maxsize:
        # Python's calls take no such number.
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    os.ftruncate(fd, nbytes)


class Slot(NamedTuple):
    """The buffers of one run."""

    inputs: SharedBuffer
    outputs: SharedBuffer


INPUTS, OUTPUTS = range(2)
"""The index of each buffer in a slot."""

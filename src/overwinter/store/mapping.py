"""Maps a block's file into a process's memory, in huge pages where possible.

A fork maps a model with fewer faults when its blocks are in huge pages, and then reads it with fewer TLB misses. The
kernel collapses the small pages of a tmpfs file into huge ones on request, even if it would not do so by itself; pages
that it cannot collapse stay small.
"""

import ctypes
import mmap
import os

from overwinter.core.errors import StoreError

HUGE_BYTES = 2 << 20
_COLLAPSE = 25
"""MADV_COLLAPSE, which Linux 6.1 introduced."""
_NONE, _PRIVATE, _ANONYMOUS, _NORESERVE = 0x00, 0x02, 0x20, 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value


def map_read_only(fd: int, nbytes: int) -> int:
    """Map a file of at least `nbytes` read-only and shared; return its address. Raises StoreError if the system
    refuses.

    Python's `mmap` is not used: it keeps a descriptor per block open, and cannot align mappings for huge pages.
    """
    address = _libc.mmap(_aligned_address(nbytes), nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address is None or address == _FAILED:
        refused = OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        raise StoreError(f"a block could not be mapped: {refused.strerror}") from refused
    return int(address)


def unmap(address: int, nbytes: int) -> None:
    """Undo `map_read_only`; nothing may use the memory any more."""
    _libc.munmap(address, nbytes)


class _Mapping:
    """Unmaps memory when this object is freed. `weakref.finalize` would take some 9 µs more per block."""

    __slots__ = ("_address", "_nbytes")

    def __init__(self, address: int, nbytes: int) -> None:
        self._address, self._nbytes = address, nbytes

    def __del__(self) -> None:
        unmap(self._address, self._nbytes)


def mapped_buffer(fd: int, nbytes: int) -> "ctypes.Array[ctypes.c_char]":
    """Map a file as `map_read_only` does, and return the memory. The mapping ends with the last reference to it, such
    as that of a tensor that `torch.frombuffer` made of it.
    """
    address = map_read_only(fd, nbytes)
    buffer = (ctypes.c_char * nbytes).from_address(address)
    vars(buffer)["mapping"] = _Mapping(address, nbytes)
    return buffer


def collapse_pages(fd: int, nbytes: int) -> bool:
    """Let the kernel collapse a tmpfs file's pages into huge pages; return whether it did. Takes about 2 ms per MiB."""
    whole = nbytes - nbytes % HUGE_BYTES
    if not whole:
        return False
    address = map_read_only(fd, whole)
    refused: int = _libc.madvise(address, whole, _COLLAPSE)
    unmap(address, whole)
    return refused == 0


def _aligned_address(nbytes: int) -> int | None:
    """Return an address at which a file can be mapped with huge pages. It is a hint, which the kernel may ignore."""
    if nbytes < HUGE_BYTES:
        return None
    reserved = nbytes + HUGE_BYTES
    found = _libc.mmap(None, reserved, _NONE, _PRIVATE | _ANONYMOUS | _NORESERVE, -1, 0)
    if found is None or found == _FAILED:
        return None
    _libc.munmap(found, reserved)
    return -(-int(found) // HUGE_BYTES) * HUGE_BYTES

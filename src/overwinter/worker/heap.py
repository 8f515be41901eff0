"""Returns unused memory of a process to the system, and takes the memory of a first run ahead of it.

Each tenant's zygote and each idle worker would keep unused memory of its own, so the reserves of libraries are released
too.
"""

import ctypes
import mmap
import threading
from collections.abc import Callable
from contextlib import suppress

_PAGE = mmap.PAGESIZE

_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = (ctypes.c_size_t,)
_libc.free.argtypes = (ctypes.c_void_p,)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.sbrk.restype = ctypes.c_void_p
_libc.sbrk.argtypes = (ctypes.c_ssize_t,)
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, which Linux 5.14 introduced."""
POPULATED_LEAST_BYTES, POPULATED_MOST_BYTES = 4 << 20, 24 << 20
"""For less, a thread is not worth its start. More may be too large for the heap (LARGEST_IN_HEAP_BYTES)."""


class _Heap(ctypes.Structure):
    """glibc's `mallinfo2`."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in (*"123456789", "end_bytes"))


def _mkl_release() -> Callable[[], object]:
    """Return the function that frees MKL's buffers of the calling thread; it does nothing if PyTorch has no MKL."""
    try:
        free: Callable[[], object] = ctypes.CDLL("libtorch_cpu.so").mkl_serv_thread_free_buffers
    except (OSError, AttributeError):
        return lambda: None
    return free


_free_buffers = _mkl_release()
_heap: Callable[[], _Heap] | None = getattr(_libc, "mallinfo2", None)
"""None in a C library without the function; such a system does not use huge pages for the heap either."""
if _heap is not None:
    _libc.mallinfo2.restype = _Heap


def populate_heap(nbytes: int) -> None:
    """Take memory at the end of the heap for the tensors of a run, in a thread and without waiting for it.

    New memory costs page faults of 2 µs per page. The thread takes them while this one binds weights. It changes no
    content, so memory that is allocated meanwhile is not affected.
    """
    nbytes = min(nbytes, POPULATED_MOST_BYTES)
    block = _libc.malloc(nbytes) if nbytes >= POPULATED_LEAST_BYTES else None
    if block is None:
        return
    # A block outside the heap is unmapped when it is freed.
    in_heap = block < _libc.sbrk(0)
    # The memory is the end of the heap again.
    _libc.free(block)
    if in_heap:
        start, stop = -(-block // _PAGE) * _PAGE, (block + nbytes) // _PAGE * _PAGE
        # Without a thread the run itself takes the page faults.
        with suppress(RuntimeError):
            threading.Thread(target=_libc.madvise, args=(start, stop - start, _POPULATE_WRITE), daemon=True).start()


def release_heap() -> None:
    """Return freed memory to the system, and MKL's buffers of the calling thread.

    For each size of matrices MKL keeps a buffer of 4 to 9 MiB and uses little of it; with huge pages the used
    part takes at least 2 MiB.
    """
    _free_buffers()
    _libc.malloc_trim(0)
    _release_end()


def _release_end() -> None:
    """With huge pages glibc keeps the end of its heap up to the next huge page, with all pages that were ever written.
    Allocating that end as a block allows releasing its pages independently of other threads' allocations.
    """
    unused = 0 if _heap is None else _heap().end_bytes - 2 * _PAGE
    block = _libc.malloc(unused) if unused > 0 else None
    if block is not None:
        start, stop = -(-block // _PAGE) * _PAGE, (block + unused) // _PAGE * _PAGE
        if start < stop:
            _libc.madvise(start, stop - start, mmap.MADV_DONTNEED)
        _libc.free(block)


def release_code() -> None:
    """Release the pages of the libraries' code; code that runs again is mapped again."""
    with open("/proc/self/maps") as maps:
        regions = [line.split() for line in maps]
    for bounds, permissions, _, _, inode, *_ in regions:
        if permissions.startswith("r-x") and inode != "0":
            start, stop = (int(bound, 16) for bound in bounds.split("-"))
            _libc.madvise(start, stop - start, mmap.MADV_DONTNEED)

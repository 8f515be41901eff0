"""How does a process give back memory that it needs no more?

What a zygote keeps, each tenant pays for, and what an idle worker keeps, each worker: so all that libraries hold in
reserve goes too.
"""

import ctypes
import mmap
from collections.abc import Callable

_PAGE = mmap.PAGESIZE

_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = (ctypes.c_size_t,)
_libc.free.argtypes = (ctypes.c_void_p,)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class _Heap(ctypes.Structure):
    """glibc's `mallinfo2`."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in (*"123456789", "end_bytes"))


def _buffers_of_mkl() -> Callable[[], object]:
    """What lets go of the buffers that MKL keeps for the calling thread; nothing where PyTorch has no MKL."""
    try:
        free: Callable[[], object] = ctypes.CDLL("libtorch_cpu.so").mkl_serv_thread_free_buffers
    except (OSError, AttributeError):
        return lambda: None
    return free


_free_buffers = _buffers_of_mkl()
_heap: Callable[[], _Heap] | None = getattr(_libc, "mallinfo2", None)
"""A system without it has no heap of huge pages either."""
if _heap is not None:
    _libc.mallinfo2.restype = _Heap


def give_back_heap() -> None:
    """Return freed memory to the system, and what MKL keeps for the calling thread.

    For each size of matrices MKL keeps a buffer of 4 to 9 MiB, of which it uses little; in huge pages that takes 2 MiB
    and more.
    """
    _free_buffers()
    _libc.malloc_trim(0)
    _give_back_end()


def _give_back_end() -> None:
    """With huge pages glibc keeps the end of its heap up to the next of them, and all that was ever written there.

    Whoever has that end as a block of its own can let go of its pages, whatever other threads allocate meanwhile.
    """
    room = 0 if _heap is None else _heap().end_bytes - 2 * _PAGE
    block = _libc.malloc(room) if room > 0 else None
    if block is not None:
        start, stop = -(-block // _PAGE) * _PAGE, (block + room) // _PAGE * _PAGE
        if start < stop:
            _libc.madvise(start, stop - start, mmap.MADV_DONTNEED)
        _libc.free(block)


def give_back_code() -> None:
    """Let go of the pages of libraries that were only read while loading; what runs again is mapped again."""
    with open("/proc/self/maps") as maps:
        regions = [line.split() for line in maps]
    for bounds, rights, _, _, inode, *_ in regions:
        if rights.startswith("r-x") and inode != "0":
            start, stop = (int(bound, 16) for bound in bounds.split("-"))
            _libc.madvise(start, stop - start, mmap.MADV_DONTNEED)

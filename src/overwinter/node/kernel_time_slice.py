"""Asks for short kernel time slices, for this process and all that it will fork.

While all cores are busy, a process that wakes up waits until the running one has used up its slice, usually 3 ms. A
request wakes the node and a worker several times. With short slices the running process is interrupted sooner: at the
end of its slice, or when its group has used more than its share. That needs Linux 6.12 (EEVDF with separate slices for
each process); older kernels ignore the request.
"""

import ctypes
import os
import platform

SLICE_NS = 100_000
"""The shortest slice that Linux gives."""
_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}
"""The numbers of sched_setattr and sched_getattr."""
_libc = ctypes.CDLL(None, use_errno=True)


class _Attributes(ctypes.Structure):
    """`struct sched_attr` in its first version (sched_setattr(2))."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def shorten_kernel_time_slice() -> bool:
    """Ask for the shortest kernel time slice for this thread and what it creates; return whether the call succeeded."""
    found = _attributes()
    if found is None or found.policy != os.SCHED_OTHER:
        return False
    found.runtime = SLICE_NS
    return bool(_libc.syscall(_CALLS[platform.machine()][0], 0, ctypes.byref(found), 0) == 0)


def _attributes() -> _Attributes | None:
    if platform.machine() not in _CALLS:
        return None
    found = _Attributes()
    size = ctypes.sizeof(found)
    failed = _libc.syscall(_CALLS[platform.machine()][1], 0, ctypes.byref(found), size, 0)
    return None if failed else found

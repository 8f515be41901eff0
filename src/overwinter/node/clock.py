"""The only place that reads a clock."""

import ctypes
import time

from overwinter.core.ids import Seconds

_libc = ctypes.CDLL(None)


def now() -> Seconds:
    """Seconds of the monotonic clock: the one the event loop keeps its timers by."""
    return Seconds(time.monotonic())


def wall() -> float:
    """Seconds since 1970, for what people read and files remember."""
    return time.time()


def computed_s(pid: int) -> float | None:
    """Seconds of all cores that a process has taken; None when it is gone. The kernel tells everybody."""
    clock = ctypes.c_int()
    if _libc.clock_getcpuclockid(pid, ctypes.byref(clock)) != 0:
        return None
    try:
        return time.clock_gettime(clock.value)
    except OSError:
        return None

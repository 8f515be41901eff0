"""The only module that reads a clock."""

import time

from overwinter.core.ids import Seconds

PID_SHIFT, SCHEDULED = 3, 2
"""In the number of the clock that counts what a process took (Linux: clock_getcpuclockid)."""


def now() -> Seconds:
    """Seconds of the monotonic clock: the one the event loop keeps its timers by."""
    return Seconds(time.monotonic())


def wall() -> float:
    """Seconds since 1970, for what people read and files remember."""
    return time.time()


def computed_s(pid: int) -> float | None:
    """The processor time of a process in seconds; None when it has ended. Needs no privilege."""
    try:
        return time.clock_gettime(~pid << PID_SHIFT | SCHEDULED)
    except OSError:
        return None

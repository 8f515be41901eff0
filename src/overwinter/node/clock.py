"""The clocks of the daemon. Its event loop uses the same clock as `now`, rounded to milliseconds."""

import time

from overwinter.core.ids import Seconds

PID_SHIFT, SCHEDULED = 3, 2
"""How Linux encodes the id of a process's CPU clock: the shift of the process id, and the kind of clock
(clock_getcpuclockid)."""


def now() -> Seconds:
    """Return the seconds of the monotonic clock, which the event loop uses for its timers."""
    return Seconds(time.monotonic())


def wall() -> float:
    """Return the wall-clock time in seconds since 1970, for people and files."""
    return time.time()


def cpu_time_s(pid: int) -> float | None:
    """Return the CPU time of a process in seconds; None when it has ended and was reaped. Needs no privilege."""
    try:
        return time.clock_gettime(~pid << PID_SHIFT | SCHEDULED)
    except OSError:
        return None

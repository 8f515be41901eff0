"""The only place that reads a clock."""

import time

from overwinter.core.ids import Seconds


def now() -> Seconds:
    """Seconds of the monotonic clock: the one the event loop keeps its timers by."""
    return Seconds(time.monotonic())


def wall() -> float:
    """Seconds since 1970, for what people read and files remember."""
    return time.time()

"""What is known of a request that has no answer yet, and of a body that lives?"""

from typing import Generic, TypeVar

from overwinter.core.actions import Start, StartBody
from overwinter.core.ids import RunId, Seconds
from overwinter.core.tally import Tally

T = TypeVar("T", bound=Tally)


class OpenRequest(Generic[T]):
    """A request that has no answer yet."""

    __slots__ = ("arrived", "ran", "tally")

    def __init__(self, tally: T, arrived: Seconds) -> None:
        self.tally = tally
        self.arrived = arrived
        self.ran = False


class LivingBody(Generic[T]):
    """A body from the asking for it to its end."""

    __slots__ = (
        "asked",
        "busy_s",
        "busy_since",
        "cores",
        "function",
        "nbytes",
        "run_cores",
        "runs",
        "since",
        "start",
        "stopping",
        "tally",
        "weighed",
    )

    def __init__(self, tally: T, action: StartBody, start: Start, asked: Seconds, now: Seconds) -> None:
        self.tally = tally
        self.function = action.function
        self.cores = action.cores
        self.run_cores = max(1, action.cores // action.concurrency)
        self.start = start
        self.asked = asked
        """When the wake began: with the staging, if there was one."""
        self.since = self.busy_since = self.weighed = now
        self.runs: dict[RunId, tuple[Seconds, int]] = {}
        """When each run began, and how many requests are in it."""
        self.busy_s = 0.0
        self.nbytes = 0.0
        """Private memory."""
        self.stopping = False

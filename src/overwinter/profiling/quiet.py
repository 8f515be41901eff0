"""Decides when a measurement may run without disturbing requests or being disturbed by them.

It may run while no request is open and no worker or device has an operation in progress; and while the node serves,
only for a share of the time.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from overwinter.core.ids import Seconds

POLL_S = 0.005
SERVING_S = 10.0
"""A node whose last request came longer ago is idle, and measures as fast as it can."""


class Arrivals(Protocol):
    """Observes incoming requests."""

    @property
    def arrivals(self) -> int:
        """The number of requests so far."""
        ...

    @property
    def arrived_at(self) -> Seconds | None:
        """The arrival of the last request."""
        ...


class Quiet:
    """Decides when to measure, and accounts for the time used."""

    def __init__(self, requests: Arrivals, busy: Callable[[], bool], share: float, now: Callable[[], Seconds]) -> None:
        """Create it. `busy`: whether a request is open, or a worker or device has an operation in progress. `share`:
        the share of the time that measurements may take while the node serves, above 0 and at most 1.
        """
        self._requests = requests
        self._busy = busy
        self._share = share
        self._now = now
        self._pauses_until = Seconds(0.0)

    async def wait_until_quiet(self) -> int:
        """Wait until a measurement may run; return a mark of this moment, for `disturbed`."""
        while self._serves() and (pause_s := self._pauses_until - self._now()) > 0:  # noqa: ASYNC110 - there is no event when the node becomes idle
            await asyncio.sleep(min(pause_s, SERVING_S))
        while self._busy():  # noqa: ASYNC110 - there is no event for the end of all requests and operations
            await asyncio.sleep(POLL_S)
        return self._requests.arrivals

    def disturbed(self, mark: int) -> bool:
        """Whether anything is in progress, or a request has arrived since the moment of the mark."""
        return self._busy() or self._requests.arrivals != mark

    def spent(self, seconds: float) -> None:
        """Account for a measurement of this duration: while the node serves, the next one must wait accordingly."""
        self._pauses_until = Seconds(self._now() + seconds * (1.0 / self._share - 1.0))

    def _serves(self) -> bool:
        last = self._requests.arrived_at
        return last is not None and self._now() - last < SERVING_S

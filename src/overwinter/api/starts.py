"""Starts the requests that arrive together: some in each iteration of the event loop, in turns of the clients.

Otherwise one iteration would start all requests that have arrived, one for each connection, and the requests of other
clients would wait for its end. The requests of clients that leave together are cancelled in the same way.
"""

import asyncio
from collections import deque
from collections.abc import Callable

STARTED_MAX = 16
"""The most requests that one iteration of the event loop starts: about a millisecond of work."""

Start = Callable[[], object]


class Starts:
    """The requests that are to be started."""

    def __init__(self) -> None:
        self._started = 0
        """The requests that this iteration has started."""
        self._waiting: dict[str, deque[Start]] = {}
        """The other ones of each client. The client with the next turn comes first."""

    def add(self, client: str, start: Start) -> None:
        """Start a request, now or when it is its client's turn. Needs a running event loop."""
        if not (self._started or self._waiting):
            asyncio.get_running_loop().call_soon(self._begin_iteration)
        if self._waiting or self._started == STARTED_MAX:
            self._waiting.setdefault(client, deque()).append(start)
        else:
            self._started += 1
            start()

    def _begin_iteration(self) -> None:
        self._started = 0
        while self._waiting and self._started < STARTED_MAX:
            client = next(iter(self._waiting))
            queue = self._waiting.pop(client)
            start = queue.popleft()
            if queue:
                self._waiting[client] = queue
            self._started += 1
            start()
        if self._started:
            asyncio.get_running_loop().call_soon(self._begin_iteration)

"""Starts work that becomes ready together: some in each iteration of the event loop, and the clients take turns.

Otherwise one iteration would start all requests that have arrived, or handle all that are complete, one for each
connection, and the requests of other clients would wait for its end. The requests of clients that disconnect together
are cancelled in the same way.

While work is left, the node's other threads may run Python code between two iterations. The loop releases the GIL at
each poll, but takes it again before a waiting thread wakes up, so without a pause the threads would not run.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial

STARTED_MAX = 16
"""About the most requests that one iteration of the event loop starts: a millisecond of work."""
BYTES_OF_ONE = 4 << 10
"""The bytes of a complete request that count as one request more."""
SMALL_MOST = 4
"""Work that counts as at most this many requests is small. It goes before larger work, also of other clients."""
YIELD_S = 20e-6
"""The pause in which another thread may take the GIL."""

Start = Callable[[], object]
_Clients = dict[str, deque[tuple[Start, int]]]


class FairQueue:
    """The work that waits to be started, each piece for a client."""

    def __init__(self, most: int = STARTED_MAX) -> None:
        self._most = most
        self._started = 0
        """The requests that this iteration has started, a large one counting as many."""
        self._small: _Clients = {}
        self._large: _Clients = {}
        self._discards: _Clients = {}
        """The waiting work of each client: small, large, and discards. The client with the next turn comes first."""

    def add(self, client: str, start: Start, count: int = 1, discards: bool = False) -> None:
        """Start what takes as long as `count` requests, now or when it is its client's turn. Needs a running event
        loop. `discards`: whether the work only discards bytes; it then comes after other work.
        """
        self._schedule_iteration()
        waiting = self._discards if discards else self._small if count <= SMALL_MOST else self._large
        if self._started >= self._most or (waiting if waiting is self._small else self._is_left()):
            waiting.setdefault(client, deque()).append((start, count))
        else:
            self._started += count
            start()

    async def turn(self, client: str, nbytes: int) -> None:
        """Wait until a request with this many bytes may be handled: at once, unless many are complete together."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.add(client, partial(_give, turn), 1 + nbytes // BYTES_OF_ONE)
        await turn

    def spend(self, count: int) -> None:
        """Record that this iteration did work that takes as long as `count` requests."""
        if count:
            self._schedule_iteration()
            self._started += count

    def _schedule_iteration(self) -> None:
        """Schedule the next iteration, which sets the count to 0, unless that is already scheduled."""
        if not (self._started or self._is_left()):
            asyncio.get_running_loop().call_soon(self._begin_iteration)

    def _begin_iteration(self) -> None:
        self._started = 0
        if self._is_left():
            time.sleep(YIELD_S)
        try:
            for waiting in (self._small, self._large, self._discards):
                # At least one of each kind, so that none waits without end.
                is_first = True
                while waiting and (is_first or self._started < self._most):
                    is_first = False
                    self._start_next(waiting)
        finally:
            if self._started:
                asyncio.get_running_loop().call_soon(self._begin_iteration)

    def _start_next(self, waiting: _Clients) -> None:
        client = next(iter(waiting))
        queue = waiting.pop(client)
        start, count = queue.popleft()
        if queue:
            waiting[client] = queue
        self._started += count
        start()

    def _is_left(self) -> bool:
        return bool(self._small or self._large or self._discards)


def _give(turn: asyncio.Future[None]) -> None:
    """Let a request go on, unless it was cancelled meanwhile."""
    if not turn.done():
        turn.set_result(None)

"""A lock that is passed among waiting clients in rotation: besides the turn in progress, none waits for more than one
turn of each other client.

A tenant that requests a thousand measurements or changes delays the others by the one in progress and one more.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairLock:
    """A lock that is passed among clients in rotation, and among the waiters of a client in order."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """The waiters by client, in the order in which the clients get the lock."""

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Wait for the turn, and keep it until the context ends."""
        if self._taken:
            await self._wait(client)
        self._taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, client: str) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                # The lock was passed to this waiter, which was cancelled before it ran.
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            client = next(iter(self._waiting))
            own = self._waiting.pop(client)
            # A cancelled waiter does not cost its client the turn.
            while own and own[0].done():
                own.popleft()
            if own:
                # The turn stays taken until the waiter's context ends.
                own.popleft().set_result(None)
                if own:
                    self._waiting[client] = own
                return
        self._taken = False

"""Drains the API at shutdown: accepted requests are answered within a time bound, later ones are refused."""

import asyncio
from contextlib import suppress


class Drain:
    """Counts open requests, and records whether a drain has begun, during which `RequestMiddleware` refuses new ones,
    except for operations that never need a token. Used on the event loop's thread only.
    """

    def __init__(self, longest_s: float) -> None:
        """`longest_s`: the maximum time for accepted requests."""
        self.longest_s = longest_s
        self.begun = False
        self.in_progress = 0
        """The requests that are not answered yet."""
        self._over = asyncio.Event()

    def enter(self) -> None:
        """Count a request that arrived."""
        self.in_progress += 1

    def leave(self) -> None:
        """Stop counting a request that ended."""
        self.in_progress -= 1
        if self.begun and not self.in_progress:
            self._over.set()

    def end_now(self) -> None:
        """End the wait now."""
        self._over.set()

    async def finish(self) -> bool:
        """Accept no more requests, and wait for those accepted; return whether all were answered in time."""
        self.begun = True
        if self.in_progress:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), self.longest_s)
        return not self.in_progress

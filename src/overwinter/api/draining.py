"""How does a node stop answering? What it has accepted is answered, within a bound; what comes after is refused."""

import asyncio
from contextlib import suppress


class Drain:
    """Which requests are under way, and whether more are accepted. Belongs to the loop's thread."""

    def __init__(self, longest_s: float) -> None:
        """`longest_s`: how long what was accepted may take."""
        self.longest_s = longest_s
        self.begun = False
        """Whether nothing more is accepted."""
        self.under_way = 0
        """Requests that came and are not answered yet."""
        self._over = asyncio.Event()

    def enter(self) -> None:
        """A request came."""
        self.under_way += 1

    def leave(self) -> None:
        """A request is over."""
        self.under_way -= 1
        if self.begun and not self.under_way:
            self._over.set()

    def hurry(self) -> None:
        """End the wait now."""
        self._over.set()

    async def finish(self) -> bool:
        """Accept nothing more, and wait for what was accepted; whether all of it was answered in time."""
        self.begun = True
        if self.under_way:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), self.longest_s)
        return not self.under_way

"""Shares one answer among all callers that ask while it is made, so that expensive answers are made one at a time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class SingleFlight(Generic[Answer]):
    """Each caller gets an answer that was begun after it asked. Used on the loop's thread only."""

    def __init__(self, make: Callable[[], Awaitable[Answer]]) -> None:
        self._make = make
        self._one_at_a_time = asyncio.Lock()
        self._begun = self._asking = 0
        self._last: tuple[int, Answer] | None = None
        """The newest answer and its number, as long as a caller may share it."""

    async def get(self) -> Answer:
        """Return the answer, or raise the exception of computing it. A cancelled caller does not cancel it for the
        others.
        """
        before = self._begun
        self._asking += 1
        try:
            async with self._one_at_a_time:
                if self._last is None or self._last[0] <= before:
                    self._begun += 1
                    self._last = self._begun, await self._make()
                return self._last[1]
        finally:
            self._asking -= 1
            if not self._asking:
                self._last = None

"""Computes one answer at a time. All callers that ask during a computation share the next one, unless that fails. So no
answer is older than its request. Unlike Go's singleflight, a computation in progress is not shared.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Generic, TypeVar

Answer = TypeVar("Answer")


class SingleFlight(Generic[Answer]):
    """Each caller gets an answer that was begun after it asked. Used on the event loop's thread only."""

    def __init__(self, make: Callable[[], Awaitable[Answer]]) -> None:
        self._make = make
        self._one_at_a_time = asyncio.Lock()
        self._begun = self._asking = 0
        self._last: tuple[int, Answer] | None = None
        """The newest answer and its number, as long as a caller may share it."""

    @property
    def asked(self) -> bool:
        """Whether a caller waits for an answer."""
        return self._asking > 0

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


class SingleFlights:
    """One SingleFlight for each key, which exists while a caller asks."""

    def __init__(self) -> None:
        self._flights: dict[Hashable, SingleFlight[Any]] = {}

    async def get(self, key: Hashable, make: Callable[[], Awaitable[Answer]]) -> Answer:
        """Return the answer, or raise the exception of computing it. For one key any `make` must do the same."""
        flight: SingleFlight[Answer] | None = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = SingleFlight(make)
        try:
            return await flight.get()
        finally:
            if not flight.asked:
                self._flights.pop(key, None)

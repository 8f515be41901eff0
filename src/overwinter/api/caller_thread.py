"""Runs long work of callers in one thread, in their turns. Several threads would delay the event loop more."""

import asyncio
from collections.abc import Callable, Hashable
from typing import TypeVar
from weakref import WeakValueDictionary

from overwinter.node.threads import Threads

T = TypeVar("T")


class CallerThread:
    """All work of one kind."""

    def __init__(self, name: str) -> None:
        self._thread = Threads(1, name)
        self._callers: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()
        """A lock for each caller with work. The thread's queue contains at most one piece of work of each."""

    async def run(self, caller: Hashable, work: Callable[[], T]) -> T:
        """Run work of this caller when it is its turn; work that is cancelled before does not run."""
        async with self._callers.setdefault(caller, asyncio.Lock()):
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)

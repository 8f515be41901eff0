"""Runs long work of callers in one thread. The callers take turns, and so do the tenants for which one caller acts,
within its turns.

Several threads would delay the event loop more.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakValueDictionary

from overwinter.core.ids import TenantId
from overwinter.node.threads import Threads

T = TypeVar("T")


class CallerThread:
    """A thread for all work of one kind."""

    def __init__(self, name: str) -> None:
        self._thread = Threads(1, name)
        self._locks: WeakValueDictionary[tuple[str, ...], asyncio.Lock] = WeakValueDictionary()
        """A lock for each caller with work, and for each tenant for which it acts. The thread's queue contains at most
        one piece of work of each caller.
        """

    async def run(self, caller: str, tenant: TenantId, work: Callable[[], T]) -> T:
        """Run work of this caller when it is its turn; work that is cancelled before does not run."""
        async with self._lock(caller, tenant), self._lock(caller):
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _lock(self, *key: str) -> asyncio.Lock:
        return self._locks.setdefault(key, asyncio.Lock())

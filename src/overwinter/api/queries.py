"""Runs queries of the disk in one thread, in turns: each caller has one for each tenant for which it acts.

Uploads have other threads. More threads would make no query faster, because the catalog answers one at a time.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakValueDictionary

from overwinter.core.ids import TenantId
from overwinter.node.threads import Threads

T = TypeVar("T")


class Queries:
    """All queries in progress."""

    def __init__(self) -> None:
        self._thread = Threads(1, "api-queries")
        self._callers: WeakValueDictionary[tuple[TenantId, str], asyncio.Lock] = WeakValueDictionary()
        """A lock for each tenant and caller with queries. The thread's queue contains at most one query of each."""

    async def run(self, tenant: TenantId, caller: str, query: Callable[[], T]) -> T:
        """Run a query of this caller when it is its turn; one that is cancelled before does not run."""
        async with self._callers.setdefault((tenant, caller), asyncio.Lock()):
            return await asyncio.get_running_loop().run_in_executor(self._thread, query)

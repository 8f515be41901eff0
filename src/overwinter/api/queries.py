"""Runs queries of the disk in one thread, in turns of the clients: each tenant at each address is one.

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
        self._clients: WeakValueDictionary[tuple[TenantId, str], asyncio.Lock] = WeakValueDictionary()
        """A lock for each tenant and address with queries. The thread's queue contains at most one query of each."""

    async def run(self, tenant: TenantId, address: str, query: Callable[[], T]) -> T:
        """Run a query of this client when it is its turn; one that is cancelled before does not run."""
        async with self._clients.setdefault((tenant, address), asyncio.Lock()):
            return await asyncio.get_running_loop().run_in_executor(self._thread, query)

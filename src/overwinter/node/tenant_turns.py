"""Decides whose work is next, where only one may be in progress: tenants take turns.

So a tenant that requests a thousand measurements or changes delays the others by at most one of them.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from overwinter.core.ids import TenantId


class TenantTurns:
    """A lock that is passed among tenants in rotation, and among the waiters of a tenant in order."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: dict[TenantId, deque[asyncio.Future[None]]] = {}
        """The waiters by tenant, the tenant whose turn is longest ago first."""

    @asynccontextmanager
    async def turn(self, tenant: TenantId) -> AsyncIterator[None]:
        """Wait for the turn, and keep it until the context ends."""
        if self._taken:
            await self._wait(tenant)
        self._taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, tenant: TenantId) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                # The turn was assigned to it, but it was cancelled.
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            tenant = next(iter(self._waiting))
            own = self._waiting.pop(tenant)
            waiter = own.popleft()
            if own:
                self._waiting[tenant] = own
            if not waiter.done():
                # The turn stays taken until the waiter's context ends.
                waiter.set_result(None)
                return
        self._taken = False

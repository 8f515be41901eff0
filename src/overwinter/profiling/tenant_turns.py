"""Decides whose measurement is next: one at a time, with tenants in rotation.

So a tenant with a thousand functions delays the others by at most one of its measurements.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from overwinter.core.ids import TenantId


class TenantTurns:
    """A lock that is passed among tenants in rotation, and among a tenant's measurements in order."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: dict[TenantId, deque[asyncio.Future[None]]] = {}
        """The waiting measurements by tenant, the tenant whose turn is longest ago first."""

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
                # The turn stays taken until that measurement is complete.
                waiter.set_result(None)
                return
        self._taken = False

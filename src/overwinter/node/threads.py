"""Starts all threads of the node before it serves, so that it works when the system allows no more threads."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar
from weakref import WeakValueDictionary

from overwinter.core.errors import MachineError
from overwinter.core.ids import TenantId

T = TypeVar("T")


class Threads(ThreadPoolExecutor):
    """A thread pool that starts all its threads when it is created, so that none is lacking later."""

    def __init__(self, number: int, name: str, begin: Callable[[], None] | None = None) -> None:
        """Start the threads; each calls `begin` first. Raises MachineError when the system does not allow so many
        threads.
        """
        super().__init__(number, name, begin)
        meeting = Barrier(number)
        try:
            # All calls wait for each other, so each starts a thread.
            for _ in range(number):
                self.submit(meeting.wait)
        except RuntimeError as error:
            meeting.abort()
            self.shutdown(wait=False)
            raise MachineError(
                f"the system lets this node start no more threads ({error}): raise the limit on its processes "
                "(ulimit -u, or pids.max of its control group)"
            ) from error


class SharedThreads:
    """Threads of which one tenant may use half, so that it cannot keep the work of other tenants waiting."""

    def __init__(self, number: int, name: str) -> None:
        """Start the threads. Raises MachineError as `Threads` does."""
        self._threads = Threads(number, name)
        self._most = max(1, number // 2)
        self._allowed: WeakValueDictionary[TenantId, asyncio.Semaphore] = WeakValueDictionary()
        """The semaphore of each tenant that uses a thread or waits for one."""

    async def run(self, tenant: TenantId, work: Callable[[], T]) -> T:
        """Run this in a thread, for a tenant, and return the result."""
        allowed = self._allowed.get(tenant)
        if allowed is None:
            allowed = self._allowed[tenant] = asyncio.Semaphore(self._most)
        async with allowed:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def default_count() -> int:
    """Return the number of threads that Python gives an event loop's default executor."""
    return min(32, (os.cpu_count() or 1) + 4)

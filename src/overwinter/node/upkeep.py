"""Maintenance of a running node: removes unneeded blocks from the disk, and reports the capacity of the host stores."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from concurrent.futures import Executor
from functools import partial

from overwinter.core.events import Event, HostCapacityMeasured
from overwinter.core.ids import Address
from overwinter.node import clock
from overwinter.node.faults import Faults
from overwinter.node.single_flight import SingleFlight
from overwinter.node.threads import Threads
from overwinter.store.collection import Collected
from overwinter.store.hosts import HostStores
from overwinter.store.repository import Repository

TMPFS_SHARE = 0.95
"""The part of a tmpfs that host stores may use, as a share of its free space and their own blocks together; other
programs need some space.
"""
CAPACITY_EVERY_S = 1.0
COLLECT_EVERY_S = 0.25
"""The shortest time between two periodic collections; uploads and deploys wait while one removes files."""
CAPACITY_STEP = 0.02
"""Smaller relative changes of the capacity are ignored."""


class UnneededBlocks:
    """Removes blocks from the disk that no function needs and no tenant has sent, asked about or deployed in the last
    `keep_s` seconds.

    One collection runs at a time, in a thread of its own, because it waits for the repository's lock. A removal waits
    only for the blocks of what it removed, because there may be millions of others.
    """

    def __init__(self, repository: Repository, keep_s: float) -> None:
        self._repository = repository
        self._keep_s = keep_s
        self._thread = Threads(1, "collection")
        self._removed: set[Address] = set()
        """The blocks of removed functions, for the next collection."""
        self._collected = SingleFlight(self._collect_removed)

    async def run(self, faults: Faults) -> None:
        """Remove them periodically, without end."""
        while True:
            await asyncio.sleep(max(self._keep_s / 2, COLLECT_EVERY_S))
            with faults.contained("unneeded blocks"):
                await self._collect(None)

    async def collect(self, removed: Iterable[Address]) -> Collected:
        """Remove those of these blocks that are unneeded now. Callers that ask during a collection share the next."""
        self._removed.update(removed)
        return await self._collected.get()

    def _collect_removed(self) -> Awaitable[Collected]:
        removed, self._removed = self._removed, set()
        return self._collect(removed)

    def _collect(self, only: Collection[Address] | None) -> Awaitable[Collected]:
        collect = partial(self._repository.collect, clock.wall(), self._keep_s, only)
        return asyncio.get_running_loop().run_in_executor(self._thread, collect)


async def watch_host_capacity(
    hosts: HostStores,
    thread: Executor,
    most_bytes: int | None,
    known_bytes: int | None,
    post: Callable[[Event], None],
    faults: Faults,
) -> None:
    """Periodically tell the scheduler when the capacity of the host stores changes. A tmpfs may be full when the node
    starts, and other programs may use or free its space at any time. `most_bytes` is the upper bound.
    """
    known = known_bytes or 0
    while True:
        await asyncio.sleep(CAPACITY_EVERY_S)
        capacity = None
        with faults.contained("free space on the tmpfs"):
            capacity = await asyncio.get_running_loop().run_in_executor(thread, hosts.capacity_bytes)
        if capacity is None:
            continue
        bound = int(capacity * TMPFS_SHARE)
        bound = bound if most_bytes is None else min(bound, most_bytes)
        if abs(bound - known) > CAPACITY_STEP * max(bound, known):
            known = bound
            post(HostCapacityMeasured(bound))

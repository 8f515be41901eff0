"""Periodic maintenance of a running node: removes unneeded blocks from the disk, and reports the size of the tmpfs."""

import asyncio
from collections.abc import Callable

from overwinter.core.events import Event, HostCapacityMeasured
from overwinter.node import clock
from overwinter.node.faults import Faults
from overwinter.store.hosts import HostStores
from overwinter.store.repository import Repository

TMPFS_SHARE = 0.95
"""The share of the free tmpfs that host stores may use; other programs need some space."""
CAPACITY_EVERY_S = 1.0
COLLECT_EVERY_S = 0.25
"""The shortest time between two collections; no uploads or deploys are possible during one."""
CAPACITY_STEP = 0.02
"""Smaller relative changes of the tmpfs's size are ignored."""


async def collect_unneeded(repository: Repository, keep_s: float, faults: Faults) -> None:
    """Periodically remove blocks that no function has needed for `keep_s`."""
    while True:
        await asyncio.sleep(max(keep_s / 2, COLLECT_EVERY_S))
        with faults.contained("unneeded blocks"):
            await asyncio.to_thread(repository.collect, clock.wall(), keep_s)


async def watch_host_capacity(
    hosts: HostStores, most_bytes: int | None, known_bytes: int | None, post: Callable[[Event], None], faults: Faults
) -> None:
    """Periodically tell the scheduler when the capacity of the host stores changes. A tmpfs may be full when the node
    starts, and other programs may use or free its space at any time. `most_bytes` is the upper bound.
    """
    known = known_bytes or 0
    while True:
        await asyncio.sleep(CAPACITY_EVERY_S)
        capacity = None
        with faults.contained("free space on the tmpfs"):
            capacity = await asyncio.to_thread(hosts.capacity_bytes)
        if capacity is None:
            continue
        bound = int(capacity * TMPFS_SHARE)
        bound = bound if most_bytes is None else min(bound, most_bytes)
        if abs(bound - known) > CAPACITY_STEP * max(bound, known):
            known = bound
            post(HostCapacityMeasured(bound))

"""The parts on which the rest of a node is built."""

from collections.abc import Callable
from concurrent.futures import Executor
from typing import NamedTuple

from overwinter.core.config import NodeConfig
from overwinter.core.events import Event
from overwinter.node.calls import Calls
from overwinter.node.faults import Faults
from overwinter.node.log import Log
from overwinter.node.pool_calls import PoolCalls
from overwinter.node.processes import Processes
from overwinter.node.registry import Registry
from overwinter.node.upkeep import UnneededBlocks
from overwinter.scheduler.published import Published
from overwinter.store.hosts import HostStores
from overwinter.store.repository import Repository


class Parts(NamedTuple):
    """The parts of a node, which are created at its start."""

    config: NodeConfig
    """The configuration, with default limits filled in."""
    log: Log
    faults: Faults
    repository: Repository
    hosts: HostStores
    published: Published
    post: Callable[[Event], None]
    """Passes an event to the scheduler."""
    registry: Registry
    processes: Processes
    calls: Calls
    pool_calls: PoolCalls
    unneeded: UnneededBlocks
    upkeep: Executor
    """The thread for work that keeps workers and stores within their bounds. Work for requests never runs there."""

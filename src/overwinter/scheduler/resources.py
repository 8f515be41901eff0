"""The resources of a node, and the claims of each kind of operation."""

from collections.abc import Iterator
from itertools import chain

from overwinter.core.config import WORKERS_MOST, SchedulerConfig
from overwinter.core.ids import DeviceId, OperationId, RequestId, RunId, StoreName, WorkerId
from overwinter.core.policies import Policy
from overwinter.core.profile import Point
from overwinter.scheduler.ledger import Claim, Resource

OperationOwner = tuple[str, int]
"""A worker, a request or an operation in progress as an owner of claims: its kind and its id."""


class Resources:
    """The scarce resources of one node."""

    def __init__(self, config: SchedulerConfig, policy: Policy) -> None:
        cores = config.cores or 1
        self.requests = Resource("requests", config.requests_max)
        """Open requests."""
        self.cores = Resource("cores", cores, alone=True)
        """The cores of operations that claim them (`of_cores`). If a run needs more cores than the machine has, it runs
        alone.
        """
        self.load = Resource("load")
        """The cores of all runs, binds and starts in progress. It is unlimited, but decisions use it."""
        self.workers = Resource("workers", config.workers_max or WORKERS_MOST)
        self.memory = Resource("memory", config.memory_bytes)
        """The private bytes of all workers and processes forked ahead."""
        self.runs = Resource("runs at once", config.runs_max, alone=True)
        """The sum of the concurrencies of workers and processes forked ahead, idle ones included: each concurrent run
        needs file descriptors of the node and a thread.
        """
        self.reserved = Resource("reserved cores", cores if policy.reserves else None, alone=True)
        """The cores of all workers that are not stopping, idle ones included; limited under the policies that reserve
        them.
        """
        self.host = Resource("host", config.host_bytes)
        """The bytes of all host stores together, including blocks that are being loaded."""
        self.device_bytes = {each.name: Resource(f"bytes of {each.name}", each.memory_bytes) for each in config.devices}
        """The memory of each device."""
        self.device_time = {each.name: Resource(f"time of {each.name}", 1) for each in config.devices}
        """The time of each device: it has one run at a time."""
        self.of_request: Claim = {self.requests: 1}
        """The claim of an open request."""

    def __iter__(self) -> Iterator[Resource]:
        named = (each for each in vars(self).values() if isinstance(each, Resource))
        return chain(named, self.device_bytes.values(), self.device_time.values())

    def of_worker(self, point: Point, nbytes: int) -> Claim:
        """The claim of a worker of this configuration from its start until its exit; of `reserved` until its stop."""
        return {self.workers: 1, self.memory: nbytes, self.runs: point.concurrency, self.reserved: point.cores}

    def of_start(self, point: Point) -> Claim:
        """Return the claim of a new worker of this configuration."""
        return self.of_worker(point, point.memory_bytes)

    def of_bind(self, nbytes: int) -> Claim:
        """Return the claim of a bind on memory: the private memory that it adds to its worker. It also claims a core
        (`of_cores`) and one of the worker's concurrent runs.
        """
        return {self.memory: nbytes}

    def of_cores(self, cores: int, holds: bool) -> Claim:
        """The claim of a run, a bind or a start until it ends. `holds`: whether it holds its cores. Not if the kernel
        shares the cores among all (`Cycle.orders_cores` is false); not if it runs user code or is overdue, because it
        may wait for something other than a core; and not if it is for a trial or a load.
        """
        return {self.cores: cores, self.load: cores} if holds else {self.load: cores}


def worker_owner(id_: WorkerId) -> OperationOwner:
    """The name of a worker in the ledger."""
    return "worker", id_


def start_owner(id_: WorkerId) -> OperationOwner:
    """The name of a worker's start in the ledger."""
    return "start", id_


def run_owner(id_: RunId) -> OperationOwner:
    """The name of a run in the ledger."""
    return "run", id_


def bind_owner(id_: OperationId) -> OperationOwner:
    """The name of a bind in the ledger."""
    return "bind", id_


def request_owner(id_: RequestId) -> OperationOwner:
    """The name of a request in the ledger."""
    return "request", id_


def store_owner(name: StoreName) -> tuple[str, StoreName]:
    """The name of a host store in the ledger."""
    return "store", name


def device_owner(name: DeviceId) -> tuple[str, DeviceId]:
    """The name of the blocks on a device in the ledger."""
    return "device", name

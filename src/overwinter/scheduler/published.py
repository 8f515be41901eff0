"""The data of a scheduler that other parts may read. Each answer is computed when it is requested, and does not change.

The tables change with every event, so no other part reads them: a reader on the loop's thread gets a copy of the few
facts that it needs. Other threads read only `has_spare_core`, which the loop writes.
"""

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import NamedTuple

from overwinter.core.ids import (
    Address,
    FunctionId,
    FunctionName,
    Seconds,
    StoreName,
    TenantId,
    WorkerId,
    is_part,
)
from overwinter.core.versions import Versions
from overwinter.scheduler.cycle import Cycle
from overwinter.scheduler.details import FunctionDetail, detail
from overwinter.scheduler.order import has_spare_core
from overwinter.scheduler.snapshot import (
    DeviceSnapshot,
    FamilySnapshot,
    FunctionSnapshot,
    Snapshot,
    device_snapshots,
    family_name,
    family_snapshot,
    function_snapshot,
    snapshot,
)
from overwinter.scheduler.state import Function


class StoreBlocks(NamedTuple):
    """The blocks of a host store."""

    held: Mapping[Address, int]
    """The bytes of each block, including those that are being loaded."""
    settled: bool
    """Whether no block is being loaded."""


NO_BLOCKS = StoreBlocks({}, settled=True)


class ProfiledMemory(NamedTuple):
    """The function of a worker, and the memory in its profile."""

    function: FunctionId
    """The function for which it was forked."""
    profiled_bytes: int | None
    """The memory in the profile of that function; None: the function was removed, its profile lacks the configuration
    of the worker, or that was measured again after the worker's start.
    """


class Published:
    """The readable facts of a scheduler. Used on the loop's thread only, except `has_spare_core`."""

    def __init__(self, cycle: Cycle) -> None:
        self._cycle = cycle
        self._state = cycle.state
        self.has_spare_core = has_spare_core(cycle)
        """Whether no function waits for a core or capacity for a worker, and either no core is busy or at least two are
        free, as of the last steps; any thread may read it.
        """

    def publish(self) -> None:
        """Update the value that other threads read."""
        self.has_spare_core = has_spare_core(self._cycle)

    # Functions

    def default(self, name: FunctionName) -> int | None:
        """Return the default version of a name; None if there is none."""
        known = None if is_part(name) else self._state.versions.get(name)
        return known.default if known is not None and known.numbers else None

    def versions(self, name: FunctionName) -> Versions:
        """Return the versions of a name that passed their trial."""
        known = None if is_part(name) else self._state.versions.get(name)
        return Versions() if known is None else Versions(list(known.numbers), known.shares)

    def function(self, id_: FunctionId, now: Seconds) -> FunctionSnapshot | None:
        """Return one version of a function."""
        function = self._state.functions.get(id_)
        return None if function is None else function_snapshot(self._state, function, now)

    def detail(self, id_: FunctionId, now: Seconds) -> FunctionDetail | None:
        """Return all that is known of one version."""
        function = self._state.functions.get(id_)
        return None if function is None else detail(self._cycle, function, self.versions(function.spec.name), now)

    def family(self, id_: FunctionId) -> FamilySnapshot | None:
        """Return a function's family."""
        function = self._state.functions.get(id_)
        return None if function is None else family_snapshot(function)

    def families(self, tenant: TenantId | None = None) -> dict[tuple[TenantId, FunctionName], FunctionId]:
        """Return the family of the last deployed version of each function, of all tenants or of one."""
        functions = self._state.functions.values() if tenant is None else self._of(tenant)
        return {
            (each.spec.tenant, each.spec.name): family_name(each.family)
            for each in functions
            if not is_part(each.spec.name)
        }

    def functions_of(self, tenant: TenantId) -> list[FunctionId]:
        """Return all functions of a tenant, and their parts."""
        known = self._state.tenants.get(tenant)
        return [] if known is None else list(known.functions)

    def held(self, tenant: TenantId, store: StoreName, addresses: Iterable[Address]) -> set[Address]:
        """Return those of these blocks that a function of the tenant has in this host store, or loads into it."""
        known = self._state.tenants.get(tenant)
        return set() if known is None else {address for address in addresses if (store, address) in known.held}

    def _of(self, tenant: TenantId) -> list[Function]:
        known = self._state.tenants.get(tenant)
        return [] if known is None else [self._state.functions[id_] for id_ in known.functions]

    # The node

    def snapshot(self, now: Seconds, tenant: TenantId | None = None) -> Generator[None, None, Snapshot]:
        """Return a snapshot of everything in steps; with `tenant`, without the functions of others."""
        return snapshot(self._state, self._cycle.resources, now, tenant)

    def totals(self) -> str:
        """How much of the host stores and of the workers' memory is taken, in words: for the administrator alone."""
        host, memory = self._cycle.resources.host, self._cycle.resources.memory
        pinned = sum(each.nbytes for each in self._state.pinned.values())
        return (
            f"the host stores have {host.taken} of {host.capacity} bytes, {pinned} of them pinned; "
            f"workers have {memory.taken} of {memory.capacity} bytes"
        )

    def busy(self) -> bool:
        """Whether any worker or device has an operation in progress, or a worker is stopping."""
        devices = self._state.pool.devices.values()
        return not all(each.is_idle for each in self._state.workers.values()) or any(each.operation for each in devices)

    def devices(self, now: Seconds) -> Sequence[DeviceSnapshot]:
        """Return the devices of the pool."""
        return device_snapshots(self._state, now)

    def expected_bytes(self) -> dict[WorkerId, int]:
        """Return the memory of each worker, as the scheduler estimates it."""
        return {id_: worker.expected_bytes for id_, worker in self._state.workers.items()}

    def profiled_memory(self) -> dict[WorkerId, ProfiledMemory]:
        """Return for each worker its function, and the memory in its profile."""
        found = {}
        for id_, worker in self._state.workers.items():
            function = self._state.functions.get(worker.function)
            profiled = function is not None and worker.point in function.latency.points
            found[id_] = ProfiledMemory(worker.function, worker.point.memory_bytes if profiled else None)
        return found

    def stores(self) -> dict[StoreName, StoreBlocks]:
        """Return the blocks of each host store."""
        loading = {each.spec.store for each in self._state.functions.values() if each.loading is not None}
        return {
            name: StoreBlocks(dict(blocks.sizes), name not in loading) for name, blocks in self._state.stores.items()
        }

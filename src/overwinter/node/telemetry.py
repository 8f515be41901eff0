"""Joins the telemetry of a node: its reader of steps, the meter, the accounting, and the answers made from them."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import msgspec

from overwinter.core.errors import NotFoundError
from overwinter.core.ids import Address, FunctionId, FunctionName, Seconds, TenantId
from overwinter.node import clock
from overwinter.node.accounting import Accounting
from overwinter.node.fair_lock import FairLock
from overwinter.node.functions import DeployedFunction
from overwinter.node.overuse import OveruseCheck
from overwinter.node.parts import Parts
from overwinter.node.pipelines import Pipelines
from overwinter.node.recent_output import OutputLine
from overwinter.node.single_flight import SingleFlights
from overwinter.node.threads import Threads
from overwinter.node.views import TenantBlocks
from overwinter.scheduler.snapshot import Snapshot
from overwinter.store.repository import Repository
from overwinter.store.usage import UsageFile
from overwinter.telemetry.activity import NodeActivity, activity
from overwinter.telemetry.devices import DeviceActivity, devices_activity
from overwinter.telemetry.explaining import Explanation, Times, explanation, tiers_of
from overwinter.telemetry.metering import Key, Meter, Usage
from overwinter.telemetry.metrics import render
from overwinter.telemetry.sources import Sources
from overwinter.telemetry.statistics import ServiceObserver, Statistics

FindFunction = Callable[[FunctionName, int | None], DeployedFunction]
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

USAGE_FILE = "usage.sqlite"
FLUSH_S = 60.0
"""The time between two writes of usage. A crash loses the usage since the last successful write."""


class _Disk:
    """The repository as a place of blocks."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository

    def holds(self, address: Address) -> bool:
        return self._repository.holds(address)


class Telemetry:
    """The telemetry of a node. Used on the event loop's thread only; slow work runs in other threads."""

    def __init__(self, parts: Parts, pipelines: Pipelines, find: FindFunction, observer: ServiceObserver) -> None:
        """`find` returns one version of a function, or its default version; it may raise NotFoundError."""
        self._parts = parts
        self._pipelines = pipelines
        self._find = find
        self.statistics = Statistics(observer)
        self._accounting = Accounting(parts.published, parts.hosts, parts.processes, self.statistics, parts.log)
        self._sources = Sources(
            parts.config.scheduler,
            self.statistics,
            self._accounting.accounts,
            parts.hosts.verification,
            parts.faults.counts,
        )
        self._overuse = OveruseCheck(self.statistics, parts.processes, parts.upkeep, parts.post, parts.log)
        self._usage_file = UsageFile(Path(parts.config.data) / USAGE_FILE)
        self._meter = Meter(self.statistics, self._usage_file, parts.log)
        self._tasks: list[asyncio.Task[None]] = []
        self._thread = Threads(1, "telemetry")
        self._flights = SingleFlights()
        self._explaining = FairLock()

    def begin(self, tasks: asyncio.TaskGroup) -> None:
        """Periodically write usage, compare counts of bytes, and check for overuse, until `stop` is called."""
        accounting = self._accounting.run(self._parts.config.accounting_s, self._parts.faults)
        self._tasks += [tasks.create_task(self._flush()), tasks.create_task(accounting)]
        self._tasks.append(tasks.create_task(self._overuse.run(self._parts.faults)))

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            with self._parts.faults.contained("usage"):
                await asyncio.to_thread(self._meter.flush, clock.now(), clock.wall())

    def stop(self) -> None:
        """Stop the periodic work, because the checked processes are to be closed."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Write what is not written yet; call `stop` first."""
        # A write that a thread has begun is completed first.
        await asyncio.to_thread(self._meter.flush, clock.now(), clock.wall())
        self._usage_file.close()
        self._thread.shutdown(wait=False)

    async def shared(self, key: Hashable, make: Callable[[], Awaitable[T]]) -> T:
        """Return what `make` returns. All callers with the same key that ask during a computation share the next."""
        return await self._flights.get(key, make)

    async def in_thread(self, work: Callable[[*Ts], T], *args: *Ts) -> T:
        """Do slow work in the only thread of telemetry. Several threads that hold the GIL would delay the loop more,
        and other work would wait for a free thread.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def metrics(self, tenant: TenantId | None = None) -> bytes:
        """Return all metrics, in Prometheus's text format; with `tenant`, of functions and pipelines only its own."""
        return await self.shared(("metrics", tenant), partial(self._render, tenant))

    async def _render(self, tenant: TenantId | None) -> bytes:
        known, pipelines = await self._snapshot(tenant), self._pipelines.statistics(tenant)
        return await self.in_thread(render, self._sources, known, pipelines, clock.now(), tenant)

    async def usage(self, tenant: TenantId | None) -> list[Usage]:
        """What each function used, of all tenants or of one."""
        return await self.shared(("usage", tenant), partial(self._compute_usage, tenant))

    async def _compute_usage(self, tenant: TenantId | None) -> list[Usage]:
        families = self._parts.published.families(tenant)
        return await self.in_thread(self._used, tenant, families, clock.now(), clock.wall())

    def _used(
        self, tenant: TenantId | None, families: Mapping[Key, FunctionId], now: Seconds, wall: float
    ) -> list[Usage]:
        used = self._meter.usage(tenant, now, wall)
        return [msgspec.structs.replace(each, family=families.get((each.tenant, each.function))) for each in used]

    async def activity(self, tenant: TenantId | None = None) -> NodeActivity:
        """Return the current activity; with `tenant`, of functions only its own."""
        return await self.shared(("activity", tenant), partial(self._compute_activity, tenant))

    async def _compute_activity(self, tenant: TenantId | None) -> NodeActivity:
        known = await self._snapshot(tenant)
        return await self.in_thread(activity, self._sources, known, clock.now())

    async def devices(self) -> list[DeviceActivity]:
        """Return the devices of the pool, with the functions whose blocks are on them."""
        return await self.shared("devices", self._describe_devices)

    async def _describe_devices(self) -> list[DeviceActivity]:
        now = clock.now()
        return devices_activity(self._sources, self._parts.published.devices(now), now)

    async def _snapshot(self, tenant: TenantId | None) -> Snapshot:
        """Take a snapshot of the scheduler's data; the loop runs between its steps."""
        steps = self._parts.published.snapshot(clock.now(), tenant)
        while True:
            try:
                next(steps)
            except StopIteration as taken:
                known: Snapshot = taken.value
                return known
            await asyncio.sleep(0)

    async def logs(self, name: FunctionName, version: int | None) -> list[OutputLine]:
        """Return the last output of a function's code; raise NotFoundError."""
        output = self._find(name, version).recent_output
        return [] if output is None else output.lines()

    async def explain(self, name: FunctionName, version: int | None) -> Explanation:
        """Explain the state of a function; raise NotFoundError."""
        # A tenant may have thousands of functions, each with thousands of blocks.
        async with self._explaining.turn(self._find(name, version).manifest.tenant):
            return await self._explain(self._find(name, version))

    async def _explain(self, function: DeployedFunction) -> Explanation:
        # The statistics read a step soon after the scheduler, so those of a function deployed in this iteration of the
        # loop are complete in the next.
        await asyncio.sleep(0)
        parts, times = self._parts, Times(clock.now(), clock.wall())
        places = _Disk(parts.repository), TenantBlocks(function, parts.published, parts.hosts)
        known = parts.published.detail(function.id, times.now)
        if known is None or function.id not in self.statistics.versions:
            raise NotFoundError(f"function {function.id!r} is being deployed or removed")
        explained = explanation(self._sources, known, parts.processes.worker_pids(), times)
        functions = parts.published.functions_of(function.manifest.tenant)
        parts_of = [part.spec() for part in function.parts()]
        tiers = await self.in_thread(tiers_of, self._sources, parts_of, functions, places)
        return msgspec.structs.replace(explained, tiers=tiers)

"""Meters usage by function, for billing.

A core has two prices: the full price for the time of runs and binds, and a tenth of it for the time in which a worker
was alive and idle, as in Torpor. What a worker computes beyond that has the full price. A device has two prices too: a
function of the pool pays the full one for the time of its runs, and a tenth of it for the time in the host store
without a run.

A worker that was started to try a version is not billed to its function until it serves a request of that function.
Memory is counted in byte-seconds for each tier; the sharers of a block pay equal parts of it. Usage is written to its
file once a minute and at a clean stop: a crash loses the usage since the last write.
"""

import threading
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec

from overwinter.core.errors import MachineError
from overwinter.core.ids import FunctionId, FunctionName, Seconds, TenantId, whole_name
from overwinter.store.usage import Amounts, UsageFile
from overwinter.telemetry.in_progress import LiveWorker
from overwinter.telemetry.pool import TrackedPool
from overwinter.telemetry.statistics import FunctionStatistics, Statistics

IDLE_PRICE = 0.1
"""The price of an idle core, as a share of the price of a core that runs something."""

IDLE_DEVICE_PRICE = 0.1
"""The price of a function of the pool that is in the host store and does not run, as a share of the price of a device
(Torpor, section 8).
"""

Key = tuple[TenantId, FunctionName]


class DeviceUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The usage of the pool by a function, in milliseconds of a device."""

    device_ms: float
    """The run time on devices, with the time of the transfers for which it waited."""
    idle_ms: float
    """The time in the host store without a run on a device."""
    billed_ms: float
    """The price in milliseconds of a whole device: the sum of both, with idle time at a tenth."""
    moved_bytes: int | None
    """The bytes that were transferred to devices for its runs; None for a tenant, because with executors that all
    tenants share it would reveal the blocks of other tenants.
    """
    device_byte_s: float | None
    """Its part of the blocks on devices, over time; None for a tenant."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The usage of a tenant's function, for people and programs."""

    tenant: TenantId
    function: FunctionName
    """Empty: the sum of the tenant's removed functions, except the 1000 with the most recent usage."""
    since: str
    """The first day with usage, in UTC. Bytes on disk are usage, too."""
    requests: int
    """The answered requests."""
    core_ms: float
    """The time of its runs and binds on each of their cores, and what its workers computed beyond that."""
    idle_core_ms: float
    """The time of cores of workers that were alive and ran nothing."""
    billed_core_ms: float
    """The sum of both, with idle cores at a tenth."""
    disk_byte_s: float | None
    """Its part of the blocks in the repository, over time; None for a tenant, because it would reveal the blocks of
    other tenants.
    """
    host_byte_s: float | None
    """Its part of the blocks in host stores, over time; None for a tenant."""
    private_byte_s: float
    """Its part of the private memory of its workers, over time."""
    family: FunctionId | None = None
    """The first of the functions with which it may share workers, whose idle cores and memory are split among them;
    itself if it shares with none, None if it is not deployed.
    """
    device: DeviceUsage | None = None
    """None: it has used nothing of the pool."""


class Meter:
    """Converts statistics to entries of the usage file. `flush` and `usage` are slow: call them in a thread."""

    def __init__(self, statistics: Statistics, file: UsageFile, log: Callable[[str], None]) -> None:
        self._statistics = statistics
        self._file = file
        self._log = log
        self._lock = threading.Lock()
        self._written: dict[FunctionStatistics, Amounts] = {}
        self._failing = False

    def flush(self, now: Seconds, wall: float) -> None:
        """Write the usage since the last call; what cannot be written is kept for the next."""
        day = datetime.fromtimestamp(wall, UTC).date().isoformat()
        with self._lock:
            # A removed function has no further usage once its last worker has ended, no worker of its family has it
            # bound, and no device holds its blocks.
            bound = {tally for live in list(self._statistics.workers.values()) for tally in list(live.bound.values())}
            gone = [
                tally
                for tally in self._statistics.removed_tallies
                if not (tally.workers or tally.devices_with_blocks or tally in bound)
            ]
            totals = self._totals(now, None)
            try:
                # The first call also merges removed functions that an earlier process of the node left in the file.
                if gone or not self._written:
                    self._file.merge_removed(list(self._statistics.tallies))
                self._file.add(day, self._unwritten(totals))
            except MachineError as error:
                if not self._failing:
                    self._log(f"usage is kept in memory until it can be written: {error}")
                self._failing = True
                return
            self._failing = False
            for tally in gone:
                self._statistics.removed_tallies.remove(tally)
            self._written = {tally: total for tally, total in totals.items() if tally not in gone}

    def usage(self, tenant: TenantId | None, now: Seconds, wall: float) -> list[Usage]:
        """Return the usage of each function, of all tenants or of one, since the file was created."""
        today = datetime.fromtimestamp(wall, UTC).date().isoformat()
        with self._lock:
            entries, unwritten = self._file.entries(tenant), self._unwritten(self._totals(now, tenant))
        used = {(owner, name): (since, amounts) for since, owner, name, amounts in entries}
        for key, amounts in unwritten.items():
            since, written = used.get(key, (today, Amounts()))
            used[key] = since, written.plus(amounts)
        return [_usage_of(key, since, amounts) for key, (since, amounts) in sorted(used.items())]

    def _unwritten(self, totals: dict[FunctionStatistics, Amounts]) -> dict[Key, Amounts]:
        used: defaultdict[Key, Amounts] = defaultdict(Amounts)
        for tally, total in totals.items():
            assert tally.tenant is not None
            key = tally.tenant, tally.name
            used[key] = used[key].plus(total.plus(self._written.get(tally, Amounts()), -1))
        return {key: amounts for key, amounts in used.items() if amounts != Amounts()}

    def _totals(self, now: Seconds, tenant: TenantId | None) -> dict[FunctionStatistics, Amounts]:
        """Return the usage of each function, of all tenants or of one, since the node started, including runs in
        progress. The event loop continues meanwhile, so a figure may lack a change; the next flush adds it.
        """
        seen = self._statistics
        known = [*list(seen.tallies.values()), *list(seen.removed_tallies)]
        totals = {tally: _ended(tally) for tally in known if tenant in (None, tally.tenant)}
        for worker in list(seen.workers.values()):
            _add_worker(totals, worker, now)
        _add_devices(totals, seen.pool, now)
        for spec in list(seen.specs.values()):
            tally = seen.tallies.get(whole_name(spec.name))
            if tally in totals:
                host = seen.stores.get(spec.store)
                host_byte_s = 0.0 if host is None else host.uncharged(spec.id, now)
                totals[tally] = totals[tally].plus(
                    Amounts(disk_byte_s=seen.disk.uncharged(spec.id, now), host_byte_s=host_byte_s)
                )
        return totals


def _ended(tally: FunctionStatistics) -> Amounts:
    """Return the usage by operations that have ended."""
    on_devices = tally.on_devices
    return Amounts(
        requests=tally.answered,
        core_s=tally.core_s + tally.background_core_s,
        idle_core_s=tally.idle_core_s,
        disk_byte_s=tally.disk_byte_s,
        host_byte_s=tally.host_byte_s,
        private_byte_s=tally.private_byte_s,
        device_s=on_devices.run_s,
        idle_device_s=tally.idle_device_s,
        moved_bytes=on_devices.moved_bytes,
        device_byte_s=tally.device_byte_s,
    )


def _add_devices(
    totals: dict[FunctionStatistics, Amounts], pool: TrackedPool[FunctionStatistics], now: Seconds
) -> None:
    """Add the runs in progress on devices, the blocks there, and the time of functions that do not run."""
    runs = [executor.run for executor in list(pool.executors.values())]
    uncharged = [
        (tally, Amounts(device_s=seconds)) for run in runs if run is not None for tally, seconds in run.shares_s(now)
    ]
    uncharged += [(tally, Amounts(idle_device_s=now - since)) for tally, since in list(pool.idle.values())]
    uncharged += [
        (tally, Amounts(device_byte_s=device.blocks.uncharged(function, now)))
        for device in list(pool.devices.values())
        for function, tally in list(device.residents.items())
    ]
    for tally, amounts in uncharged:
        if tally in totals:
            totals[tally] = totals[tally].plus(amounts)


def _add_worker(
    totals: dict[FunctionStatistics, Amounts], worker: LiveWorker[FunctionStatistics], now: Seconds
) -> None:
    """Add the cost of a worker that is not charged yet: runs in progress to their functions, the rest split among the
    bound functions.
    """
    for run in list(worker.runs.values()):
        core_s = (now - run.begun) * worker.run_cores
        for tally, count in run.requests.items():
            if tally in totals:
                totals[tally] = totals[tally].plus(Amounts(core_s=core_s * count / run.batch))
    for tally, cost in worker.uncharged(now):
        if tally in totals:
            each = Amounts(idle_core_s=cost.idle_core_s, private_byte_s=cost.private_byte_s)
            totals[tally] = totals[tally].plus(each)


def _usage_of(key: Key, since: str, amounts: Amounts) -> Usage:
    tenant, function = key
    used_devices = amounts.device_s or amounts.idle_device_s
    return Usage(
        tenant=tenant,
        function=function,
        since=since,
        requests=amounts.requests,
        core_ms=amounts.core_s * 1e3,
        idle_core_ms=amounts.idle_core_s * 1e3,
        billed_core_ms=(amounts.core_s + IDLE_PRICE * amounts.idle_core_s) * 1e3,
        disk_byte_s=amounts.disk_byte_s,
        host_byte_s=amounts.host_byte_s,
        private_byte_s=amounts.private_byte_s,
        device=_device_usage_of(amounts) if used_devices else None,
    )


def _device_usage_of(amounts: Amounts) -> DeviceUsage:
    return DeviceUsage(
        device_ms=amounts.device_s * 1e3,
        idle_ms=amounts.idle_device_s * 1e3,
        billed_ms=(amounts.device_s + IDLE_DEVICE_PRICE * amounts.idle_device_s) * 1e3,
        moved_bytes=int(amounts.moved_bytes),
        device_byte_s=amounts.device_byte_s,
    )

"""Constructs a node, starts its parts in the order of their dependencies, and stops them."""

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from typing import IO, Any

import msgspec

from overwinter.core.config import NodeConfig, SchedulerConfig
from overwinter.core.devices import DeviceConfig, gpus_of
from overwinter.core.errors import ConflictError, OverwinterError
from overwinter.core.events import Event
from overwinter.core.ids import FunctionName
from overwinter.core.journal import Journal
from overwinter.device.partitioned import usable_bytes
from overwinter.node import checkup, limits
from overwinter.node.calls import Calls
from overwinter.node.core_shares import CoreShares
from overwinter.node.deploys import Deploys
from overwinter.node.effects import NodeEffects
from overwinter.node.faults import Faults
from overwinter.node.footprints import Footprints
from overwinter.node.functions import DeployedFunction
from overwinter.node.kept_blocks import KeptBlocks
from overwinter.node.log import Log
from overwinter.node.loop import Loop
from overwinter.node.node import Node
from overwinter.node.parts import Parts
from overwinter.node.pipelines import Pipelines
from overwinter.node.pressure import watch_memory
from overwinter.node.processes import Processes
from overwinter.node.quarantine import Quarantine
from overwinter.node.registry import Registry
from overwinter.node.telemetry import Telemetry
from overwinter.node.thread_shares import ThreadShares
from overwinter.node.threads import Threads, default_count
from overwinter.node.traffic import TrafficSplits
from overwinter.node.unreported import UnreportedProcesses
from overwinter.node.upkeep import TMPFS_SHARE, UnneededBlocks, watch_host_capacity
from overwinter.node.verifying import KillBlockReaders, Verifier
from overwinter.node.zygote_process import ZygoteSettings
from overwinter.profiling.machine import fingerprint
from overwinter.profiling.profiler import Profiler
from overwinter.scheduler.published import Published
from overwinter.scheduler.scheduler import Scheduler
from overwinter.store.disk import FULL, free_bytes, private_directory
from overwinter.store.elbows import read_elbows, with_measured_groups
from overwinter.store.host import page_bytes
from overwinter.store.hosts import HostStores
from overwinter.store.repository import Repository
from overwinter.store.uploads import DiskBounds


@asynccontextmanager
async def running(config: NodeConfig, environment: Mapping[str, str], log: Log) -> AsyncIterator[Node]:
    """Run a node over its data directory, from its start to its clean stop. Raises ConflictError if another node uses
    this directory or the host store, or a configured GPU is unusable, and other errors if the node cannot start.
    """
    asyncio.get_running_loop().set_default_executor(Threads(default_count(), "node"))
    with ExitStack() as stack:
        bounds = DiskBounds(free_min_bytes=config.disk_free_min_bytes, tenant_bytes=config.tenant_disk_bytes)
        data = private_directory(Path(config.data))
        # Before the repository is opened, which may change its schema.
        in_use = f"another node already serves {data}: stop it, or choose another --data"
        stack.callback(os.close, _lock(data / "node.lock", os.O_RDWR | os.O_CREAT, in_use))
        repository = Repository(data, bounds)
        stack.callback(repository.close)
        repository.forget_drafts()
        directory = Path(config.host_store) / f"overwinter-{repository.node_identity}"
        hosts = HostStores(directory, repository)
        # A copy of a data directory has the identity of the original.
        in_use = f"a node with a copy of {data} uses {directory}: stop it, or choose another --host-store"
        stack.callback(os.close, _lock(directory, os.O_RDONLY | os.O_DIRECTORY, in_use))
        if not config.keep_warm:
            stack.callback(hosts.close)
        host_bytes = config.scheduler.host_bytes
        config = msgspec.structs.replace(config, scheduler=_bounded(config, hosts, log))
        file = stack.enter_context(_journal_file(config.journal, log))
        journal = Journal(config.scheduler, config.journal_ring, file, partial(_journal_lost, log))
        async with _assembled(config, host_bytes, environment, repository, hosts, journal, log) as node:
            yield node


@asynccontextmanager
async def _assembled(
    config: NodeConfig,
    host_bytes: int | None,
    environment: Mapping[str, str],
    repository: Repository,
    hosts: HostStores,
    journal: Journal,
    log: Log,
) -> AsyncIterator[Node]:
    """Create all parts, each from those before it. `host_bytes`: the configured bound on the host stores."""
    quarantine, faults = Quarantine(repository.root / "quarantine.json"), Faults(log)
    scheduler = Scheduler(config.scheduler)
    published = Published(scheduler.cycle)

    def post(event: Event) -> None:
        # The only circular dependency: the loop needs the effects, and these post events to the loop.
        loop.post(event)

    def find(name: FunctionName, version: int | None) -> DeployedFunction:
        pipelines.check_function(name)
        return registry.deployed(name, version)

    async with asyncio.TaskGroup() as tasks:
        registry = Registry(hosts, published, post, log)
        processes = Processes(registry, environment, log, _zygote_settings(config))
        calls = Calls(post, published, quarantine)
        effects = NodeEffects(registry, processes, calls, hosts, config.scheduler, tasks, post, log)
        unneeded, upkeep = UnneededBlocks(repository, config.unneeded_keep_s), Threads(1, "upkeep")
        parts = Parts(
            config, log, faults, repository, hosts, published, post, registry, processes, calls, effects.pool_calls,
            unneeded, upkeep,
        )  # fmt: skip
        pipelines = Pipelines(registry, calls.infer, repository)
        traffic = TrafficSplits(registry, pipelines, repository.traffic, post)
        profiler = Profiler(parts, tasks)
        with repository.reserve.released():
            telemetry = Telemetry(parts, pipelines, find, profiler.observer)
        loop = Loop(scheduler, published, journal, effects, telemetry.statistics.observe, quarantine, faults)
        deploys = Deploys(parts, pipelines, traffic, quarantine, profiler)
        node = Node(parts, loop, pipelines, traffic, deploys, profiler, telemetry, find)
        processes.start()
        watches = [tasks.create_task(watch) for watch in _periodic_tasks(parts, host_bytes, effects.kill_block_readers)]
        try:
            _restore(deploys, traffic, loop, parts.log)
            telemetry.begin(tasks)
            yield node
        finally:
            for watch in watches:
                watch.cancel()
            telemetry.stop()
            await profiler.close()
            effects.close()
            await processes.close()
            await telemetry.close()


def _periodic_tasks(
    parts: Parts, host_bytes: int | None, kill_block_readers: KillBlockReaders
) -> list[Coroutine[Any, Any, None]]:
    """Return the periodic tasks, not yet started."""
    config, post, faults, published = parts.config, parts.post, parts.faults, parts.published
    verifier = Verifier(
        parts.hosts, config.verify_share, lambda: published.has_spare_core, kill_block_readers, parts.log
    )
    assert config.scheduler.memory_bytes is not None
    footprints = Footprints(published.expected_bytes, parts.processes, config.scheduler.memory_bytes, post)
    return [
        footprints.run(faults),
        CoreShares(parts.processes, len(os.sched_getaffinity(0))).run(faults),
        watch_memory(config.memory_free_min_bytes, post, faults),
        watch_host_capacity(parts.hosts, parts.upkeep, host_bytes, config.scheduler.host_bytes, post, faults),
        parts.unneeded.run(faults),
        verifier.run(faults),
        KeptBlocks(parts.processes, parts.hosts.root, parts.log).run(faults),
        ThreadShares(parts.processes, parts.processes.zygotes.groups, parts.log).run(faults),
        UnreportedProcesses(parts.processes.zygotes, parts.processes.forks).run(faults),
    ]


def _journal_file(path: str | None, log: Callable[[str], None]) -> AbstractContextManager[IO[bytes] | None]:
    """Open the journal file, unbuffered, so that a crash of the node loses no step. A previous file is renamed with a
    number, but not a device such as /dev/stdout. If the disk is full, there is no journal file.
    """
    if path is None:
        return nullcontext()
    try:
        if os.path.isfile(path):
            # The target of a link is renamed. A pipe, as /dev/stdout may be, has no real path.
            path = os.path.realpath(path)
            number = next(number for number in count(1) if not os.path.exists(f"{path}.{number}"))
            os.rename(path, f"{path}.{number}")
        return open(path, "wb", buffering=0)
    except OSError as error:
        if error.errno not in FULL:
            raise
        log(f"no journal is written: {error}")
        return nullcontext()


def _journal_lost(log: Callable[[str], None], error: OSError) -> None:
    log(f"the journal file ends here, but the node continues: {error}")


def _restore(deploys: Deploys, traffic: TrafficSplits, loop: Loop, log: Log) -> None:
    """Tell the scheduler about all functions and splits. If the loop fails meanwhile, raise its error."""
    try:
        deploys.restore()
        traffic.restore(log)
    except OverwinterError:
        if loop.broken.done():
            loop.broken.result()
        raise


def _bounded(config: NodeConfig, hosts: HostStores, log: Callable[[str], None]) -> SchedulerConfig:
    """Return the scheduler's configuration, with this machine's figures for what is not set. Workers and host stores
    get at most what the limits of the system and the tmpfs allow. Raises ConflictError as `limits.check_gpus` does.
    """
    if kind := checkup.kind_if_not_memory(hosts.root):
        log(f"the host store {hosts.root} is on a {kind}, not in memory: choose a tmpfs with --host-store")
    stored = sum(page_bytes(path.stat().st_size) for path in hosts.root.rglob("*") if path.is_file())
    limit = int((free_bytes(hosts.root) + stored) * TMPFS_SHARE)
    scheduler, most = config.scheduler, limits.workers_most(log)
    limits.check_gpus(scheduler.devices)
    devices = _completed_devices(config, log)
    device_bytes = sum(device.reserved_bytes for device in devices)
    memory_bytes = scheduler.memory_bytes or limits.memory_bytes(log, device_bytes)
    if scheduler.workers_max is not None and scheduler.workers_max > most:
        log(f"{scheduler.workers_max} workers are not possible: processes and descriptors (ulimit -Hn) allow {most}")
    if scheduler.runs_max is not None and scheduler.runs_max > most:
        log(f"{scheduler.runs_max} concurrent runs are not possible: processes and descriptors allow {most}")
    return msgspec.structs.replace(
        scheduler,
        devices=devices,
        cores=scheduler.cores or len(os.sched_getaffinity(0)),
        memory_bytes=memory_bytes,
        workers_ahead=limits.workers_ahead(memory_bytes)
        if scheduler.workers_ahead is None
        else scheduler.workers_ahead,
        workers_max=min(scheduler.workers_max or most, most),
        runs_max=min(scheduler.runs_max or most, most),
        host_bytes=limit if scheduler.host_bytes is None else min(limit, scheduler.host_bytes),
    )


def _completed_devices(config: NodeConfig, log: Callable[[str], None]) -> tuple[DeviceConfig, ...]:
    """Return the devices, each with the memory that blocks may take. One with the default size of groups, whose link
    was measured on this machine, gets the measured size.
    """
    devices = tuple(_in_partitions(device, log) for device in config.scheduler.devices)
    if not devices:
        return devices
    try:
        return with_measured_groups(devices, read_elbows(Path(config.data)), fingerprint())
    except ValueError as error:
        log(f"{error}; overwinter elbow measures them again")
        return devices


def _in_partitions(device: DeviceConfig, log: Callable[[str], None]) -> DeviceConfig:
    """Return a device with the memory that blocks may take, which is what all decisions count."""
    nbytes = usable_bytes(device.memory_bytes)
    if nbytes < device.memory_bytes:
        given = device.memory_bytes
        log(f"device {device.name!r} uses {nbytes} of its {given} bytes: its memory is divided into whole partitions")
    return msgspec.structs.replace(device, memory_bytes=nbytes)


def _zygote_settings(config: NodeConfig) -> ZygoteSettings:
    """Return the settings of the zygotes."""
    timeout_s, warm_up_s = config.zygote_timeout_s, config.warm_up_timeout_s
    start_s, uses_gpus = config.scheduler.start_timeout_s, bool(gpus_of(config.scheduler.devices))
    return ZygoteSettings(config.zygotes_max, timeout_s, warm_up_s, start_s, config.imports, uses_gpus)


def _lock(path: Path, flags: int, in_use: str) -> int:
    """Lock a file or directory; return the descriptor that holds the lock. Raises ConflictError, with `in_use`, if
    another process has locked it.
    """
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise ConflictError(in_use) from None
    return fd

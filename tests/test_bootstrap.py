"""The bounds, the checks and the periodic work of a node follow its configuration and its machine."""

import asyncio
import fcntl
import os
import shutil
import site
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest
from msgspec import structs

from overwinter.bootstrap import _journal_file, running
from overwinter.cli.serve import write_port
from overwinter.core.config import NodeConfig, SchedulerConfig
from overwinter.core.devices import DeviceConfig
from overwinter.core.errors import ConflictError
from overwinter.core.function import Settings
from overwinter.core.ids import DeviceId
from overwinter.device.partitioned import allocator_of
from overwinter.node import checkup, limits, upkeep
from overwinter.node.pressure import total_bytes
from overwinter.server import ZYGOTE_ENVIRONMENT, zygote_environment
from overwinter.store.catalog import SCHEMA_VERSION
from overwinter.store.hosts import HostStores
from overwinter.store.repository import Repository
from tests.node.log_lines import LogLines
from tests.node.rig import until
from tests.store.family import assemble, base, flip_bit, head_variant, put

MIB = 1 << 20


@pytest.mark.usefixtures("no_zygotes")
@pytest.mark.parametrize("memory_bytes", [None, 100 * MIB, 10 * MIB])
def test_a_tmpfs_with_room_lets_the_host_stores_hold_what_they_may_and_no_more(tmp_path, monkeypatch, memory_bytes):
    looks = []
    monkeypatch.setattr(upkeep, "CAPACITY_EVERY_S", 0.001)
    monkeypatch.setattr(HostStores, "capacity_bytes", lambda stores: looks.append(1) or 1 << 50)
    scheduler = SchedulerConfig(host_bytes=20 * MIB, memory_bytes=memory_bytes)
    config = NodeConfig(data=str(tmp_path / "data"), host_store=str(tmp_path), scheduler=scheduler)

    async def scene() -> None:
        async with running(config, ZYGOTE_ENVIRONMENT, LogLines()) as node:
            # The result of the first check has been handled by then.
            await until(lambda: len(looks) > 1)
            assert (await node.telemetry.activity()).host_budget == 20 * MIB

    asyncio.run(scene())


@pytest.mark.usefixtures("no_zygotes")
@pytest.mark.parametrize("given", [{}, {"memory_bytes": 100 * MIB, "workers_max": 7}])
def test_without_bounds_of_its_own_a_node_has_those_of_the_machine(tmp_path, given):
    config = NodeConfig(data=str(tmp_path / "data"), host_store=str(tmp_path), scheduler=SchedulerConfig(**given))

    async def scene() -> None:
        async with running(config, ZYGOTE_ENVIRONMENT, LogLines()) as node:
            bounds = node.parts.config.scheduler
            assert bounds.memory_bytes is not None
            assert bounds.workers_max == given.get("workers_max", limits.workers_most([].append))
            assert bounds.runs_max == limits.workers_most([].append)
            if given:
                assert bounds.memory_bytes == given["memory_bytes"]
            else:
                assert bounds.memory_bytes <= total_bytes() // 2

    asyncio.run(scene())


@pytest.mark.usefixtures("no_zygotes")
@pytest.mark.parametrize(("given", "used"), [(60_000_000, 32 * MIB), (63 * MIB, 32 * MIB), (3 * MIB, 2 * MIB)])
def test_only_the_memory_that_blocks_may_take_is_counted_of_a_device(tmp_path, given, used):
    named = {DeviceId("virtual:0"): given, DeviceId("virtual:1"): 64 * MIB}
    devices = tuple(DeviceConfig(name=name, memory_bytes=nbytes) for name, nbytes in named.items())
    scheduler, said = SchedulerConfig(devices=devices), LogLines()
    config = NodeConfig(data=str(tmp_path / "data"), host_store=str(tmp_path), scheduler=scheduler)

    async def scene() -> None:
        async with running(config, ZYGOTE_ENVIRONMENT, said) as node:
            counted = [device.memory_bytes for device in node.parts.config.scheduler.devices]
            assert counted == [used, 64 * MIB] == [allocator_of(nbytes).nbytes for nbytes in named.values()]

    asyncio.run(scene())
    assert [line for line in said if "whole partitions" in line] == [
        f"device 'virtual:0' uses {used} of its {given} bytes: its memory is divided into whole partitions"
    ]


@pytest.mark.usefixtures("no_zygotes")
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_host_store_on_a_disk_is_reported(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(checkup, "filesystem_of", lambda directory: kind)
    said, config = LogLines(), NodeConfig(data=str(tmp_path / "data"), host_store=str(tmp_path))

    async def scene() -> None:
        async with running(config, ZYGOTE_ENVIRONMENT, said):
            pass

    asyncio.run(scene())
    assert len([line for line in said if "--host-store" in line and "ext4" in line]) == (kind == "ext4")


def test_a_stopping_node_looks_at_no_process_that_it_has_closed(tmp_path):
    said = LogLines()
    config = NodeConfig(data=str(tmp_path / "data"), host_store=str(tmp_path), accounting_s=0.01)

    async def scene() -> None:
        async with running(config, ZYGOTE_ENVIRONMENT, said) as node:
            await until(node.parts.processes.zygote_smaps)

    asyncio.run(scene())
    assert not [line for line in said if "the node continues" in line]


@pytest.mark.usefixtures("no_zygotes")
def test_a_start_that_is_refused_leaves_the_running_nodes_data_as_they_are(tmp_path):
    config = NodeConfig(data=str(tmp_path / "data"), host_store=str(tmp_path))
    Repository(tmp_path / "data").close()
    with closing(sqlite3.connect(tmp_path / "data" / "catalog.sqlite")) as catalog:
        # An older version, which still runs, left the catalog in this form.
        catalog.execute("DROP INDEX holdings_by_address")
        catalog.execute(f"PRAGMA user_version = {SCHEMA_VERSION - 1}")

        def version() -> int:
            return catalog.execute("PRAGMA user_version").fetchone()[0]

        with open(tmp_path / "data" / "node.lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with pytest.raises(ConflictError, match="another --data"):
                asyncio.run(started(config))
            assert version() == SCHEMA_VERSION - 1
        asyncio.run(started(config))
        assert version() == SCHEMA_VERSION


async def started(config) -> None:
    async with running(config, ZYGOTE_ENVIRONMENT, LogLines()):
        pass


@pytest.mark.usefixtures("no_zygotes")
def test_a_node_over_a_copy_of_the_data_leaves_the_host_store_of_the_original(tmp_path):
    originals, copy = ({"data": str(tmp_path / name), "host_store": str(tmp_path)} for name in ("data", "copy"))

    async def scene() -> None:
        async with running(NodeConfig(**originals), ZYGOTE_ENVIRONMENT, LogLines()) as node:
            await asyncio.to_thread(shutil.copytree, tmp_path / "data", tmp_path / "copy")
            with pytest.raises(ConflictError, match="another --host-store"):
                await started(NodeConfig(**copy))
            assert node.parts.hosts.root.is_dir()

    asyncio.run(scene())


def test_a_journal_replaces_no_directory_and_no_device(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(IsADirectoryError):
            _journal_file(str(tmp_path / "logs"), print)
        with _journal_file(str(tmp_path / "link"), print) as file:
            file.write(b"a step")
            assert os.read(reader, 99) == b"a step"
        write_port(tmp_path / "link", 8000)
    finally:
        os.close(reader)
    assert {path.name for path in tmp_path.iterdir()} == {"logs", "link", "pipe"}
    assert (tmp_path / "pipe").is_fifo()
    here, there = os.pipe()
    try:
        with _journal_file(f"/dev/fd/{there}", print) as file:
            file.write(b"a step")
        assert os.read(here, 99) == b"a step"
    finally:
        os.close(here)
        os.close(there)


def test_zygotes_find_the_packages_that_are_installed_for_this_user_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(site, "ENABLE_USER_SITE", True)
    monkeypatch.setattr(site, "getuserbase", lambda: str(tmp_path))
    # The Python of a virtual environment finds no packages of a user.
    command = [sys._base_executable, "-c", "import site; print(site.getusersitepackages())"]
    found = subprocess.run(command, env=zygote_environment(()), stdout=subprocess.PIPE, text=True, check=True)
    assert found.stdout.startswith(str(tmp_path))


@pytest.mark.usefixtures("no_zygotes")
@pytest.mark.parametrize("host_bytes", [None, 400_000])
def test_a_start_keeps_of_the_earlier_run_only_blocks_that_fit_together(tmp_path, host_bytes):
    models = [base(), head_variant("variant", 1), head_variant("other", 2, classes=20)]
    with closing(Repository(tmp_path / "data")) as repository:
        for model in models:
            model.deploy(repository)
        hosts = HostStores(tmp_path / f"overwinter-{repository.node_identity}", repository)
        for model in models:
            hosts.store("").load(model.manifest.blobs())
    held = hosts.store("").occupied_bytes
    config = NodeConfig(
        data=str(tmp_path / "data"),
        host_store=str(tmp_path),
        scheduler=SchedulerConfig(host_bytes=host_bytes),
        keep_warm=True,
    )

    async def scene() -> int:
        async with running(config, ZYGOTE_ENVIRONMENT, LogLines()) as node:
            kept = node.parts.hosts.store("").occupied_bytes
            assert (await node.telemetry.activity()).host_bytes == kept
            return kept

    kept = asyncio.run(scene())
    assert kept == held if host_bytes is None else 300_000 < kept <= host_bytes < held


@pytest.mark.usefixtures("no_zygotes")
def test_a_function_whose_program_could_not_be_read_at_the_start_cannot_be_loaded(tmp_path):
    model = assemble("f", base().weights, base().tensors, b"def postprocess(outputs, inputs, state): return outputs")
    model = model._replace(manifest=structs.replace(model.manifest, settings=Settings(device="pool")))
    address = model.manifest.program.address
    with closing(Repository(tmp_path / "data")) as repository:
        model.deploy(repository)
        flip_bit(repository.path(address), 3)
    devices = (DeviceConfig(name=DeviceId("virtual:0"), memory_bytes=1 << 20),)
    config = NodeConfig(
        data=str(tmp_path / "data"), host_store=str(tmp_path), scheduler=SchedulerConfig(devices=devices)
    )
    said = LogLines()

    async def scene() -> None:
        async with running(config, ZYGOTE_ENVIRONMENT, said) as node:
            reason = node.view("f", None).reason
            assert "cannot be read" in reason
            assert address not in reason
            put(node.parts.repository, address, model.files[address])
            with pytest.raises(ConflictError, match="f@1.*deploy it again"):
                await node.load("f", None)

    asyncio.run(scene())
    assert [line for line in said if address in line]

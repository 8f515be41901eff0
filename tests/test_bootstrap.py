"""The bounds, the checks and the periodic work of a node follow its configuration and its machine."""

import asyncio

import pytest

from overwinter.bootstrap import running
from overwinter.core.config import NodeConfig, SchedulerConfig
from overwinter.node import checkup, limits, upkeep
from overwinter.node.pressure import total_bytes
from overwinter.server import ZYGOTE_ENVIRONMENT
from overwinter.store.hosts import HostStores
from tests.node.log_lines import LogLines
from tests.node.rig import until

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
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_host_store_on_a_disk_is_reported(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(checkup, "_kind_of", lambda directory: kind)
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

"""Real executors copy blocks from each other's devices: the same bits, whoever ends meanwhile, and never from another
tenant's.
"""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from overwinter.core.devices import DeviceConfig
from overwinter.core.events import RunEnded, WorkerExited
from overwinter.core.ids import DeviceId

from .rig import until
from .test_executors import pool_of, sees_maps, variant

ONE, TWO, SLOW = (DeviceId(f"virtual:{number}") for number in range(3))
MEMORY_BYTES = 16 << 20
DEVICES = (
    # The memory of the last one is shared too, so that a test can see what it has copied.
    DeviceConfig(name=ONE, memory_bytes=MEMORY_BYTES, group_bytes=64 << 10, switch="a", peers={TWO: 50e9, SLOW: 50e9}),
    DeviceConfig(name=TWO, memory_bytes=MEMORY_BYTES, group_bytes=64 << 10, switch="a", peers={ONE: 50e9}),
    # A copy takes some seconds.
    DeviceConfig(name=SLOW, memory_bytes=MEMORY_BYTES, group_bytes=64 << 10, peers={ONE: 2e5}),
)


@pytest.fixture
def pool(rig, tmp_path):
    with pool_of(rig, DEVICES, tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def variants():
    return [variant("minilm", number) for number in (0, 1)]


def mapped(pool, executor):
    """Return the executor's mappings of the memory of devices."""
    pid = pool.effects.executors._executors[executor].pid
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in lines if "overwinter-device" in line]


async def copying(pool, function):
    """Return two executors, the second of which is halted while it copies from the first; the answers of the first;
    the second's run.
    """
    one, slow = await pool.start(ONE), await pool.start(SLOW)
    await pool.run(one, function)
    wanted, process = pool.answers(), pool.effects.executors._executors[slow]
    run = asyncio.create_task(pool.run(slow, function, peer=ONE))
    await until(lambda: any(os.pread(process.memory.fd, MEMORY_BYTES, 0)))
    os.kill(process.pid, signal.SIGSTOP)
    return one, slow, wanted, run


def test_blocks_come_from_the_device_that_has_them(rig, pool, variants):
    first, second = variants
    pool.deploy(first, second)
    shared = {address: nbytes for address, nbytes in first.block_bytes.items() if address in second.block_bytes}
    assert 0 < len(shared) < len(second.block_bytes)

    async def scene():
        one, two = await pool.start(ONE), await pool.start(TWO)
        # Nothing lies there yet.
        ended = await pool.run(one, first, peer=TWO)
        assert (ended.moved_bytes, ended.peer_bytes) == (sum(first.block_bytes.values()), 0)
        wanted = pool.answers()
        ended = await pool.run(two, first, peer=ONE)
        assert (ended.moved_bytes, ended.peer_bytes) == (sum(first.block_bytes.values()),) * 2
        assert pool.answers() == wanted
        ended = await pool.run(two, second, evict=(first,), peer=ONE)
        assert (ended.moved_bytes, ended.peer_bytes) == (sum(second.block_bytes.values()), sum(shared.values()))
        wanted = pool.answers()
        ended = await pool.run(two, first, evict=(second,))
        assert (ended.moved_bytes, ended.peer_bytes) == (sum(first.block_bytes.values()), 0)
        ended = await pool.run(one, second, evict=(first,), peer=TWO)
        assert ended.peer_bytes == sum(shared.values())
        assert pool.answers() == wanted

    rig.run(scene())


def test_an_executor_that_dies_while_another_copies_from_it_disturbs_nobody(rig, pool, variants):
    function = variants[0]
    pool.deploy(function)

    async def scene():
        one, slow, wanted, run = await copying(pool, function)
        os.kill(pool.effects.executors._executors[one].pid, signal.SIGKILL)
        await until(lambda: rig.exits(one))
        os.kill(pool.effects.executors._executors[slow].pid, signal.SIGCONT)
        ended = await run
        assert ended.peer_bytes == ended.moved_bytes == sum(function.block_bytes.values())
        assert pool.answers() == wanted
        [exit_] = rig.exits(one)
        assert rig.events.index(exit_) < rig.events.index(ended)

    rig.run(scene())


def test_an_executor_that_dies_while_it_copies_leaves_the_peer_as_it_was(rig, pool, variants):
    function = variants[0]
    pool.deploy(function)

    async def scene():
        one, slow, wanted, run = await copying(pool, function)
        assert (await pool.stop(slow, kill=True)) in rig.events
        run.cancel()
        ended = await pool.run(one, function)
        assert ended == RunEnded(one, ended.run)
        assert pool.answers() == wanted

    rig.run(scene())


def test_the_device_of_another_tenant_gives_nothing(rig, pool, variants):
    function = variants[0]
    pool.deploy(function)

    async def scene():
        one, two = await pool.start(ONE, tenant="ada"), await pool.start(TWO, tenant="bob")
        await pool.run(one, function)
        wanted = pool.answers()
        ended = await pool.run(two, function, peer=ONE)
        assert (ended.moved_bytes, ended.peer_bytes) == (sum(function.block_bytes.values()), 0)
        assert pool.answers() == wanted
        assert pool.effects.executors._executors[two].mapped == {}

    rig.run(scene())


@sees_maps
def test_the_memory_of_an_executor_that_ended_is_unmapped(rig, pool, variants):
    function = variants[0]
    pool.deploy(function)

    async def scene():
        one, two = await pool.start(ONE), await pool.start(TWO)
        await pool.run(one, function)
        assert len(mapped(pool, two)) == 1
        await pool.run(two, function, peer=ONE)
        own, other = mapped(pool, two)
        assert {own.split()[1], other.split()[1]} == {"rw-s", "r--s"}
        exit_ = await pool.stop(one)
        assert isinstance(exit_, WorkerExited)
        await until(lambda: len(mapped(pool, two)) == 1)
        again = await pool.start(ONE)
        ended = await pool.run(again, function, peer=TWO)
        assert ended.peer_bytes == sum(function.block_bytes.values())
        await pool.run(two, function, evict=(function,), peer=ONE)
        assert len(mapped(pool, two)) == 2

    rig.run(scene())

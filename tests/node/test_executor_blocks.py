"""An executor maps the blocks of the functions that it has, each from the function's own host store."""

import asyncio
from copy import copy

import pytest
from msgspec import structs

from overwinter.core.actions import Drop
from overwinter.node import executors as node_executors
from overwinter.node.functions import DeployedFunction
from overwinter.store.hosts import PREFIX
from overwinter.store.manifest import Deployment

from .rig import until
from .test_executors import pool, sees_maps, variant

__all__ = ["pool"]


@pytest.fixture
def versions(pool):
    """The same model twice: in the shared host store, and in that of its tenant."""
    shared = variant("minilm", 0)
    manifest = shared.deployed.manifest
    settings = structs.replace(manifest.settings, dedicated=True)
    dedicated = copy(shared)
    dedicated.deployed = DeployedFunction(Deployment(manifest.name, 2, structs.replace(manifest, settings=settings), 0))
    pool.deploy(shared)
    pool.hosts.store(dedicated.deployed.store).load(dedicated.deployed.blobs)
    pool.rig.registry.add(dedicated.deployed)
    return shared, dedicated


def mapped_from(pool, executor) -> set[str]:
    """Return the directories of host stores from which an executor has mapped files."""
    with open(f"/proc/{pool.effects.executors._executors[executor].pid}/maps") as maps:
        return {line.split(maxsplit=5)[5].rsplit("/", 1)[0] for line in maps if str(pool.root) in line}


@sees_maps
def test_files_of_another_host_store_are_not_mapped_after_they_were_dropped(rig, pool, versions):
    shared, dedicated = versions

    async def scene():
        executor = await pool.start()
        await pool.run(executor, shared)
        wanted = pool.answers()
        assert (await pool.run(executor, dedicated)).moved_bytes == 0
        assert pool.answers() == wanted
        pool.unbind(executor, shared)
        pool.effects.carry_out(Drop(tuple(shared.block_bytes), shared.deployed.store))
        await pool.run(executor, dedicated)
        assert pool.answers() == wanted
        assert mapped_from(pool, executor) == {str(pool.root / f"{PREFIX}{dedicated.deployed.store}")}

    rig.run(scene())


def test_a_damaged_block_of_another_host_store_ends_the_executor_that_may_have_copied_it(rig, pool, versions):
    _, dedicated = versions

    async def scene():
        executor = await pool.start()
        await pool.run(executor, dedicated)
        assert len(pool.effects.kill_block_readers("", next(iter(dedicated.block_bytes)))) == 1
        await until(lambda: rig.exits(executor))
        assert rig.exits(executor)[0].lost_blocks

    rig.run(scene())


@sees_maps
def test_a_function_that_is_unbound_before_its_first_run_begins_is_not_mapped(rig, pool, monkeypatch):
    first, second = variant("minilm", 0), variant("minilm", 1)
    pool.deploy(first, second)
    one = {key: value[:1] for key, value in first.inputs.items()}
    executors, waiting = pool.effects.executors, []
    verify = executors._when_verified

    def second_later(process, function, host, then):
        if function is second.deployed:
            waiting.append(then)
        else:
            verify(process, function, host, then)

    monkeypatch.setattr(executors, "_when_verified", second_later)

    async def scene():
        executor = await pool.start()
        running = asyncio.create_task(pool.run_together(executor, first, second, inputs=one))
        await until(lambda: waiting)
        await until(lambda: pool.mapped(executor) == len(first.block_bytes))
        pool.unbind(executor, first)
        await until(lambda: pool.mapped(executor) == 0)
        waiting.pop()()
        assert (await running).failures == ()

    rig.run(scene())


@sees_maps
def test_few_weights_stay_in_an_executor_even_where_functions_share_their_blocks(rig, pool, monkeypatch):
    first, second = variant("minilm", 0), variant("minilm", 1)
    weights = len(first.deployed.bind_message().pieces)
    monkeypatch.setattr(node_executors, "WEIGHTS_MAX", 2 * weights - 1)
    pool.deploy(first, second)

    async def scene():
        executor = await pool.start()
        await pool.run(executor, first)
        await pool.run(executor, second)
        bindings = pool.effects.executors._executors[executor].bindings
        assert [each.id for each in bindings.functions()] == [second.deployed.id]
        assert bindings.weight_count == weights
        assert pool.mapped(executor) == len(second.block_bytes)
        assert (await pool.run(executor, first)).moved_bytes == 0

    rig.run(scene())

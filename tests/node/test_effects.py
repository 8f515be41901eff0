"""The node's hands, without processes: what a wake waits for, and what it does not."""

import asyncio
import threading
from types import SimpleNamespace

from overwinter.core.actions import Stage
from overwinter.core.events import Event, Staged
from overwinter.node.effects import NodeEffects

from .rig import until

POOL_MOST = 64
"""More threads than asyncio's own pool has."""


def test_a_wake_does_not_wait_for_threads_that_others_hold():
    host = SimpleNamespace(holds=lambda address: False, stage=lambda blobs: 7, join_pages=lambda blobs: 0)
    function = SimpleNamespace(id="f@1", store="", blobs=[SimpleNamespace(address="a")])
    held = threading.Event()
    heard: list[Event] = []

    async def scene():
        async with asyncio.TaskGroup() as tasks:
            effects = NodeEffects(SimpleNamespace(store=lambda name: host), tasks, heard.append)
            effects.post = heard.append
            effects.functions = {"f@1": function}
            deploys = [tasks.create_task(asyncio.to_thread(held.wait)) for _ in range(POOL_MOST)]
            await asyncio.sleep(0.01)
            try:
                effects.carry_out(Stage("f@1", 1))
                await until(lambda: heard)
                assert not any(deploy.done() for deploy in deploys)
            finally:
                held.set()
        assert heard == [Staged("f@1", 1, 7, ("a",), "")]

    asyncio.run(scene())

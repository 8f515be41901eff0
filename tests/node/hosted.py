"""A node with a device, in the process of the tests. Its event loop runs only while a test uses it."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path

from overwinter.bootstrap import running
from overwinter.core.config import NodeConfig, SchedulerConfig
from overwinter.core.devices import DeviceConfig
from overwinter.core.ids import DeviceId
from overwinter.node.node import Node
from overwinter.server import ZYGOTE_ENVIRONMENT

from .log_lines import LogLines


class HostedNode:
    """A node for several tests, each with its own functions. `run` drives its loop until a coroutine of a test ends."""

    def __init__(self, directory: Path) -> None:
        self._config = NodeConfig(
            data=str(directory / "data"),
            host_store=str(directory),
            profile_on_deploy=False,
            scheduler=SchedulerConfig(devices=(DeviceConfig(name=DeviceId("virtual:0"), memory_bytes=1 << 20),)),
        )
        self._runner = asyncio.Runner()
        try:
            self._runner.run(self._start())
        except BaseException:
            self._runner.close()
            raise

    async def _start(self) -> None:
        self._over, self._node = asyncio.Event(), asyncio.get_running_loop().create_future()
        self._hosting = asyncio.create_task(self._host())
        await asyncio.wait([self._hosting, self._node], return_when=asyncio.FIRST_COMPLETED)
        if self._hosting.done():
            # The node could not start: raise why.
            await self._hosting

    async def _host(self) -> None:
        """Start and stop the node in one task, as a daemon does."""
        async with running(self._config, ZYGOTE_ENVIRONMENT, LogLines()) as node:
            self._node.set_result(node)
            await self._over.wait()

    def run(self, scene: Callable[[Node], Coroutine[object, object, None]]) -> None:
        self._runner.run(scene(self._node.result()))

    def close(self) -> None:
        async def end() -> None:
            self._over.set()
            await self._hosting

        with self._runner:
            self._runner.run(end())

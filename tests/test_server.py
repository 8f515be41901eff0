"""A node that fails ends at once, also with requests in progress."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from overwinter import server
from overwinter.api.draining import Drain
from overwinter.core.config import NodeConfig

from .api.fake_node import FakeNode
from .node.log_lines import LogLines

LONG_S = 3000.0


@pytest.mark.parametrize("is_told_to_stop", [False, True])
def test_a_failing_node_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_told_to_stop: bool) -> None:
    async def scene() -> None:
        came, drains, failed = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop().create_future()
        node = FakeNode(tmp_path)
        node.until_broken = lambda: asyncio.shield(failed)
        node.until_ready = asyncio.Event().wait

        class Heard(Drain):
            def enter(self) -> None:
                super().enter()
                came.set()

            async def finish(self) -> bool:
                drains.set()
                return await super().finish()

        @asynccontextmanager
        async def running(*_: object) -> AsyncIterator[FakeNode]:
            yield node

        monkeypatch.setattr(server, "running", running)
        monkeypatch.setattr(server, "Drain", Heard)
        listener = server.open_listener("127.0.0.1", 0)
        config = NodeConfig(data=str(tmp_path), drain_s=LONG_S)
        serving = asyncio.create_task(server.serve_node(config, listener, LogLines(), print))
        _, writer = await asyncio.open_connection(*listener.getsockname())
        # The rest of the request never comes.
        writer.write(b"POST /v2/models/add/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
        await came.wait()
        if is_told_to_stop:
            os.kill(os.getpid(), signal.SIGTERM)
            await drains.wait()
        failed.set_exception(RuntimeError("the scheduler failed"))
        async with asyncio.timeout(60):
            with pytest.raises(ExceptionGroup) as result:
                await serving
        assert result.group_contains(RuntimeError, match="the scheduler failed")
        writer.close()

    asyncio.run(scene())

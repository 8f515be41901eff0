"""A node that fails ends at once, also with requests in progress. At its start it logs which limits it cannot keep."""

import asyncio
import os
import resource
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from overwinter import server
from overwinter.api.draining import Drain
from overwinter.core.config import NodeConfig, RequestLimits

from .api.fake_node import FakeNode
from .node.log_lines import LogLines

LONG_S = 3000.0


def running_until(failed: asyncio.Future[None], root: Path) -> Callable[..., AbstractAsyncContextManager[FakeNode]]:
    """Return a replacement of `bootstrap.running`, whose node fails when `failed` has an exception."""
    node = FakeNode(root)
    node.until_broken = lambda: asyncio.shield(failed)
    node.until_ready = asyncio.Event().wait

    @asynccontextmanager
    async def running(*_: object) -> AsyncIterator[FakeNode]:
        yield node

    return running


@pytest.mark.parametrize("is_told_to_stop", [False, True])
def test_a_failing_node_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_told_to_stop: bool) -> None:
    async def scene() -> None:
        came, drains, failed = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop().create_future()

        class Heard(Drain):
            def enter(self) -> None:
                super().enter()
                came.set()

            async def finish(self) -> bool:
                drains.set()
                return await super().finish()

        monkeypatch.setattr(server, "running", running_until(failed, tmp_path))
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


@pytest.mark.parametrize(("wanted", "lines"), [(50, []), (51, ["51 connections are not possible"])])
def test_a_limit_of_connections_that_the_descriptors_do_not_allow_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: int, lines: list[str]
) -> None:
    log = LogLines()

    async def scene() -> None:
        failed = asyncio.get_running_loop().create_future()
        failed.set_exception(RuntimeError("the scheduler failed"))
        monkeypatch.setattr(server, "running", running_until(failed, tmp_path))
        config = NodeConfig(data=str(tmp_path), requests=RequestLimits(connections_max=wanted))
        with pytest.raises(ExceptionGroup):
            await server.serve_node(config, server.open_listener("127.0.0.1", 0), log, print)

    monkeypatch.setattr(resource, "getrlimit", lambda _: (203, 203))
    asyncio.run(scene())
    assert [line.split(":")[0] for line in log] == lines

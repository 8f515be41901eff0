"""Queries run one after another, in turns of their clients."""

import asyncio
import threading

import pytest

from overwinter.api.queries import Queries
from overwinter.core.ids import TenantId


class Thread:
    """Records the queries that run, each as a tenant and a number of its address; all wait until `go_on` is set."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.go_on = threading.Event()
        self.queries = Queries()

    def ask(self, client: str) -> asyncio.Task[None]:
        def query() -> None:
            self.ran.append(client)
            assert self.go_on.wait(10)

        return asyncio.create_task(self.queries.run(TenantId(client[0]), client[1:], query))


def test_clients_take_turns() -> None:
    async def scene() -> None:
        thread = Thread()
        asked = [thread.ask(client) for client in ["a1", "a1", "a1", "b1", "a2", "a2"]]
        await asyncio.sleep(0)
        thread.go_on.set()
        await asyncio.gather(*asked)
        assert thread.ran == ["a1", "b1", "a2", "a1", "a2", "a1"]

    asyncio.run(scene())


def test_a_query_of_a_client_that_left_does_not_run() -> None:
    async def scene() -> None:
        thread = Thread()
        runs, *left, last = [thread.ask(client) for client in ["a1", "a1", "b1", "c1"]]
        await asyncio.sleep(0)
        for each in left:
            each.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.gather(*left)
        thread.go_on.set()
        await asyncio.gather(runs, last)
        assert thread.ran == ["a1", "c1"]

    asyncio.run(scene())

"""Requests that arrive together start in several iterations of the loop, in turns of their clients."""

import asyncio
from functools import partial

from overwinter.api.starts import STARTED_MAX, Starts


async def started(*clients: str) -> list[list[str]]:
    """Return which clients' requests start in each iteration, if they all arrive in the first."""
    starts, now = Starts(), list[str]()
    for client in clients:
        starts.add(client, partial(now.append, client))
    found = [now.copy()]
    while sum(map(len, found)) < len(clients):
        now.clear()
        await asyncio.sleep(0)
        found.append(now.copy())
    return found


def test_a_few_requests_start_at_once() -> None:
    clients = ["a"] * STARTED_MAX
    assert asyncio.run(started(*clients)) == [clients]


def test_many_requests_start_in_several_iterations() -> None:
    found = asyncio.run(started(*["a"] * (3 * STARTED_MAX)))
    assert [len(each) for each in found] == [STARTED_MAX] * 3


def test_clients_take_turns() -> None:
    found = asyncio.run(started(*["a"] * (5 * STARTED_MAX), "b", *["c"] * STARTED_MAX))
    assert found[1][:3] == ["a", "b", "c"]
    assert found[1].count("c") == STARTED_MAX // 2 - 1


def test_later_requests_are_counted_with_those_that_wait() -> None:
    async def scene() -> list[str]:
        starts, seen = Starts(), list[str]()
        for number in range(STARTED_MAX + 2):
            starts.add("a", partial(seen.append, str(number)))
        await asyncio.sleep(0)
        # Both that waited have started, and the iteration may start more.
        starts.add("b", partial(seen.append, "b"))
        assert seen[-3:] == [str(STARTED_MAX), str(STARTED_MAX + 1), "b"]
        for _ in range(3):
            await asyncio.sleep(0)
        starts.add("a", partial(seen.append, "later"))
        return seen

    assert asyncio.run(scene())[-1] == "later"

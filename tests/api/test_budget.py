"""The memory of requests: who may hold how much, which requests wait, and which never do."""

import asyncio
from collections.abc import Coroutine

import pytest

from overwinter.api.budget import SMALL_BYTES, Budget, Hold, client_of
from overwinter.core.errors import OverloadedError, TooLargeError

MIB = 1 << 20


def run(work: Coroutine[object, object, None]) -> None:
    asyncio.run(work)


def test_one_caller_holds_no_more_than_its_share() -> None:
    async def work() -> None:
        budget = Budget(8 * MIB, 0.5, 0.01)
        greedy, other = Hold(budget, "1.1.1.1"), Hold(budget, "2.2.2.2")
        await greedy.reserve(4 * MIB)
        with pytest.raises(OverloadedError, match="requests-bytes-max"):
            await Hold(budget, "1.1.1.1").reserve(MIB)
        with pytest.raises(TooLargeError):
            greedy.grow(MIB)
        await other.reserve(4 * MIB)
        assert budget.held == 8 * MIB
        for hold in (greedy, other):
            hold.close()
        assert (budget.held, dict(budget.held_by)) == (0, {})

    run(work())


def test_what_may_never_be_held_is_refused_at_once() -> None:
    async def work() -> None:
        budget = Budget(8 * MIB, 0.5, 60.0)
        with pytest.raises(TooLargeError, match="requests-bytes-max"):
            await Hold(budget, "a").reserve(5 * MIB)

    run(work())


def test_the_small_go_through_while_the_large_wait_and_go_in_order() -> None:
    async def work() -> None:
        budget = Budget(4 * MIB, 1.0, 20.0)
        first, gone = Hold(budget, "a"), []
        await first.reserve(4 * MIB)

        async def large(name: str, nbytes: int) -> None:
            await Hold(budget, name).reserve(nbytes)
            gone.append(name)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(large("b", 3 * MIB))
            await asyncio.sleep(0)
            tasks.create_task(large("c", MIB))
            await asyncio.sleep(0)
            small = Hold(budget, "a")
            await small.reserve(SMALL_BYTES)
            assert gone == []
            small.close()
            first.close()
        assert gone == ["b", "c"]

    run(work())


def test_a_request_behind_a_caller_without_a_share_is_served_first() -> None:
    async def work() -> None:
        budget = Budget(4 * MIB, 0.5, 20.0)
        first, other = Hold(budget, "a"), Hold(budget, "c")
        await first.reserve(2 * MIB)
        await other.reserve(MIB)
        async with asyncio.TaskGroup() as tasks:
            # The memory would not suffice for it even if its caller had part of its share left.
            waiting = tasks.create_task(Hold(budget, "a").reserve(2 * MIB))
            await asyncio.sleep(0)
            await Hold(budget, "b").reserve(MIB)
            assert not waiting.done()
            first.close()

    run(work())


def test_who_gives_up_leaves_nothing_behind() -> None:
    async def work() -> None:
        budget = Budget(MIB, 1.0, 0.0)
        first = Hold(budget, "a")
        await first.reserve(MIB)
        late = Hold(budget, "b")
        with pytest.raises(OverloadedError):
            await late.reserve(MIB)
        first.close()
        late.close()
        assert budget.held == 0

    run(work())


def test_a_request_behind_one_that_gives_up_continues() -> None:
    async def work() -> None:
        budget = Budget(4 * MIB, 1.0, 20.0)
        await Hold(budget, "a").reserve(3 * MIB)
        large = asyncio.create_task(Hold(budget, "b").reserve(2 * MIB))
        await asyncio.sleep(0)
        behind = asyncio.create_task(Hold(budget, "c").reserve(MIB))
        await asyncio.sleep(0)
        assert not behind.done()
        large.cancel()
        await asyncio.wait_for(behind, 20.0)
        assert budget.held == 4 * MIB

    run(work())


def test_a_network_of_ipv6_is_one_caller() -> None:
    assert client_of("10.0.0.1") == "10.0.0.1"
    assert client_of("2001:db8:1:2:3:4:5:6") == client_of("2001:db8:1:2:ffff::1") != client_of("2001:db8:1:3::1")
    assert client_of("::ffff:10.0.0.1") != client_of("::ffff:10.0.0.2")
    assert client_of("2001:db8::a:b:c:d") == client_of("2001:db8::1") != client_of("2001:db8:0:1::1")
    assert client_of("fe80::1%eth0") == client_of("fe80::2%eth0")

"""The memory of requests: who may hold how much, which requests wait, and which never do."""

import asyncio
from collections import Counter
from collections.abc import Coroutine

import pytest

from overwinter.api.budget import LITTLE_SHARE, RESERVED_SHARE, SMALL_BYTES, Budget, Reservation
from overwinter.core.errors import OverloadedError, TooLargeError

UNIT = 3 << 18
"""A number of bytes that is divisible by three."""
COUNT = int(RESERVED_SHARE / LITTLE_SHARE)
"""How many callers that hold little fill what is reserved for them."""


def budget_of(unreserved: int, share: float, wait_s: float) -> Budget:
    """Return a budget with reserved bytes, and `unreserved` bytes of which one caller may hold at most `share`."""
    nbytes, rest = divmod(unreserved, 3)
    assert not rest
    return Budget(4 * nbytes, share * (1 - RESERVED_SHARE), wait_s)


def run(work: Coroutine[object, object, None]) -> None:
    asyncio.run(work)


async def reserve(reservation: Reservation, nbytes: int) -> None:
    if not reservation.reserve(nbytes):
        await reservation.wait(nbytes)


class Looks(Counter[str]):
    """Counts how often the bytes that clients hold are read."""

    count = 0

    def __getitem__(self, client: str) -> int:
        self.count += 1
        return super().__getitem__(client)


def test_one_caller_holds_no_more_than_its_share() -> None:
    async def work() -> None:
        budget = budget_of(8 * UNIT, 0.5, 0.01)
        greedy, other = Reservation(budget, "1.1.1.1"), Reservation(budget, "2.2.2.2")
        await reserve(greedy, 4 * UNIT)
        with pytest.raises(OverloadedError, match="requests-bytes-max"):
            await reserve(Reservation(budget, "1.1.1.1"), UNIT)
        with pytest.raises(TooLargeError):
            greedy.grow(UNIT)
        await reserve(other, 4 * UNIT)
        assert budget.held == 8 * UNIT
        for reservation in (greedy, other):
            reservation.close()
        assert (budget.held, dict(budget.held_by)) == (0, {})

    run(work())


def test_a_part_of_the_memory_is_reserved_for_callers_that_hold_little() -> None:
    async def work() -> None:
        budget = Budget(256 * UNIT, 0.5, 0.0)
        for caller in "ab":
            await reserve(Reservation(budget, caller), 96 * UNIT)
        for caller in "ac":
            with pytest.raises(OverloadedError):
                await reserve(Reservation(budget, caller), 9 * UNIT)
        # Also while one that holds much waits.
        budget.wait_s = 20.0
        waiting = asyncio.create_task(reserve(Reservation(budget, "a"), 9 * UNIT))
        await asyncio.sleep(0)
        little = int(LITTLE_SHARE * 256 * UNIT)
        for number in range(COUNT):
            reservation = Reservation(budget, f"d{number}")
            await reserve(reservation, little // 2)
            reservation.grow(little // 2)
        assert budget.held == 256 * UNIT
        assert not waiting.done()
        waiting.cancel()

    run(work())


def test_a_large_request_is_not_overtaken_forever_by_little_ones() -> None:
    async def work() -> None:
        budget = Budget(1024 * UNIT, 0.5, 20.0)
        little = int(LITTLE_SHARE * budget.bytes_max)
        reservations = [Reservation(budget, f"l{number}") for number in range(120)]
        for reservation in reservations:
            await reserve(reservation, little)
        large = asyncio.create_task(reserve(Reservation(budget, "large"), 256 * UNIT))
        await asyncio.sleep(0)
        late = [asyncio.create_task(reserve(Reservation(budget, f"m{number}"), little)) for number in range(30)]
        await asyncio.sleep(0)
        for reservation in reservations[:24]:
            reservation.close()
        await asyncio.wait_for(large, 10)
        assert not any(task.done() for task in late)
        for reservation in reservations[24:]:
            reservation.close()
        await asyncio.gather(*late[:16])

        for task in late:
            task.cancel()

    run(work())


def test_a_caller_that_holds_little_does_not_wait_behind_large_requests() -> None:
    async def work() -> None:
        budget = Budget(256 * UNIT, 0.5, 20.0)
        for caller in "ab":
            await reserve(Reservation(budget, caller), 96 * UNIT)
        littles = [Reservation(budget, f"l{number}") for number in range(COUNT)]
        for reservation in littles:
            await reserve(reservation, 2 * UNIT)
        large = asyncio.create_task(reserve(Reservation(budget, "a"), 9 * UNIT))
        little = asyncio.create_task(reserve(Reservation(budget, "x"), UNIT))
        await asyncio.sleep(0)
        assert not little.done()
        littles[0].close()
        await asyncio.wait_for(little, 10)
        assert not large.done()
        large.cancel()

    run(work())


def test_more_than_a_caller_may_ever_hold_is_refused_without_waiting() -> None:
    async def work() -> None:
        budget = budget_of(8 * UNIT, 0.5, 60.0)
        with pytest.raises(TooLargeError, match="requests-bytes-max"):
            await reserve(Reservation(budget, "a"), 5 * UNIT)

    run(work())


def test_large_requests_wait_and_are_served_in_order_while_small_ones_go_through() -> None:
    async def work() -> None:
        budget = budget_of(4 * UNIT, 1.0, 20.0)
        first, gone = Reservation(budget, "a"), []
        await reserve(first, 4 * UNIT)

        async def large(name: str, nbytes: int) -> None:
            await reserve(Reservation(budget, name), nbytes)
            gone.append(name)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(large("b", 3 * UNIT))
            await asyncio.sleep(0)
            tasks.create_task(large("c", UNIT))
            await asyncio.sleep(0)
            small = Reservation(budget, "a")
            await reserve(small, SMALL_BYTES)
            assert gone == []
            small.close()
            first.close()
        assert gone == ["b", "c"]

    run(work())


def test_a_request_behind_one_whose_caller_holds_its_whole_share_is_served_first() -> None:
    async def work() -> None:
        budget = budget_of(4 * UNIT, 0.5, 20.0)
        first, other = Reservation(budget, "a"), Reservation(budget, "c")
        await reserve(first, 2 * UNIT)
        await reserve(other, UNIT)
        async with asyncio.TaskGroup() as tasks:
            # Neither its caller's share nor the free memory suffices for this request.
            waiting = tasks.create_task(reserve(Reservation(budget, "a"), 2 * UNIT))
            await asyncio.sleep(0)
            await reserve(Reservation(budget, "b"), UNIT)
            assert not waiting.done()
            first.close()

    run(work())


def test_a_request_that_gives_up_holds_no_memory() -> None:
    async def work() -> None:
        budget = budget_of(UNIT, 1.0, 0.0)
        first = Reservation(budget, "a")
        await reserve(first, UNIT)
        late = Reservation(budget, "b")
        with pytest.raises(OverloadedError):
            await reserve(late, UNIT)
        first.close()
        late.close()
        assert budget.held == 0

    run(work())


def test_a_request_behind_one_that_gives_up_continues() -> None:
    async def work() -> None:
        budget = budget_of(4 * UNIT, 1.0, 20.0)
        await reserve(Reservation(budget, "a"), 3 * UNIT)
        large = asyncio.create_task(reserve(Reservation(budget, "b"), 2 * UNIT))
        await asyncio.sleep(0)
        behind = asyncio.create_task(reserve(Reservation(budget, "c"), UNIT))
        await asyncio.sleep(0)
        assert not behind.done()
        large.cancel()
        await asyncio.wait_for(behind, 20.0)
        assert budget.held == 4 * UNIT

    run(work())


def test_clients_take_turns() -> None:
    async def work() -> None:
        budget = budget_of(4 * UNIT, 1.0, 20.0)
        first, gone = Reservation(budget, "z"), []
        await reserve(first, 4 * UNIT)

        async def large(client: str, number: int) -> None:
            reservation = Reservation(budget, client)
            await reserve(reservation, 4 * UNIT)
            gone.append((client, number))
            reservation.close()

        async with asyncio.TaskGroup() as tasks:
            for client, number in (("a", 1), ("a", 2), ("a", 3), ("b", 1), ("b", 2), ("c", 1)):
                tasks.create_task(large(client, number))
            await asyncio.sleep(0)
            first.close()
        assert gone == [("a", 1), ("b", 1), ("c", 1), ("a", 2), ("b", 2), ("a", 3)]
        assert (budget.held, dict(budget.held_by)) == (0, {})

    run(work())


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_only_the_first_waiting_request_of_a_client_is_looked_at(share: float) -> None:
    async def work() -> None:
        budget = budget_of(4 * UNIT, share, 20.0)
        looks = budget.held_by = Looks()
        first, other = Reservation(budget, "a"), Reservation(budget, "b")
        await reserve(first, int(4 * UNIT * share))
        waiting = [asyncio.create_task(reserve(Reservation(budget, "a"), 2 * UNIT)) for _ in range(100)]
        await asyncio.sleep(0)
        for _ in range(100):
            other.take(1)
            other.close()
        for task in waiting[:99]:
            task.cancel()
        await asyncio.wait(waiting[:99])
        assert looks.count < 4 * 300
        first.close()
        await waiting[99]
        assert budget.held_by == {"a": 2 * UNIT}

    run(work())


def test_a_cancelled_reservation_gets_no_memory_before_its_task_runs() -> None:
    async def work() -> None:
        budget = budget_of(4 * UNIT, 1.0, 20.0)
        first = Reservation(budget, "a")
        await reserve(first, 4 * UNIT)
        leaving = asyncio.create_task(reserve(Reservation(budget, "b"), 4 * UNIT))
        behind = asyncio.create_task(reserve(Reservation(budget, "b"), 4 * UNIT))
        await asyncio.sleep(0)
        leaving.cancel()
        first.close()
        assert dict(budget.held_by) == {"b": 4 * UNIT}
        await behind
        assert leaving.cancelled()

    run(work())

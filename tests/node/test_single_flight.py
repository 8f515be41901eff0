"""One computation of a costly answer runs at a time, and no caller gets an answer that is older than its request."""

import asyncio

import pytest

from overwinter.node.single_flight import SingleFlight, SingleFlights


class Maker:
    """Computes numbers, each when it is released."""

    def __init__(self) -> None:
        self.begun = 0
        self.at_once = 0
        self.let = asyncio.Semaphore(0)

    async def make(self) -> int:
        self.begun += 1
        number = self.begun
        self.at_once += 1
        assert self.at_once == 1
        try:
            await self.let.acquire()
        finally:
            self.at_once -= 1
        if number == 13:
            raise ValueError("thirteen")
        return number


async def asking(shared: SingleFlight[int], count: int) -> list[asyncio.Task[int]]:
    tasks = [asyncio.ensure_future(shared.get()) for _ in range(count)]
    await asyncio.sleep(0)
    return tasks


def test_callers_during_a_computation_share_the_next_one():
    async def scene() -> None:
        maker = Maker()
        shared = SingleFlight(maker.make)
        [first] = await asking(shared, 1)
        others = await asking(shared, 900)
        maker.let.release()
        assert await first == 1
        maker.let.release()
        assert set(await asyncio.gather(*others)) == {2}
        maker.let.release()
        assert await shared.get() == 3

    asyncio.run(scene())


def test_a_cancelled_caller_does_not_cancel_the_others():
    async def scene() -> None:
        maker = Maker()
        shared = SingleFlight(maker.make)
        [first] = await asking(shared, 1)
        others = await asking(shared, 2)
        first.cancel()
        await asyncio.wait([first])
        maker.let.release()
        assert set(await asyncio.gather(*others)) == {2}

    asyncio.run(scene())


def test_a_failure_is_raised_and_the_next_computation_starts():
    async def scene() -> None:
        maker = Maker()
        maker.begun = 12
        shared = SingleFlight(maker.make)
        maker.let.release()
        with pytest.raises(ValueError, match="thirteen"):
            await shared.get()
        maker.let.release()
        assert await shared.get() == 14

    asyncio.run(scene())


def test_each_key_has_answers_of_its_own_and_leaves_nothing():
    async def scene() -> None:
        makers, shared = {"one": Maker(), "two": Maker()}, SingleFlights()
        tasks = [asyncio.ensure_future(shared.get(key, makers[key].make)) for key in ("one", "two", "one", "one")]
        await asyncio.sleep(0)
        for maker in makers.values():
            maker.let.release()
        assert await asyncio.gather(*tasks[:2]) == [1, 1]
        assert list(shared._flights) == ["one"]
        makers["one"].let.release()
        assert await asyncio.gather(*tasks[2:]) == [2, 2]
        assert shared._flights == {}

    asyncio.run(scene())

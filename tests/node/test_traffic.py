"""A promotion is checked against what other changes do at the same time."""

import asyncio
import threading

import msgspec
import pytest

from overwinter.core.errors import ConflictError, NotFoundError
from overwinter.core.events import Event, TrafficSet
from overwinter.core.versions import Share, Shares, Versions
from overwinter.node.fair_lock import FairLock
from overwinter.node.traffic import TrafficSplits

from .rig import until


class Function(msgspec.Struct):
    name: str
    tenant: str = "tests"
    inputs: tuple[()] = ()
    outputs: tuple[()] = ()
    state: str = "READY"
    reason: str = ""


class Fake:
    """Registry, pipelines and store in one. A check of a promotion waits until a test lets it end."""

    def __init__(self) -> None:
        self.answering = Versions([1, 2], (Share(1, 100),))
        self.may_end = asyncio.Event()
        self.changing = FairLock()
        self.checked: list[str] = []
        self.posted: list[Event] = []
        self.states: dict[int | None, str] = {}

    def view(self, name: str, version: int | None) -> Function:
        if not self.answering.numbers:
            raise NotFoundError(name)
        return Function(name, state=self.states.get(version, "READY"))

    def versions(self, name: str) -> list[int]:
        return self.answering.numbers

    def __contains__(self, name: str) -> bool:
        return False

    async def protect(self, name: str, default: Function) -> None:
        await self.may_end.wait()

    def protect_at_once(self, name: str, default: Function) -> None:
        self.checked.append(name)

    def put(self, name: str, shares: Shares) -> None:
        pass


def test_a_version_that_is_published_during_the_check_of_a_promotion_is_checked() -> None:
    async def main() -> None:
        fake = Fake()
        traffic = TrafficSplits(fake, fake, fake, fake.posted.append)
        new = Function("f")
        traffic.check_new(new, lambda name: fake.answering, 3)
        assert not fake.checked, "it does not answer"
        setting = asyncio.ensure_future(traffic.set("f", ()))
        await asyncio.sleep(0)
        traffic.check_new(new, lambda name: fake.answering, 3)
        assert fake.checked == ["f"]
        fake.may_end.set()
        await setting
        assert fake.posted == [TrafficSet("f", ())]

    asyncio.run(main())


def test_a_function_that_is_removed_before_the_turn_of_a_promotion_is_not_found() -> None:
    async def main() -> None:
        fake = Fake()
        traffic = TrafficSplits(fake, fake, fake, fake.posted.append)
        async with fake.changing.turn("other"):
            setting = asyncio.ensure_future(traffic.set("f", ()))
            await asyncio.sleep(0)
            fake.answering.numbers.clear()
        with pytest.raises(NotFoundError, match="f"):
            await setting
        assert not fake.posted

    asyncio.run(main())


def test_an_unloaded_version_does_not_become_the_one_that_answers() -> None:
    async def main() -> None:
        fake = Fake()
        fake.states[2] = "UNAVAILABLE"
        traffic = TrafficSplits(fake, fake, fake, fake.posted.append)
        for shares in ((), (Share(2, 100),)):
            with pytest.raises(ConflictError, match="load f@2"):
                await traffic.set("f", shares)
        fake.states[2] = "LOADING"
        with pytest.raises(ConflictError, match="on trial"):
            await traffic.set("f", (Share(2, 100),))
        fake.states[2] = "READY"
        setting = asyncio.ensure_future(traffic.set("f", ()))
        await asyncio.sleep(0)
        fake.states[2] = "UNAVAILABLE"
        fake.may_end.set()
        with pytest.raises(ConflictError, match="load f@2"):
            await setting
        assert not fake.posted

    asyncio.run(main())


def test_a_promotion_whose_caller_disconnects_while_it_is_stored_takes_effect() -> None:
    async def main() -> None:
        fake, stores, may_store = Fake(), threading.Event(), threading.Event()
        fake.may_end.set()

        def put(name: str, shares: Shares) -> None:
            stores.set()
            assert may_store.wait(60.0)

        fake.put = put
        setting = asyncio.ensure_future(TrafficSplits(fake, fake, fake, fake.posted.append).set("f", ()))
        await until(stores.is_set)
        setting.cancel()
        await asyncio.sleep(0)
        may_store.set()
        with pytest.raises(asyncio.CancelledError):
            await setting
        assert fake.posted == [TrafficSet("f", ())]

    asyncio.run(main())

"""Work runs one piece after another, round-robin by caller."""

import asyncio
import threading

import pytest

from overwinter.api.caller_thread import CallerThread
from overwinter.core.ids import TenantId


class Recorder:
    """Records for which caller and tenant each piece of work runs; a piece ends only after `go_on` is set."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.go_on = threading.Event()
        self.thread = CallerThread("test")

    def start(self, caller: str) -> asyncio.Task[None]:
        def work() -> None:
            self.ran.append(caller)
            assert self.go_on.wait(10)

        return asyncio.create_task(self.thread.run(caller[0], TenantId(caller[1:]), work))


def test_callers_take_turns() -> None:
    async def scene() -> None:
        recorder = Recorder()
        started = [recorder.start(caller) for caller in ["a1", "a1", "a1", "b1", "a2", "a2"]]
        await asyncio.sleep(0)
        recorder.go_on.set()
        await asyncio.gather(*started)
        assert recorder.ran == ["a1", "b1", "a2", "a1", "a2", "a1"]

    asyncio.run(scene())


def test_work_that_is_cancelled_before_its_turn_does_not_run() -> None:
    async def scene() -> None:
        recorder = Recorder()
        runs, *left, last = [recorder.start(caller) for caller in ["a1", "a1", "b1", "c1"]]
        await asyncio.sleep(0)
        for each in left:
            each.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.gather(*left)
        recorder.go_on.set()
        await asyncio.gather(runs, last)
        assert recorder.ran == ["a1", "c1"]

    asyncio.run(scene())

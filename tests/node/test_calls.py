"""Loads that callers request, and wakes that the node itself requests."""

import asyncio
from types import SimpleNamespace

import pytest

from overwinter.core.actions import LoadFinished
from overwinter.core.errors import ConflictError, NotFoundError
from overwinter.core.events import Removed, UnloadAsked
from overwinter.node.calls import Calls
from overwinter.node.quarantine import Quarantine
from overwinter.scheduler.published import Published
from tests.scheduler.world import World, spec


def test_a_successful_load_ends_the_quarantine_although_its_caller_was_cancelled(tmp_path):
    path = tmp_path / "quarantine.json"

    async def scene() -> None:
        quarantine = Quarantine(path)
        for function in ("loaded@1", "failed@1"):
            quarantine.add(function, ValueError("it failed"))
        calls = Calls([].append, Published(World().scheduler.cycle), quarantine)
        async with asyncio.TaskGroup() as group:
            loads = [group.create_task(calls.load(function)) for function in ("loaded@1", "failed@1")]
            await asyncio.sleep(0)
            for load in loads:
                load.cancel()
        calls.load_finished(LoadFinished("loaded@1"))
        calls.load_finished(LoadFinished("failed@1", "StoreError", "it is damaged"))

    asyncio.run(scene())
    known = Quarantine(path)
    assert known.reason("loaded@1") == ""
    assert "it failed" in known.reason("failed@1")


@pytest.mark.parametrize(("event", "error"), [(UnloadAsked, ConflictError), (Removed, NotFoundError)])
def test_a_function_that_was_unloaded_or_removed_is_not_woken(tmp_path, event, error):
    world, posted = World(), []
    world.deploy(spec())
    world.send(event("f@1"))

    async def wake() -> None:
        calls = Calls(posted.append, Published(world.scheduler.cycle), Quarantine(tmp_path / "quarantine.json"))
        with pytest.raises(error, match="f@1"):
            await calls.wake(SimpleNamespace(id="f@1"))

    asyncio.run(wake())
    assert posted == []

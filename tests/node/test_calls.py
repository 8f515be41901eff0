"""Calls of callers and of the node itself."""

import asyncio
from types import SimpleNamespace

import pytest

from overwinter.core.errors import ConflictError, NotFoundError
from overwinter.core.events import Removed, UnloadAsked
from overwinter.node.calls import Calls
from overwinter.node.quarantine import Quarantine
from overwinter.scheduler.published import Published
from tests.scheduler.world import World, spec


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

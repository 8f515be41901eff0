"""Completes a change whose caller leaves before its end."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from overwinter.core.errors import OverwinterError

T = TypeVar("T")


async def completed(change: Coroutine[Any, Any, T]) -> T:
    """Await a change that uses a thread. If the caller is cancelled, the thread continues, so the rest of the change
    must follow: each cancellation waits for it, and the caller keeps its locks until then.
    """
    task = asyncio.ensure_future(change)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        # Nobody waits for its error any more.
        with suppress(OverwinterError):
            task.result()
        raise

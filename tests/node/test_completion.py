"""Tests of changes that are completed although their caller is cancelled."""

import asyncio

import pytest

from overwinter.core.errors import NotFoundError
from overwinter.node.completion import completed


@pytest.mark.parametrize("cancellations", [1, 3])
@pytest.mark.parametrize("fails", [False, True])
def test_a_change_is_completed_before_any_cancellation_of_its_caller_takes_effect(cancellations: int, fails: bool):
    asyncio.run(cancel(cancellations, fails))


async def cancel(cancellations: int, fails: bool) -> None:
    """Cancel the caller of a change several times, and let the change end only then."""
    begun, may_end, ended = asyncio.Event(), asyncio.Event(), []

    async def change() -> None:
        begun.set()
        await may_end.wait()
        ended.append(True)
        if fails:
            raise NotFoundError("f")

    caller = asyncio.ensure_future(completed(change()))
    await begun.wait()
    for _ in range(cancellations):
        caller.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
    assert not caller.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended == [True]


def test_without_a_cancellation_the_result_is_returned_or_the_error_raised():
    async def change(fails: bool) -> int:
        if fails:
            raise NotFoundError("f")
        return 3

    assert asyncio.run(completed(change(False))) == 3
    with pytest.raises(NotFoundError):
        asyncio.run(completed(change(True)))

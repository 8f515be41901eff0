"""Tenants hold the lock in rotation, and never two at a time."""

import asyncio

import pytest

from overwinter.node.fair_lock import FairLock


def order_of(*tenants: str, cancelled: tuple[int, ...] = ()) -> list[str]:
    """Return the order in which turns that are requested at the same time begin."""
    had: list[str] = []
    inside = 0

    async def one(turns: FairLock, number: int, tenant: str) -> None:
        nonlocal inside
        async with turns.turn(tenant):
            inside += 1
            assert inside == 1
            had.append(f"{tenant}{number}")
            try:
                await asyncio.sleep(0)
            finally:
                inside -= 1

    async def everybody() -> None:
        turns = FairLock()
        tasks = [asyncio.ensure_future(one(turns, number, tenant)) for number, tenant in enumerate(tenants)]
        await asyncio.sleep(0)
        for number in cancelled:
            tasks[number].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(5), turns.turn("last"):
            had.append("last")

    asyncio.run(everybody())
    return had


def test_a_thousand_turns_of_one_tenant_delay_others_by_the_current_one_and_one_more():
    had = order_of(*["a"] * 1000, "b", "c")
    assert had[:4] == ["a0", "a1", "b1000", "c1001"]
    assert len(had) == 1003


def test_within_a_tenant_the_order_is_that_of_asking():
    assert order_of("a", "b", "a", "b") == ["a0", "b1", "a2", "b3", "last"]


def test_cancelled_waits_do_not_cost_their_tenant_a_turn():
    had = order_of("x", *"bbbb", *"aaa", cancelled=(1, 2, 3))
    assert had == ["x0", "b4", "a5", "a6", "a7", "last"]


@pytest.mark.parametrize("gone", [(0,), (1,), (0, 1), (1, 2), (0, 1, 2, 3)])
def test_a_cancelled_turn_or_wait_blocks_no_other(gone):
    had = order_of("a", "b", "a", "b", cancelled=gone)
    assert had[-1] == "last"
    assert {name for name in had if name[1:].isdigit()} >= {
        f"{tenant}{number}" for number, tenant in enumerate("abab") if number not in gone
    }

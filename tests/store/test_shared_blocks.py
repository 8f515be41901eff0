"""Amounts are the integral of equal parts, whichever holders come and go; nothing is lost or billed twice."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overwinter.store.shared_blocks import SharedBlocks

SIZES = {"a": 100, "b": 7, "c": 4096, "d": 1, "e": 333}
NEEDS = st.sets(st.sampled_from(sorted(SIZES))).map(lambda addresses: {a: SIZES[a] for a in sorted(addresses)})
STEPS = st.lists(st.tuples(st.floats(0, 50), st.sampled_from("xyz"), st.none() | NEEDS), max_size=30)


def parts(holding):
    """Each holder's bytes when the holders of a block pay equal parts of it."""
    holders = Counter(address for sizes in holding.values() for address in sizes)
    return {key: sum(nbytes / holders[a] for a, nbytes in sizes.items()) for key, sizes in holding.items()}


@given(STEPS)
def test_debts_are_the_integral_of_equal_parts(steps):
    blocks, holding, debts, now = SharedBlocks(), {}, dict.fromkeys("xyz", 0.0), 0.0
    paid = dict.fromkeys("xyz", 0.0)
    for seconds, holder, sizes in steps:
        now += seconds
        for other, nbytes in parts(holding).items():
            debts[other] += nbytes * seconds
        if holder in holding:
            paid[holder] += blocks.release(holder, now)
            del holding[holder]
        elif sizes is not None:
            blocks.hold(holder, sizes, now)
            holding[holder] = sizes
        for key in "xyz":
            others = set().union(*(sizes for other, sizes in holding.items() if other != key))
            own = {a: nbytes for a, nbytes in holding.get(key, {}).items() if a not in others}
            assert blocks.exclusive(key) == sum(own.values())
            held = {a: n for other, sizes in holding.items() if other != key for a, n in sizes.items()}
            alone = {a: n for a, n in held.items() if a not in holding.get(key, {})}
            rest = [other for other in "xyz" if other != key]
            assert blocks.held(*rest) == sum(held.values())
            assert blocks.exclusive(*rest) == sum(alone.values())
            assert paid[key] + blocks.uncharged(key, now) == pytest.approx(debts[key], rel=1e-9, abs=1e-6)
        assert blocks.nbytes == sum({a: n for sizes in holding.values() for a, n in sizes.items()}.values())


def test_nothing_is_kept_of_released_holders():
    blocks = SharedBlocks()
    blocks.hold("x", {"a": 10, "b": 2}, 0.0)
    blocks.hold("y", {"a": 10}, 4.0)
    assert blocks.release("x", 6.0) == 4 * 10 + 2 * 5 + 6 * 2
    assert blocks.release("y", 7.0) == 2 * 5 + 10
    assert blocks.release("y", 8.0) == 0.0
    assert (blocks.nbytes, blocks.held("x"), blocks.uncharged("x", 9.0)) == (0, 0, 0.0)


@given(holding=st.dictionaries(st.sampled_from("xyz"), NEEDS), seconds=st.floats(0, 50))
def test_the_release_of_all_holders_returns_what_each_of_them_owes(holding, seconds):
    together, apart = SharedBlocks(), SharedBlocks()
    for at, (holder, sizes) in enumerate(holding.items()):
        together.hold(holder, sizes, float(at))
        apart.hold(holder, sizes, float(at))
    now = len(holding) + seconds
    owed = {holder: apart.uncharged(holder, now) for holder in holding}
    assert together.release_all(now) == pytest.approx(owed)
    assert (together.nbytes, together.held("x"), together.release_all(now)) == (0, 0, {})

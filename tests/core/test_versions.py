"""Requests without a version are divided exactly, and each choice follows from the earlier choices."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overwinter.core.errors import CallerError
from overwinter.core.versions import WHOLE, Share, Versions, check_shares

CUTS = st.lists(st.integers(1, WHOLE - 1), max_size=5, unique=True).map(sorted)


def shares_of(cuts: list[int]) -> tuple[Share, ...]:
    """Return the shares of a whole that is divided at these points."""
    ends = [0, *cuts, WHOLE]
    return tuple(Share(number, end - ends[number - 1]) for number, end in enumerate(ends[1:], 1))


@given(cuts=CUTS, skipped=st.integers(0, 250))
def test_any_hundred_requests_in_a_row_are_divided_exactly(cuts, skipped):
    shares = shares_of(cuts)
    versions = Versions([share.version for share in shares])
    versions.split(shares)
    for _ in range(skipped):
        versions.choose()
    turns = Counter(versions.choose() for _ in range(WHOLE))
    assert turns == {share.version: share.percent for share in shares}


def test_the_turns_of_a_small_share_are_spread_over_those_of_a_large_one():
    versions = Versions([1, 2])
    versions.split((Share(1, 90), Share(2, 10)))
    turns = [versions.choose() for _ in range(30)]
    places = [number for number, version in enumerate(turns) if version == 2]
    assert len(places) == 3
    assert {later - sooner for sooner, later in pairwise(places)} == {10}


def test_the_newest_version_answers_until_another_one_is_promoted():
    versions = Versions([1])
    versions.add(3)
    versions.add(2)
    assert (versions.choose(), versions.default, versions.percent(3), versions.percent(2)) == (3, 3, 100, 0)
    versions.split((Share(2, 100),))
    versions.add(4)
    assert (versions.choose(), versions.default, versions.percent(4), versions.percent(2)) == (2, 2, 0, 100)
    check_shares(())
    versions.split(())
    assert (versions.choose(), versions.default) == (4, 4)


def test_the_version_with_the_largest_share_is_the_default_and_of_equal_ones_the_newest():
    versions = Versions([1, 2, 3])
    for shares, default in (((Share(1, 90), Share(2, 10)), 1), ((Share(1, 50), Share(2, 50)), 2)):
        check_shares(shares)
        versions.split(shares)
        assert versions.default == default


def test_a_split_ends_when_a_version_of_it_is_removed():
    versions = Versions([1, 2, 3])
    versions.split((Share(1, 50), Share(2, 50)))
    versions.discard(3)
    assert versions.percent(1) == 50
    versions.discard(2)
    assert (versions.choose(), versions.shares) == (1, ())
    versions.split((Share(7, 100),))
    assert (versions.choose(), versions.shares) == (1, ())


@pytest.mark.parametrize(
    ("shares", "said"),
    [(((1, 90), (2, 20)), "110 per cent"), (((1, 99),), "99 per cent"), (((1, 50), (1, 50)), "two shares")],
)
def test_shares_that_do_not_add_up_to_100_or_repeat_a_version_are_refused(shares, said):
    with pytest.raises(CallerError, match=said):
        check_shares(tuple(Share(*share) for share in shares))

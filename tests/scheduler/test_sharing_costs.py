"""Whether it is faster that functions share runs, learned from observed times."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overwinter.core.profile import Point
from overwinter.scheduler.sharing_costs import RECENT, TRY_OTHER_FIRST, TRY_OTHER_LAST, Sharing

POINT = Point(1, 9, 8, 1, 0.0)
ALONE_S = 0.1


def runs(sharing: Sharing, count: int, cost: Callable[[], float], alone_s: float = ALONE_S) -> list[bool]:
    """Return which of this many runs of functions with endless work were shared; a shared run takes `cost` times as
    long as separate ones.
    """
    joined = []
    for _ in range(count):
        joined.append(sharing.joins)
        if joined[-1]:
            sharing.observe(POINT, [1] * 4, cost() * 4 * alone_s)
        else:
            sharing.observe(POINT, [1], alone_s)
    return joined


def test_shared_runs_that_fail_count_as_tries_of_sharing():
    sharing = Sharing()
    runs(sharing, 100, lambda: 3.0)
    joined = []
    for _ in range(200):
        joined.append(sharing.joins)
        if joined[-1]:
            sharing.count(several=True)
        else:
            sharing.observe(POINT, [1], ALONE_S)
    assert 0 < joined.count(True) <= 20


@given(cost=st.floats(0.2, 0.95))
def test_runs_are_shared_except_now_and_then_if_sharing_is_faster(cost):
    joined = runs(Sharing(), 2000, lambda: cost)
    assert joined[0]
    assert not all(joined[-TRY_OTHER_LAST - 1 :]), "what a run alone takes is not looked at any more"
    assert joined.count(False) <= 20


@given(cost=st.floats(1.01, 5.0))
def test_runs_are_shared_ever_more_seldom_if_sharing_is_slower(cost):
    sharing = Sharing()
    joined = runs(sharing, 2000, lambda: cost)
    assert not sharing.is_faster
    assert sharing.time_ratio == pytest.approx(cost)
    assert any(joined[-TRY_OTHER_LAST - 1 :]), "it is not tried again"
    # Including those of the beginning, before a separate run was observed.
    assert joined.count(True) <= TRY_OTHER_FIRST + 20


@settings(max_examples=50)
@given(
    cost=st.floats(0.3, 3.0).filter(lambda cost: not 0.8 < cost < 1.25),
    noise=st.lists(st.floats(0.9, 1.1), min_size=7, max_size=7),
)
def test_the_faster_kind_of_run_is_found_although_times_vary(cost, noise):
    at = iter(noise * 1000)
    joined = runs(Sharing(), 1000, lambda: cost * next(at))
    assert (joined.count(True) > 900) if cost < 1 else (joined.count(True) < 100)


@pytest.mark.parametrize(("before", "after"), [(0.5, 1.5), (1.5, 0.5)])
def test_when_times_change_so_does_the_decision_to_share_runs(before, after):
    sharing = Sharing()
    runs(sharing, 2000, lambda: before)
    assert sharing.is_faster == (before < 1)
    runs(sharing, TRY_OTHER_LAST + RECENT * (TRY_OTHER_FIRST + 1), lambda: after)
    assert sharing.is_faster == (after < 1)


def test_one_slow_shared_run_does_not_end_sharing_for_long():
    """The first shared run in a worker includes the verification of its split."""
    sharing = Sharing()
    sharing.observe(POINT, [1], ALONE_S)
    slow = iter([5.0, *[0.5] * 100])
    assert runs(sharing, 50, lambda: next(slow)).count(True) > 35
    slow = iter([5.0, *[0.5] * 300])
    assert sum(runs(sharing, 300, lambda: next(slow))) > 285


def test_shared_runs_do_not_seem_faster_when_the_machine_becomes_slower():
    """Separate runs are observed often enough for a comparison, whatever the other load."""
    sharing = Sharing()
    runs(sharing, 500, lambda: 1.2)
    assert sum(runs(sharing, 500, lambda: 1.2, 3 * ALONE_S)) < 25


def test_functions_with_several_requests_are_compared_with_batches_of_their_own():
    sharing = Sharing()
    for _ in range(RECENT):
        sharing.observe(POINT, [1], 0.1)
        sharing.observe(POINT, [4], 0.16)
    sharing.observe(POINT, [4, 4], 0.36)
    assert sharing.time_ratio == pytest.approx(0.36 / 0.32)
    # Where no time was observed, the nearest batches are used: eight would take 320 ms, and five 200.
    sharing.observe(POINT, [8, 5], 0.26)
    assert sharing.time_ratio == pytest.approx(0.26 / 0.52)


def test_times_in_workers_with_a_different_number_of_cores_are_not_compared():
    sharing = Sharing()
    sharing.observe(Point(4, 9, 8, 1, 0.0), [1], 0.1)
    sharing.observe(POINT, [1, 1], 0.1)
    assert sharing.time_ratio is None
    assert sharing.is_faster

"""The value of idle workers under each rule, when they differ in one property."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from overwinter.scheduler.policies.worker_eviction import Idle, cost_aware, counted, least_recently_used

IDLE = st.builds(
    Idle,
    now=st.floats(0, 1e6),
    clock=st.floats(0, 1.0),
    uses=st.floats(1.0, 1e3),
    cost_s=st.floats(1e-3, 10.0),
    nbytes=st.integers(1 << 10, 1 << 34),
)


def test_the_value_is_the_clock_plus_uses_times_cost_per_byte():
    assert cost_aware(Idle(now=7.0, clock=5.0, uses=3.0, cost_s=0.5, nbytes=100)) == 5.0 + 3.0 * 0.5 / 100
    assert cost_aware(Idle(now=7.0, clock=0.0, uses=1.0, cost_s=0.5, nbytes=0)) == 0.5


@given(IDLE)
def test_use_cost_and_small_size_raise_the_value_and_none_is_below_the_clock(idle):
    without_clock = replace(idle, clock=0.0)
    value = cost_aware(without_clock)
    assert cost_aware(replace(without_clock, uses=2 * idle.uses)) > value
    assert cost_aware(replace(without_clock, cost_s=2 * idle.cost_s)) > value
    assert cost_aware(replace(without_clock, nbytes=2 * idle.nbytes)) < value
    assert cost_aware(idle) >= idle.clock


@given(IDLE, IDLE)
def test_the_baseline_looks_at_the_time_of_the_last_use_alone(one, other):
    assert (least_recently_used(one) < least_recently_used(other)) == (one.now < other.now)


@pytest.mark.parametrize("gap_s", [0.1, 60.0, 3600.0])
def test_a_count_decays_and_orders_workers_by_use(gap_s):
    uses = seldom = 0.0
    for _ in range(100):
        uses, seldom = counted(uses, gap_s), counted(seldom, 2 * gap_s)
    assert uses > seldom >= 1.0
    assert counted(uses, 86_400.0) == pytest.approx(1.0)

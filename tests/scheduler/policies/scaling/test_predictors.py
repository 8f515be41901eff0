"""The rates that each predictor expects."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overwinter.scheduler.policies.scaling.predictors import PREDICTORS

RATES = [10.0, 10.0, 40.0, 20.0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("last-value", 20.0), ("k-last-value", 30.0), ("on-demand", 15.0), ("peak", 40.0), ("window", 22.5)],
)
def test_each_predictor_derives_its_rate_from_the_past(name, expected):
    assert PREDICTORS[name](RATES) == expected


@pytest.mark.parametrize("name", sorted(PREDICTORS))
def test_without_a_past_nothing_is_expected(name):
    assert PREDICTORS[name]([]) == 0


def test_the_window_rises_immediately_and_falls_slowly():
    window = PREDICTORS["window"]
    assert window([1.0, 100.0]) == 100
    assert 10 < window([100.0, 100.0, 10.0]) < 100


@pytest.mark.parametrize("name", sorted(PREDICTORS))
@given(rates=st.lists(st.floats(0, 1e6), min_size=1))
def test_at_most_one_and_a_half_times_the_highest_past_rate_is_expected(name, rates):
    assert 0 <= PREDICTORS[name](rates) <= 1.5 * max(rates) * (1 + 1e-9)

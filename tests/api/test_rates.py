"""A rate limit allows its rate, and a burst of at most the events of one second, or of one event."""

import pytest

from overwinter.api.rates import Rate


def passed(rate: Rate, at: float, tries: int) -> int:
    return sum(rate.take(at) == 0.0 for _ in range(tries))


def test_a_burst_is_a_second_s_worth_and_comes_back_with_time() -> None:
    rate = Rate(10)
    assert passed(rate, 100.0, 50) == 10
    assert passed(rate, 100.25, 50) == 2
    assert passed(rate, 900.0, 50) == 10


def test_a_request_after_its_retry_after_is_admitted() -> None:
    rate = Rate(4)
    assert passed(rate, 5.0, 10) == 4
    wait = rate.take(5.1)
    assert wait == pytest.approx(0.15)
    assert rate.take(5.1 + wait + 1e-9) == 0.0


def test_a_rate_below_one_per_second_still_allows_one_request() -> None:
    rate = Rate(0.5)
    assert rate.take(1.0) == 0.0
    assert rate.take(1.0) == pytest.approx(2.0)
    assert rate.take(3.0) == 0.0


def test_a_clock_that_does_not_advance_allows_no_further_requests() -> None:
    rate = Rate(1)
    assert passed(rate, 7.0, 100) == 1
    assert passed(rate, 6.0, 100) == 0

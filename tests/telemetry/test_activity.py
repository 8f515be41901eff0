"""Recent rates and latencies contain only recent requests."""

import pytest

from overwinter.telemetry.activity import WINDOW_S, recent_latency
from overwinter.telemetry.statistics import ANSWERS_KEPT


def test_nothing_of_late_has_no_latency():
    assert recent_latency([], 100.0) == (0.0, None, None)
    assert recent_latency([(1.0, 5.0)], 1.0 + WINDOW_S) == (0.0, None, None)


def test_old_answers_do_not_count():
    answers = [(0.0, 9.0), *((50.0 + n, n / 100) for n in range(10))]
    rate, p50, p99 = recent_latency(answers, 70.0)
    assert (rate, p50, p99) == (pytest.approx(10 / WINDOW_S), 0.05, 0.09)


def test_more_answers_than_are_remembered_are_a_rate_of_their_own_time():
    rate, _, _ = recent_latency([(100.0 + n / 100, 1.0) for n in range(ANSWERS_KEPT)], 100.0 + ANSWERS_KEPT / 100)
    assert rate == pytest.approx(100)

"""Recent rates and latencies contain only recent requests, and a function is described by the version that answers."""

from collections import Counter

import pytest

from overwinter.core.config import SchedulerConfig
from overwinter.core.events import Deployed, TrafficSet
from overwinter.core.versions import Share
from overwinter.scheduler.scheduler import Scheduler
from overwinter.store.host import VerificationCounts
from overwinter.telemetry.accounts import Accounts
from overwinter.telemetry.activity import WINDOW_S, activity, recent_latency
from overwinter.telemetry.sources import Sources
from overwinter.telemetry.statistics import ANSWERS_KEPT, Statistics
from tests.scheduler.test_snapshot import taken
from tests.scheduler.world import spec


def test_a_function_is_described_by_the_version_that_answers():
    scheduler, statistics = Scheduler(SchedulerConfig()), Statistics()
    sources = Sources(SchedulerConfig(), statistics, Accounts(), VerificationCounts(), Counter())

    def shown() -> float | None:
        [function] = activity(sources, taken(scheduler, 0.0), 0.0).functions
        return function.slo_ms

    for event, slo_ms in (
        (Deployed(spec("f", 1, slo_ms=100)), 100),
        (Deployed(spec("f", 2, slo_ms=200)), 200),
        (TrafficSet("f", (Share(1, 100),)), 100),
        (Deployed(spec("f", 3, slo_ms=300)), 100),
        (TrafficSet("f", ()), 300),
        (Deployed(spec("f", 4, slo_ms=400), on_trial=True), 300),
    ):
        statistics.observe(0.0, event, scheduler.handle(event, 0.0))
        assert shown() == slo_ms


def test_without_recent_answers_there_is_no_latency():
    assert recent_latency([], 100.0) == (0.0, None, None)
    assert recent_latency([(1.0, 5.0)], 1.0 + WINDOW_S) == (0.0, None, None)


def test_old_answers_do_not_count():
    answers = [(0.0, 9.0), *((50.0 + n, n / 100) for n in range(10))]
    rate, p50, p99 = recent_latency(answers, 70.0)
    assert (rate, p50, p99) == (pytest.approx(10 / WINDOW_S), 0.05, 0.09)


@pytest.mark.parametrize("now_behind_s", [0.0, 1.0, 5.0])
def test_if_not_all_answers_are_kept_the_rate_is_that_of_the_time_which_the_kept_ones_cover(now_behind_s):
    answers = [(100.0 + n / 100, 1.0) for n in range(ANSWERS_KEPT)]
    rate, _, _ = recent_latency(answers, 100.0 + ANSWERS_KEPT / 100 - now_behind_s)
    assert rate == pytest.approx(100, rel=0.01)

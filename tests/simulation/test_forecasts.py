"""An oracle reports the true future rates, and the scheduler of a scenario with one uses them."""

import io
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overwinter.core.events import Arrived, RateForecast
from overwinter.core.journal import read_journal
from overwinter.simulation.forecasts import FORECASTS_PER_PERIOD, rates_ahead
from overwinter.simulation.world import World
from tests.simulation.scenes import function, scene

BURSTY = {"kind": "bursty", "rate": 2.0, "factor": 8.0, "every_s": 20.0, "length_s": 5.0}


@given(st.lists(st.floats(0, 100), max_size=60).map(sorted), st.sampled_from([0.5, 10.0, 30.0]))
def test_each_rate_is_that_of_the_period_that_follows(times, period_s):
    result = list(islice(rates_ahead(iter(times), period_s), 40))
    for number, (at, rate) in enumerate(result):
        assert at == number * period_s / FORECASTS_PER_PERIOD
        assert rate == sum(at <= time < at + period_s for time in times) / period_s


def test_no_arrival_is_read_before_it_is_needed():
    read = []

    def times():
        for second in range(100):
            read.append(second)
            yield float(second)

    next(rates_ahead(times(), 10.0))
    assert read == list(range(11))


def steps_of(policy: str, **changes):
    file = io.BytesIO()
    table = {"scheduler": {"policy": policy}, "seed": 5} | changes
    report = World(scene(function(workload=BURSTY), **table), journal=file, checked=True).run()
    file.seek(0)
    return report, list(read_journal(file)[1])


def test_the_world_forecasts_the_arrivals_that_follow():
    report, steps = steps_of("oracle")
    came = [step.now for step in steps if isinstance(step.event, Arrived)]
    results = [step for step in steps if isinstance(step.event, RateForecast)]
    assert [step.now for step in results] == [pytest.approx(number) for number in range(60)]
    for step in results:
        assert step.event.rate == sum(step.now <= at < step.now + 10 for at in came) / 10
    assert len({step.event.rate for step in results}) > 5
    assert report.total.lost == 0


def test_only_an_oracle_gets_forecasts_and_the_requests_are_the_same():
    oracle, mls = steps_of("oracle")[1], steps_of("mls")[1]
    assert not any(isinstance(step.event, RateForecast) for step in mls)
    asked = [[step.now for step in steps if isinstance(step.event, Arrived)] for steps in (oracle, mls)]
    assert asked[0] == asked[1]


def test_an_oracle_attains_more_than_mls_and_does_not_scale_in_while_the_rate_rises():
    """While the rate rises, workers for the rate of the last period do not suffice, and those for the next one do."""
    triangle = {"kind": "periodic", "low": 1.0, "high": 60.0, "period_s": 120.0}
    costly = function(
        latency_ms={"1": 200}, serial=0.05, settings={"slo_ms": 400, "threads": 4, "max_workers": 32}, workload=triangle
    )
    reports = {
        policy: World(scene(costly, node={"cores": 64}, scheduler={"policy": policy}, duration_s=120)).run()
        for policy in ("mls", "oracle")
    }
    within = {policy: report.total.attainment for policy, report in reports.items()}
    assert within["oracle"] > within["mls"]
    workers = {policy: [sample.workers for sample in report.samples] for policy, report in reports.items()}
    rising = [before <= after for before, after in pairwise(workers["oracle"][:300])]
    assert all(rising)

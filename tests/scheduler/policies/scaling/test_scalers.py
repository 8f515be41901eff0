"""Properties of every scaler: it serves the rate or reports that it cannot, stays within its resources, reaches a
stable state, and always terminates.
"""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overwinter.core.profile import Point
from overwinter.scheduler.policies.scaling.names import SCALERS
from tests.scheduler.policies.scaling.profiles import done, point, scaling_input, scaling_inputs, worker

ALL = sorted(SCALERS)
WAITS_FOR_BATCH = {"overwinter", "dts", "dts-cores", "tetris-ro", "exact", "infless"}
ROUNDS = 8
NEARLY = 1 - 1e-6


def in_time(name, each, slo_s):
    """The condition of equations (2) and (3) of Tetris, or (1) of AsyFunc."""
    return each.latency_s <= (slo_s / 2 if name in WAITS_FOR_BATCH and each.batch > 1 else slo_s)


def capacity(name, asked, slo_infeasible, smaller=True):
    """Return the rate that the workers serve within the SLO, with their own batch or, if `smaller`, a smaller one."""
    slo_s = math.inf if asked.slo_s is None or slo_infeasible else asked.slo_s
    total = 0.0
    for each in asked.workers:
        own = each.point
        runs = [p for p in asked.points if (p.cores, p.concurrency) == (own.cores, own.concurrency)]
        runs = [p for p in runs if p.batch == own.batch or (smaller and p.batch < own.batch)]
        total += max((p.throughput for p in runs if in_time(name, p, slo_s)), default=0.0)
    return total


each_scaler = pytest.mark.parametrize("name", ALL)


@each_scaler
@settings(max_examples=25, deadline=None)
@given(asked=scaling_inputs())
def test_a_rate_is_served_or_the_unserved_part_is_returned(name, asked):
    said = SCALERS[name](asked)
    after = capacity(name, done(asked, said), said.slo_infeasible)
    assert after + said.unserved >= asked.rate * NEARLY
    # A smaller batch may be faster, and not every scaler uses that.
    assert said.unserved == 0 or capacity(name, done(asked, said), said.slo_infeasible, smaller=False) < asked.rate


@each_scaler
@settings(max_examples=25, deadline=None)
@given(asked=scaling_inputs(bounded=True))
def test_what_starts_has_room(name, asked):
    left = done(asked, SCALERS[name](asked))
    assert left.free_cores >= 0 or left.free_cores >= asked.free_cores
    assert left.free_workers >= 0
    assert left.free_bytes >= -1 or left.free_bytes >= asked.free_bytes
    assert left.free_runs >= 0 or left.free_runs >= asked.free_runs


@each_scaler
@settings(max_examples=25, deadline=None)
@given(asked=scaling_inputs(bounded=False))
def test_what_starts_meets_the_slo_unless_it_is_reported_as_infeasible(name, asked):
    said = SCALERS[name](asked)
    slo_s = math.inf if asked.slo_s is None else asked.slo_s
    started = [each for each in asked.points if each.configuration in said.start]
    if said.slo_infeasible:
        assert {each.latency_s for each in started} <= {min(each.latency_s for each in asked.points)}
    else:
        assert all(in_time(name, each, slo_s) for each in started)
        assert said.unserved == 0 or not any(in_time(name, each, slo_s) for each in asked.points)


@each_scaler
@settings(max_examples=25, deadline=None)
@given(asked=scaling_inputs())
def test_the_same_rate_reaches_a_stable_state(name, asked):
    """Only the first decision starts workers, and no started worker is stopped. The default scaler may start workers
    later, and stop started ones after a stop that made room for a cheaper set.
    """
    old = {each.worker for each in asked.workers}
    said = [SCALERS[name](asked)]
    while (said[-1].start or said[-1].stop) and len(said) < ROUNDS:
        assert not (said[-1].start and said[-1].stop)
        made_room = name == "overwinter" and any(earlier.stop for earlier in said[:-1])
        assert made_room or old.issuperset(said[-1].stop)
        asked = done(asked, said[-1])
        said.append(SCALERS[name](asked))
    assert said[-1].start == said[-1].stop == ()
    if name != "overwinter":
        assert not any(later.start for later in said[1:])
        assert len(said) <= 3


@each_scaler
@settings(max_examples=25, deadline=None)
@given(asked=scaling_inputs())
def test_what_stops_is_not_needed(name, asked):
    said = SCALERS[name](asked)
    left = capacity(name, done(asked, said), said.slo_infeasible)
    assert not said.stop or left * NEARLY >= asked.rate
    assert not said.stop or len(said.stop) < len(asked.workers)


@each_scaler
def test_a_rate_between_beta_and_alpha_of_the_capacity_changes_nothing(name):
    made_as = point(latency_s=0.1)
    workers = tuple(worker(number, made_as) for number in range(10))
    for rate, changes in ((81, True), (79, False), (61, False), (53, True)):
        said = SCALERS[name](scaling_input(rate, [made_as], workers=workers))
        assert bool(said.start or said.stop) == changes


@each_scaler
def test_the_least_loaded_workers_are_stopped_first(name):
    made_as = point(latency_s=0.1)
    workers = tuple(worker(number, made_as, load) for number, load in enumerate([0.9, 0.1, 0.5]))
    assert SCALERS[name](scaling_input(5, [made_as], workers=workers)).stop == (1, 2)


@each_scaler
def test_without_requests_all_workers_but_one_are_stopped_even_if_none_meets_the_slo(name):
    slow, fast = point(cores=1, latency_s=0.9), point(cores=2, latency_s=0.3)
    workers = tuple(worker(number, slow) for number in range(3))
    said = SCALERS[name](scaling_input(0, [slow, fast], workers=workers))
    assert said.start == ()
    assert len(said.stop) == 2


@each_scaler
def test_if_no_configuration_is_in_time_the_fastest_serves_and_that_is_reported(name):
    points = [point(cores=1, latency_s=0.9), point(cores=2, latency_s=0.5), point(cores=2, batch=2, latency_s=0.8)]
    said = SCALERS[name](scaling_input(1, points))
    assert said.slo_infeasible
    assert said.start == (points[1].configuration,)
    assert SCALERS[name](done(scaling_input(1, points), said)).start == ()


@each_scaler
def test_without_an_slo_everything_is_in_time(name):
    said = SCALERS[name](scaling_input(1, [point(latency_s=3600.0)], slo_s=None))
    assert not said.slo_infeasible
    assert said.start


@each_scaler
def test_without_a_profile_no_worker_starts(name):
    said = SCALERS[name](scaling_input(5, []))
    assert (said.start, said.unserved, said.slo_infeasible) == ((), 5, False)


@each_scaler
def test_an_endless_rate_takes_all_room(name):
    said = SCALERS[name](scaling_input(math.inf, [point(cores=2)], free_cores=5.0))
    assert len(said.start) == 2
    assert said.unserved == math.inf


@each_scaler
def test_a_worker_that_became_too_slow_is_stopped_when_others_serve_the_rate(name):
    slow, fast = point(cores=1, latency_s=0.9), point(cores=2, latency_s=0.1)
    workers = (worker(1, slow, load=1.0), worker(2, fast))
    assert SCALERS[name](scaling_input(7, [slow, fast], workers=workers)).stop == (1,)


@each_scaler
def test_an_infinite_sum_of_rates_does_not_make_the_unserved_rate_nan(name):
    endless = point(latency_s=1e-308)
    said = SCALERS[name](scaling_input(7, [endless], workers=(worker(1, endless), worker(2, endless)), slo_s=None))
    assert not math.isnan(said.unserved)


numbers = st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, 1e-300) | st.just(0.0)
anything = st.builds(
    Point,
    st.integers(1, 64),
    st.integers(0, 1 << 40),
    st.integers(1, 64),
    st.integers(1, 8),
    numbers | st.floats(1e-6, 10),
)


@each_scaler
@settings(max_examples=40, deadline=None)
@given(
    rate=numbers,
    slo_s=st.none() | numbers,
    points=st.lists(anything, max_size=6),
    standing=st.lists(anything, max_size=4),
    cores=st.floats(0, math.inf),
    workers=st.integers(0, 50),
    nbytes=st.floats(0, math.inf),
    runs=st.just(math.inf) | st.integers(0, 50),
    macs=st.integers(0, 10**13),
)
def test_any_numbers_end_in_a_decision(name, rate, slo_s, points, standing, cores, workers, nbytes, runs, macs):
    asked = scaling_input(
        rate,
        points,
        slo_s=slo_s,
        workers=tuple(worker(number, each) for number, each in enumerate(standing)),
        free_cores=cores,
        free_workers=workers,
        free_bytes=nbytes,
        free_runs=runs,
        macs=macs,
        weight_bytes=macs // 1000,
    )
    said = SCALERS[name](asked)
    assert len(said.start) <= workers
    assert not math.isnan(said.unserved)
    assert said == SCALERS[name](asked)

"""The largest gap between the greedy choices and those of the integer program."""

import math
from importlib import import_module
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overwinter.core.errors import MachineError
from overwinter.scheduler.policies.scaling import default, dts, exact
from overwinter.scheduler.policies.scaling.selection import Limits, Selection
from tests.scheduler.policies.scaling.profiles import MIB, point, profiles

SAME = 1 + 1e-6
"""The solver's own tolerance."""

TINY = [point(mib=mib, latency_s=1 / rate) for mib, rate in [(60, 6), (51, 5), (33, 3), (150, 17), (90, 8)]]

cases = {
    "points": profiles(),
    "size": st.floats(0.01, 20),
    "slack": st.floats(1, 8),
    "core_bytes": st.sampled_from([0, 60 * MIB]),
}


def sized(points, size, slack):
    """Return a rate that is a multiple of the largest worker's, and an SLO that is a multiple of the fastest run."""
    return size * max(each.throughput for each in points), slack * min(each.latency_s for each in points)


def weighing(core_bytes):
    return lambda each: each.memory_bytes + core_bytes * each.cores


def total(selection, cost):
    return sum(map(cost, selection.chosen))


@settings(max_examples=30, deadline=None)
@given(**cases)
def test_dts_costs_at_most_one_worker_more_than_the_best(points, size, slack, core_bytes):
    (rate, slo_s), cost = sized(points, size, slack), weighing(core_bytes)
    greedy, best = dts.select(points, rate, slo_s, cost), exact.select(points, rate, slo_s, cost)
    assert greedy.unserved == best.unserved == 0
    assert len(set(greedy.chosen)) == 1
    assert total(greedy, cost) <= (total(best, cost) + cost(greedy.chosen[0])) * SAME


@settings(max_examples=30, deadline=None)
@given(**cases)
def test_the_default_costs_no_more_than_dts_and_at_most_one_worker_more_than_the_best(points, size, slack, core_bytes):
    (rate, slo_s), cost = sized(points, size, slack), weighing(core_bytes)
    mended, best = default.select(points, rate, slo_s, cost), exact.select(points, rate, slo_s, cost)
    assert mended.unserved == 0
    assert total(mended, cost) <= total(dts.select(points, rate, slo_s, cost), cost)
    assert total(mended, cost) <= (total(best, cost) + max(map(cost, best.chosen))) * SAME
    assert total(best, cost) <= total(mended, cost) * SAME


@pytest.mark.parametrize("select", [dts.select, default.select, exact.select])
@settings(max_examples=30, deadline=None)
@given(points=profiles(), size=st.floats(0, 20), slack=st.floats(0, 8))
def test_a_selection_meets_the_slo_and_serves_the_rate_except_the_unserved_part(select, points, size, slack):
    rate, slo_s = sized(points, size, slack)
    selection = select(points, rate, slo_s, weighing(0))
    assert all(each.latency_s <= (slo_s if each.batch == 1 else slo_s / 2) for each in selection.chosen)
    assert sum(each.throughput for each in selection.chosen) + selection.unserved >= rate / SAME
    assert selection.unserved in (0, rate)


@pytest.mark.parametrize("select", [dts.select, default.select, exact.select])
@settings(max_examples=30, deadline=None)
@given(
    points=profiles(), size=st.floats(0, 20), cores=st.integers(0, 9), workers=st.integers(0, 5), mib=st.floats(0, 2000)
)
def test_limits_hold_and_rate_is_left_unserved_only_if_nothing_more_fits(select, points, size, cores, workers, mib):
    rate, _ = sized(points, size, 1)
    limits = Limits(float(cores), workers, mib * MIB)
    selection = select(points, rate, math.inf, weighing(0), limits)
    cores -= sum(each.cores for each in selection.chosen)
    nbytes = limits.nbytes - sum(each.memory_bytes for each in selection.chosen)
    left = workers - len(selection.chosen)
    assert min(cores, left) >= 0
    assert nbytes >= -1
    if selection.unserved:
        assert not [each for each in points if left and each.cores <= cores and each.memory_bytes <= nbytes]


def test_the_last_request_a_second_costs_dts_a_large_worker_and_the_default_a_small_one():
    large, small = point(cores=4, mib=1000, latency_s=0.001), point(mib=50, latency_s=0.1)
    assert dts.select([large, small], 1.0, 1.0, weighing(0)).chosen == (large,)
    for select in (default.select, exact.select):
        assert select([large, small], 1.0, 1.0, weighing(0)).chosen == (small,)
        assert set(select([large, small], 1005.0, 1.0, weighing(0)).chosen) == {large, small}


def test_the_default_takes_two_small_workers_where_the_best_ratio_is_too_large():
    large, small = point(mib=1000, latency_s=0.001), point(mib=10, latency_s=0.2)
    assert default.select([large, small], 10.0, 1.0, weighing(0)).chosen == (small, small)


def test_the_integer_program_finds_what_dts_does_not():
    best_ratio, other = point(mib=60, latency_s=1 / 6), point(mib=51, latency_s=1 / 5)
    costs = [
        total(select([best_ratio, other], 10.0, 1.0, weighing(0)), weighing(0)) for select in (dts.select, exact.select)
    ]
    assert costs == [120 * MIB, 102 * MIB]


@settings(max_examples=30, deadline=None)
@given(points=st.lists(st.sampled_from(TINY), min_size=1, max_size=3, unique=True), rate=st.floats(0.1, 40))
def test_the_integer_program_is_as_good_as_trying_everything(points, rate):
    most = math.ceil(rate / min(each.throughput for each in points))
    tried = (
        sum(count * each.memory_bytes for count, each in zip(counts, points, strict=True))
        for counts in product(range(most + 1), repeat=len(points))
        if sum(count * each.throughput for count, each in zip(counts, points, strict=True)) >= rate / SAME
    )
    assert total(exact.select(points, rate, math.inf, weighing(0)), weighing(0)) == min(tried)


def test_cores_weigh_when_they_are_given_bytes():
    many, few = point(cores=4, mib=100, latency_s=0.05), point(cores=1, mib=100, latency_s=0.1)
    assert dts.select([many, few], 9.0, 1.0, weighing(0)).chosen == (many,)
    assert dts.select([many, few], 9.0, 1.0, weighing(100 * MIB)).chosen == (few,)


@pytest.mark.parametrize("select", [dts.select, default.select, exact.select])
def test_an_empty_choice_leaves_the_rate_unserved(select):
    assert select([], 5.0, 1.0, weighing(0)) == Selection((), 5.0)
    assert select([point(latency_s=2.0)], 5.0, 1.0, weighing(0)) == Selection((), 5.0)
    assert select([point()], 0.0, 1.0, weighing(0)) == Selection()
    assert select([point()], math.inf, 1.0, weighing(0), Limits(cores=3.0)).unserved == math.inf


def test_without_scipy_the_remedy_is_reported(monkeypatch):
    def missing(name):
        if name == "scipy.optimize":
            raise ModuleNotFoundError(name)
        return import_module(name)

    monkeypatch.setattr(exact, "import_module", missing)
    with pytest.raises(MachineError, match="pip install scipy"):
        exact.select([point()], 1.0, 1.0, weighing(0))

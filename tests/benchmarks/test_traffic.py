"""The traffic of an hour depends on the seed only, and a sample of it has the intended load."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.traffic import HOUR_S, PER_S, Cost, busy_cores, compressed, hour, kept_share

COST = Cost(run=0.02, wake=0.03)


def test_the_traffic_of_an_hour_depends_on_the_seed_only():
    assert hour(4, None, 1) == hour(4, None, 1)
    assert hour(4, None, 1) != hour(4, None, 2)


def test_generated_functions_have_the_rate_of_recorded_ones():
    arrival_times = hour(60, None, 1)
    assert all(times == sorted(times) and times[-1] < HOUR_S for times in arrival_times)
    assert sum(map(len, arrival_times)) / 60 / HOUR_S == pytest.approx(PER_S, rel=0.1)


def test_recorded_functions_take_the_rows_of_the_trace(tmp_path):
    header = repr({"descr": "<i8", "fortran_order": False, "shape": (2, 31)}).encode()
    counts = [10] * 31 + [30] * 31
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + struct.pack("<62q", *counts)
    (tmp_path / "torpor-alibaba-fc").mkdir()
    (tmp_path / "torpor-alibaba-fc" / "samples.npy").write_bytes(data)
    few, many = map(len, hour(2, tmp_path, 1))
    assert few == pytest.approx(600, rel=0.2)
    assert many == pytest.approx(1800, rel=0.2)


@given(st.lists(st.floats(0.01, 2.0), min_size=1, max_size=20), st.floats(0.0, 60.0), st.floats(0.05, 0.9))
def test_the_kept_share_of_the_requests_keeps_the_wanted_number_of_cores_busy(rates, keep_alive_s, cores):
    costs = [COST] * len(rates)
    share = kept_share(rates, costs, keep_alive_s, cores)
    assert 0 < share <= 1
    asked = busy_cores([rate * share for rate in rates], costs, keep_alive_s)
    assert asked == pytest.approx(cores) or (share == 1 and asked < cores)


def test_a_function_that_is_called_often_wakes_seldom():
    assert busy_cores([1.0], [COST], 0.0) == pytest.approx(COST.run + COST.wake)
    assert busy_cores([1.0], [COST], 100.0) == pytest.approx(COST.run)


def test_if_workers_never_stop_only_runs_keep_cores_busy():
    assert busy_cores([1.0, 0.0], [COST, COST], float("inf")) == pytest.approx(COST.run)


def test_compressed_requests_are_in_order_and_only_a_share_of_them_is_kept():
    arrival_times = [[float(second) for second in range(3600)], [0.5, 3599.5]]
    everything = compressed(arrival_times, 12.0, 1.0, 1)
    assert everything == sorted(everything)
    assert len(everything) == 3602
    assert everything[-1] == (3599.5 / 12, 1)
    some = compressed(arrival_times, 12.0, 0.25, 1)
    assert set(some) < set(everything)
    assert len(some) == pytest.approx(900, rel=0.15)

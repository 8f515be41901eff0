"""Profiles from a law: each measured effect, in every configuration."""

import pytest

from overwinter.simulation.laws import LatencyLaw


def law(**changes):
    table = {"alone_ms": 100.0, "serial": 0.5, "runtime_mib": 50.0, "request_mib": 10.0}
    return LatencyLaw(**table | changes)


def test_a_law_has_a_row_for_each_configuration():
    rows = law(cores=(1, 2), batches=(1, 4), concurrencies=(1, 2, 3)).rows()
    assert len({row[:3] for row in rows}) == len(rows) == 12
    assert (2, 4, 3, law().latency_ms(2, 4, 3), 50.0 + 10.0 * 12) in rows


def test_more_cores_shorten_what_is_not_serial():
    assert [law().latency_ms(cores, 1, 1) for cores in (1, 2, 4)] == [100, 75, 62.5]


def test_runs_that_share_a_core_wait_for_each_other():
    assert law(crowding=0.0).latency_ms(1, 1, 4) == 400
    assert law(crowding=0.0).latency_ms(4, 1, 4) == 100


def test_each_further_run_lengthens_all_runs_by_crowding_even_if_it_has_a_core_to_itself():
    assert law(crowding=0.1).latency_ms(3, 1, 3) == pytest.approx(120)


def test_batching_is_the_share_that_each_further_request_of_a_batch_saves():
    assert law(batching=0.75).latency_ms(1, 5, 1) == 200
    assert law().latency_ms(1, 5, 1) == 500


@pytest.mark.parametrize("wrong", [{"alone_ms": 0.0}, {"serial": 1.5}, {"batching": 1.0}, {"cores": ()}])
def test_invalid_parameters_are_refused(wrong):
    with pytest.raises(ValueError):
        law(**wrong)

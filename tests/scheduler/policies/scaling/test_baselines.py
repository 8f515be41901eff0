"""Does each algorithm choose as its paper does?"""

import pytest

from overwinter.core.profile import Configuration
from overwinter.scheduler.policies.scaling.batch import batch, cost_of_a_request
from overwinter.scheduler.policies.scaling.dts import by_memory, by_memory_and_cores
from overwinter.scheduler.policies.scaling.infless import infless
from overwinter.scheduler.policies.scaling.mls import efficiency, mls
from overwinter.scheduler.policies.scaling.photons import photons
from tests.scheduler.policies.scaling.profiles import MIB, point, scaling_input, worker


class TestMls:
    def test_eta_is_the_rate_per_core_plus_the_rate_per_rho_m(self):
        asked = scaling_input(1, [], macs=4_000_000_000, weight_bytes=100 * MIB)
        made_as = point(cores=2, mib=100, batch=4, latency_s=0.2)
        assert efficiency(asked, made_as) == pytest.approx(4 / (2 * 0.2) + 4 / (4 * 2 * 0.2))

    def test_fewer_larger_workers_win_where_the_weights_weigh(self):
        points = [point(cores=1, latency_s=0.2), point(cores=4, latency_s=0.06)]
        heavy, light = (scaling_input(2, points, macs=macs, slo_s=1.0) for macs in (1_000_000_000, 100_000_000_000))
        assert [mls(asked).start[0].cores for asked in (heavy, light)] == [4, 1]

    def test_a_batch_counts_only_where_it_fills_in_time(self):
        """At 5/s the eighth request comes after 1.4 s, so the worker of one core gains nothing by its batch."""
        points = [
            point(cores=1, batch=1, latency_s=0.1),
            point(cores=1, batch=8, latency_s=0.2),
            point(cores=2, batch=1, latency_s=0.04),
        ]
        assert mls(scaling_input(5, points, slo_s=0.5)).start == (Configuration(2, 1, 1),)
        assert mls(scaling_input(500, points, slo_s=0.5)).start[0] == Configuration(1, 8, 1)

    def test_workers_start_until_alpha_of_them_serves_the_rate(self):
        points = [point(latency_s=0.1)]
        assert len(mls(scaling_input(80, points)).start) == 10
        assert len(mls(scaling_input(80.1, points)).start) == 11
        assert len(mls(scaling_input(80.1, points, workers=tuple(worker(n, points[0]) for n in range(10)))).start) == 1

    def test_the_next_best_cores_are_taken_where_the_best_do_not_fit(self):
        points = [point(cores=4, latency_s=0.01), point(cores=1, latency_s=0.1)]
        said = mls(scaling_input(105, points, free_cores=5.0))
        assert [configuration.cores for configuration in said.start] == [4, 1]

    def test_the_least_efficient_workers_are_stopped_first_whatever_their_load(self):
        poor, good = point(cores=2, latency_s=0.1), point(cores=1, latency_s=0.1)
        workers = (worker(1, good, load=0.0), worker(2, poor, load=0.9))
        assert mls(scaling_input(5, [poor, good], workers=workers)).stop == (2,)

    def test_no_concurrency_is_chosen(self):
        said = mls(scaling_input(5, [point(concurrency=4, latency_s=0.1), point(latency_s=0.1)]))
        assert said.start == (Configuration(1, 1, 1),)


class TestDts:
    def test_concurrency_and_batches_share_one_runtime(self):
        points = [
            point(mib=200, latency_s=0.1),
            point(cores=2, mib=220, concurrency=2, latency_s=0.105),
            point(cores=2, mib=240, batch=2, concurrency=2, latency_s=0.19),
        ]
        assert by_memory(scaling_input(15, points)).start == (Configuration(2, 2, 2),)
        assert by_memory(scaling_input(15, points, slo_s=0.3)).start == (Configuration(2, 1, 2),)

    def test_workers_start_only_for_the_rate_that_present_ones_do_not_serve(self):
        made_as = point(latency_s=0.1)
        assert len(by_memory(scaling_input(24, [made_as], workers=(worker(1, made_as), worker(2, made_as)))).start) == 1

    def test_the_weights_count_where_workers_do_not_share_them(self):
        lean, wide = point(mib=10, latency_s=0.1), point(cores=4, mib=30, concurrency=2, latency_s=0.1)
        asked = {
            shared: scaling_input(5, [lean, wide], shared=shared, weight_bytes=500 * MIB) for shared in (True, False)
        }
        assert by_memory(asked[True]).start == (lean.configuration,)
        assert by_memory(asked[False]).start == (wide.configuration,)

    def test_gamma_weighs_cores(self):
        points = [point(cores=4, latency_s=0.05), point(cores=1, latency_s=0.1)]
        asked = scaling_input(7, points, gamma=100.0 * MIB)
        assert by_memory(asked).start == (points[0].configuration,)
        assert by_memory_and_cores(asked).start == (points[1].configuration,)


class TestInfless:
    def test_batches_are_chosen_and_no_concurrency(self):
        points = [point(latency_s=0.1), point(batch=4, latency_s=0.19), point(concurrency=4, latency_s=0.1)]
        assert set(infless(scaling_input(100, points)).start) == {Configuration(1, 4, 1)}

    def test_a_batch_must_leave_half_the_slo_for_waiting(self):
        points = [point(latency_s=0.1), point(batch=4, latency_s=0.21)]
        assert set(infless(scaling_input(100, points)).start) == {Configuration(1, 1, 1)}

    def test_a_batch_that_would_not_fill_is_not_made(self):
        """A batch of 4 waits for 0.21 s at most, so it needs 19/s; 12.5/s is wanted."""
        points = [point(latency_s=0.1), point(batch=4, latency_s=0.19)]
        assert set(infless(scaling_input(10, points)).start) == {Configuration(1, 1, 1)}

    def test_a_batch_that_would_not_fill_is_made_where_there_is_nothing_else(self):
        assert infless(scaling_input(1, [point(batch=4, latency_s=0.19)])).start == (Configuration(1, 4, 1),)

    def test_the_rate_per_core_decides_and_memory_does_not(self):
        points = [point(cores=1, mib=5000, latency_s=0.1), point(cores=2, mib=10, latency_s=0.06)]
        assert infless(scaling_input(5, points)).start == (points[0].configuration,)

    def test_of_equals_the_smaller_is_taken(self):
        points = [point(cores=2, latency_s=0.05), point(cores=1, latency_s=0.1)]
        assert infless(scaling_input(5, points)).start == (points[1].configuration,)


class TestPhotons:
    def test_as_much_concurrency_is_chosen_as_the_slo_allows(self):
        points = [point(cores=n, concurrency=n, latency_s=0.1 * n) for n in (1, 2, 4, 8)]
        assert photons(scaling_input(5, points)).start == (Configuration(4, 1, 4),)

    def test_each_run_gets_a_core(self):
        points = [point(cores=cores, concurrency=2, latency_s=0.1) for cores in (1, 4, 3)]
        assert photons(scaling_input(5, points)).start == (Configuration(3, 1, 2),)
        assert photons(scaling_input(5, [*points, point(cores=2, concurrency=2, latency_s=0.3)])).start == (
            Configuration(2, 1, 2),
        )

    def test_each_further_run_brings_the_cores_that_one_needs(self):
        configurations = [(1, 1, 0.5), (2, 1, 0.35), (2, 2, 0.5), (3, 2, 0.38), (4, 2, 0.36), (5, 3, 0.39), (6, 3, 0.5)]
        points = [point(cores=cores, concurrency=runs, latency_s=seconds) for cores, runs, seconds in configurations]
        assert photons(scaling_input(4, points)).start == (Configuration(4, 1, 2),)

    def test_no_batches_are_chosen(self):
        assert photons(scaling_input(5, [point(batch=8, latency_s=0.01), point(latency_s=0.1)])).start == (
            Configuration(1, 1, 1),
        )


class TestBatch:
    def test_the_batch_that_the_rate_can_fill_is_chosen(self):
        points = [point(latency_s=0.1), point(batch=8, latency_s=0.2)]
        assert [batch(scaling_input(rate, points)).start[0].batch for rate in (1, 100)] == [1, 8]
        assert cost_of_a_request(points[1], 5.0, 0.4) == pytest.approx(0.2 / 2)

    def test_cores_are_part_of_the_cost(self):
        points = [point(cores=4, latency_s=0.09), point(cores=1, latency_s=0.3)]
        assert batch(scaling_input(1, points)).start == (points[1].configuration,)

    def test_the_configuration_is_kept_while_there_is_a_worker(self):
        points = [point(latency_s=0.1), point(batch=8, latency_s=0.2)]
        said = batch(scaling_input(100, points, workers=(worker(1, points[0]),)))
        assert set(said.start) == {points[0].configuration}

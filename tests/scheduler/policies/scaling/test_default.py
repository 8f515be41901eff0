"""The rules of the default scaler that are in no paper."""

from overwinter.core.profile import Configuration
from overwinter.scheduler.policies.scaling.default import overwinter
from overwinter.scheduler.policies.scaling.scaler import Scaled
from tests.scheduler.policies.scaling.profiles import done, point, scaling_input, worker

SMALL = point(mib=100, latency_s=0.1)
LARGE = point(cores=4, mib=150, concurrency=4, latency_s=0.1)


def test_small_workers_are_stopped_after_the_large_one_that_replaces_them_is_there():
    asked = scaling_input(17, [SMALL, LARGE], workers=(worker(1, SMALL), worker(2, SMALL)))
    first = overwinter(asked)
    assert (first.start, first.stop) == ((LARGE.configuration,), ())
    second = overwinter(done(asked, first))
    assert (second.start, second.stop) == ((), (1, 2))
    assert overwinter(done(done(asked, first), second)) == Scaled()


def test_a_large_worker_is_replaced_by_a_much_smaller_one_when_the_rate_fell():
    nearly = point(mib=140, latency_s=0.1)
    assert overwinter(scaling_input(1, [nearly, LARGE], workers=(worker(1, LARGE),))).start == ()
    tiny = point(mib=50, latency_s=0.1)
    asked = scaling_input(1, [tiny, LARGE], workers=(worker(1, LARGE),))
    first = overwinter(asked)
    assert (first.start, first.stop) == ((tiny.configuration,), ())
    assert overwinter(done(asked, first)).stop == (1,)


def test_nothing_is_exchanged_without_room_for_both():
    asked = scaling_input(17, [SMALL, LARGE], workers=(worker(1, SMALL), worker(2, SMALL)), free_cores=2.0)
    assert overwinter(asked).start == (SMALL.configuration,)


def test_cores_decide_where_they_run_out():
    wide = point(cores=4, mib=90, latency_s=0.05)
    assert overwinter(scaling_input(12, [wide, SMALL])).start == (wide.configuration,)
    asked = scaling_input(30, [wide, SMALL], free_cores=4.0)
    assert overwinter(asked).start == (Configuration(1, 1, 1),) * 4


def test_an_exchange_keeps_the_workers_that_it_would_start():
    workers = (worker(0, LARGE), *(worker(number, SMALL) for number in range(1, 9)))
    asked = scaling_input(100, [SMALL, LARGE], workers=workers)
    first = overwinter(asked)
    assert first.start == (LARGE.configuration,) * 3
    assert set(overwinter(done(asked, first)).stop) == set(range(1, 9))

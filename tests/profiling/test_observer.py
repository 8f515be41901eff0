import pytest

from overwinter.core.actions import Run, StartWorker
from overwinter.core.events import (
    Alarm,
    Arrived,
    Deployed,
    Profiled,
    Removed,
    RunEnded,
    RunFailure,
    WorkerExited,
    WorkerReady,
)
from overwinter.core.ids import FunctionId, FunctionName, RequestId, RunId, Seconds, WorkerId
from overwinter.core.profile import Point, Profile
from overwinter.core.profiling import with_points
from overwinter.profiling.observer import EVERY_S, RUNS_MIN, WAKES_MIN, Observer
from overwinter.telemetry.statistics import Statistics
from tests.scheduler.world import spec

FUNCTION = FunctionId("f@1")
KNOWN = Profile(weight_bytes=1, macs=1, points=(Point(1, 9, 1, 1, 0.1), Point(2, 9, 4, 2, 0.1)), wake_s=0.02)


class Service:
    """The steps of a node, as a test defines them."""

    def __init__(self, profile: Profile | None = KNOWN) -> None:
        self.corrections: list = []
        self.profile = profile
        self.observer = Observer(lambda _: self.profile, lambda *what: self.corrections.append(what))
        self.statistics = Statistics(self.observer)
        self.now = 0.0
        self._runs = self._requests = 0
        self.step(Deployed(spec("f")))

    def step(self, event, *actions) -> None:
        self.statistics.observe(Seconds(self.now), event, list(actions))

    def worker(self, worker=1, cores=1, concurrency=1, wakes_in=0.02, warm_up=False) -> None:
        self.step(Alarm(), StartWorker(WorkerId(worker), FUNCTION, warm_up, cores, concurrency))
        self.now += wakes_in
        self.step(WorkerReady(WorkerId(worker)))

    def begin(self, batch=1, worker=1) -> RunId:
        self._runs += 1
        requests = tuple(RequestId(self._requests + number) for number in range(batch))
        self._requests += batch
        for request in requests:
            self.step(Arrived(request, FunctionName("f"), None, None))
        self.step(Alarm(), Run(WorkerId(worker), RunId(self._runs), requests))
        return RunId(self._runs)

    def end(self, run, failures=(), worker=1) -> None:
        self.step(RunEnded(WorkerId(worker), run, failures))

    def run(self, seconds, batch=1, **options) -> None:
        run = self.begin(batch)
        self.now += seconds
        self.end(run, **options)

    def runs(self, count, seconds, batch=1) -> None:
        for _ in range(count):
            self.run(seconds, batch)


def test_a_lasting_difference_is_reported_once_a_minute():
    service = Service()
    service.worker()
    service.runs(RUNS_MIN, 0.2)
    assert service.corrections == []  # The first run of a worker does not count.
    service.runs(1, 0.2)
    [(function, correction)] = service.corrections
    assert function == FUNCTION
    [point] = correction.points
    assert (point.configuration, point.memory_bytes) == (KNOWN.points[0].configuration, 9)
    assert point.latency_s == pytest.approx(0.2)
    assert correction.wake_s is None
    service.runs(2 * RUNS_MIN, 0.2)
    assert len(service.corrections) == 1
    service.now += EVERY_S
    service.runs(RUNS_MIN, 0.2)
    assert len(service.corrections) == 2


@pytest.mark.parametrize("seconds", [0.085, 0.1, 0.115])
def test_times_close_to_the_measured_ones_are_not_reported(seconds):
    service = Service()
    service.worker()
    service.runs(10 * RUNS_MIN, seconds)
    assert service.corrections == []


def test_unmeasured_configurations_are_not_reported():
    for service in (Service(None), Service(Profile(weight_bytes=1, macs=1))):
        service.worker()
        service.runs(3 * RUNS_MIN, 5.0)
        assert service.corrections == []


def test_only_runs_at_full_concurrency_count():
    service = Service()
    service.worker(cores=2, concurrency=2)
    for _ in range(3 * RUNS_MIN):
        service.run(0.5, batch=4)
    assert service.corrections == []
    for _ in range(3 * RUNS_MIN):
        first, second = service.begin(4), service.begin(4)
        service.now += 0.5
        service.end(second)
        service.end(first)
    [(_, correction)] = service.corrections
    assert [point.configuration for point in correction.points] == [KNOWN.points[1].configuration]


def test_runs_that_failed_do_not_count():
    service = Service()
    service.worker()
    for _ in range(3 * RUNS_MIN):
        service.run(5.0, failures=(RunFailure(RequestId(0), "CallerError", "no"),))
    assert service.corrections == []


def test_wakes_are_reported_except_those_of_workers_that_warm_up():
    service = Service()
    for worker in range(10):
        service.worker(worker, wakes_in=3.0, warm_up=True)
    assert service.corrections == []
    for worker in range(10, 10 + WAKES_MIN):
        service.worker(worker, wakes_in=3.0)
    [(_, correction)] = service.corrections
    assert correction.points == ()
    assert correction.wake_s == pytest.approx(3.0)


def test_nothing_is_kept_of_a_removed_function():
    service = Service()
    service.worker()
    service.runs(5, 0.3)
    service.begin()
    service.step(WorkerExited(WorkerId(1), "WorkerError", "killed"))
    service.step(Removed(FUNCTION))
    observer = service.observer
    assert (observer._seen, observer._reported_at) == ({}, {})


@pytest.mark.parametrize("is_told", [True, False])
def test_what_was_observed_before_a_new_measurement_does_not_undo_it(is_told):
    service = Service()
    service.worker()
    service.runs(RUNS_MIN + 1, 0.2)
    [(_, slower)] = service.corrections
    service.profile = with_points(KNOWN, slower.points)
    service.step(Profiled(FUNCTION, service.profile))
    service.now += EVERY_S
    service.profile = KNOWN
    if is_told:
        service.step(Profiled(FUNCTION, KNOWN))
    for worker in range(2, 2 + WAKES_MIN):
        service.worker(worker)
    service.runs(3 * RUNS_MIN, 0.1)
    assert len(service.corrections) == 1


def test_a_correction_of_one_value_keeps_what_was_observed_of_others():
    service = Service()
    service.worker()
    service.runs(RUNS_MIN, 0.2)
    service.profile = with_points(KNOWN, (), wake_s=0.5)
    service.step(Profiled(FUNCTION, service.profile))
    service.run(0.2)
    [(_, correction)] = service.corrections
    assert [point.configuration for point in correction.points] == [KNOWN.points[0].configuration]


def test_a_function_that_sleeps_does_not_undo_what_another_with_its_program_observed():
    profile, reports = KNOWN, []

    def report(function, correction) -> None:
        nonlocal profile
        reports.append(function)
        profile = with_points(profile, correction.points, correction.wake_s)
        for each in "fg":
            observer.profiled(each)

    observer, ran = Observer(lambda _: profile, report), KNOWN.points[0].configuration
    for number in range(RUNS_MIN):
        observer.ran("f", ran, 0.2, float(number))
    for number in range(4 * RUNS_MIN):
        observer.ran("g", ran, 0.1, 100.0 + number)
    for number in range(WAKES_MIN):
        observer.woke("f", 0.02, 1000.0 + number)
    assert reports == ["f", "g"]
    assert profile.points[0].latency_s == pytest.approx(0.1)


def test_arrivals_are_counted():
    service = Service()
    for number in range(3):
        service.now = float(number)
        service.step(Arrived(RequestId(number), FunctionName("f"), None, None))
    assert (service.observer.arrivals, service.observer.arrived_at) == (3, 2.0)

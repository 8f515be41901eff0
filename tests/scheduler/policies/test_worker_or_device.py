"""A request to a function with `device = "any"` goes where it is answered sooner."""

import pytest

from overwinter.scheduler.policies.worker_or_device import Estimate, Estimates, sooner


def estimate(wait_ms: float, run_ms: float | None, may_try: bool = False) -> Estimate:
    return Estimate("there", wait_ms / 1e3, None if run_ms is None else run_ms / 1e3, may_try)


@pytest.mark.parametrize(
    ("workers", "devices", "place"),
    [
        (estimate(0, 10), estimate(3, 5), "devices"),
        (estimate(0, 10), estimate(8, 5), "workers"),
        (estimate(20, 10), estimate(8, 5), "devices"),
        (estimate(0, 5), estimate(0, 5), "workers"),
        (estimate(float("inf"), 5), estimate(900, 5), "devices"),
        (estimate(900, 5), estimate(float("inf"), 5), "workers"),
        # What was never measured is tried once, the workers first.
        (estimate(30, None, may_try=True), estimate(1, None, may_try=True), "workers"),
        (estimate(30, None), estimate(1, None, may_try=True), "devices"),
        (estimate(30, None, may_try=True), estimate(1, 1), "workers"),
        (estimate(0, 1), estimate(1000, None, may_try=True), "devices"),
        # While a place is being tried, a run there is assumed to take as long as at the other place.
        (estimate(0, None), estimate(5, 1), "workers"),
        (estimate(9, None), estimate(5, 1), "devices"),
        (estimate(2, 10), estimate(3, None), "workers"),
        (estimate(4, 10), estimate(3, None), "devices"),
        (estimate(1, None), estimate(0, None), "devices"),
    ],
)
def test_the_place_that_is_expected_to_answer_sooner_or_was_never_measured_is_chosen(workers, devices, place):
    estimates = Estimates(workers, devices)
    assert sooner(estimates) is getattr(estimates, place)


def test_the_text_gives_both_estimates_the_chosen_one_first():
    workers = Estimate("workers", 0.03, 0.01, may_try=False)
    assert Estimates(workers, Estimate("virtual:0", 0.5, 0.002, may_try=False)).text() == (
        "workers 40.0 ms (30.0 until it runs); virtual:0 502.0 ms (500.0 until it runs)"
    )
    tried = Estimates(workers, Estimate("virtual:0", 0.5, None, may_try=True))
    assert tried.text() == "virtual:0: never measured; workers 40.0 ms (30.0 until it runs)"

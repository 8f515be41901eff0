"""The expected time of a shared run, and what is learned from observed runs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overwinter.core.policies import Policy
from overwinter.core.profile import Point, Profile
from overwinter.scheduler.latency import SMOOTHING, LatencyModel
from overwinter.scheduler.trunks import Trunk, separate_part_of
from tests.scheduler.world import spec

POINTS = tuple(Point(1, 9, batch, 1, 0.02 + 0.01 * batch) for batch in (1, 2, 4, 8))


def model(points=POINTS) -> LatencyModel:
    return LatencyModel(spec(max_batch=8, profile=Profile(weight_bytes=1, macs=1, points=points)), Policy())


@given(counts=st.lists(st.integers(1, 4), min_size=1, max_size=8), own=st.floats(0, 1))
def test_a_shared_run_takes_between_one_run_of_all_requests_and_a_run_of_each_function(counts, own):
    latency, point = model(), POINTS[-1]
    together = latency.latency_s(point, sum(counts))
    apart = sum(latency.latency_s(point, count) for count in counts)
    assert latency.shared_run_s(point, counts, 0.0) == together
    assert together - 1e-9 <= latency.shared_run_s(point, counts, own) <= apart + 1e-9
    if len(counts) > 1:
        assert latency.shared_run_s(point, counts, 1.0) == pytest.approx(apart)


def test_without_a_profile_a_shared_run_takes_as_long_as_observed_runs():
    latency, point = LatencyModel(spec(max_batch=8), Policy()), POINTS[-1]
    assert latency.shared_run_s(point, [1, 1], 0.5) is None
    latency.observe(latency.default_point, [1, 1], 0.2, Trunk({}, 0.5))
    assert latency.shared_run_s(latency.default_point, [1, 1], 0.5) == 0.2


def test_the_separate_part_is_relative_to_the_largest_function():
    assert separate_part_of({"a": 6, "b": 2}, {"a": 6, "c": 2}) == 0.25
    assert separate_part_of({"a": 6, "b": 2}, {"a": 6, "b": 2}, {"b": 2}) == 0.75
    assert separate_part_of({"a": 6}, {"a": 6}) == separate_part_of({}, {}) == 0.0


@settings(max_examples=50)
@given(
    guessed=st.floats(0, 0.5),
    own=st.floats(0, 1),
    slowdown=st.sampled_from([0.5, 1.0, 3.0]),
    runs=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_the_times_of_shared_runs_are_learned_from_observed_runs(guessed, own, slowdown, runs):
    """This also holds where the node is slower or faster than its profile throughout."""
    latency, trunk, point, truth = model(), Trunk({}, guessed), POINTS[-1], model()
    # A run of one function gives the slowdown, a shared run the part that is not shared.
    for _ in range(60):
        for counts in ([2], *runs):
            latency.observe(point, counts, slowdown * truth.shared_run_s(point, counts, own), trunk)
    for counts in runs:
        expected = slowdown * truth.shared_run_s(point, counts, own)
        assert latency.shared_run_s(point, counts, trunk.separate_part) == pytest.approx(expected, rel=0.05)


def test_one_slow_run_changes_the_separate_part_little_and_after_a_run_guesses_are_ignored():
    trunk = Trunk({})
    trunk.guess(0.4)
    trunk.guess(0.1)
    assert trunk.separate_part == 0.4
    trunk.observe(1.0, 2.0, 100.0)
    assert trunk.separate_part == pytest.approx(0.4 + SMOOTHING * 0.6)
    for _ in range(50):
        trunk.observe(1.0, 4.0, 1.0)
    assert trunk.separate_part < 0.01
    trunk.guess(0.5)
    assert trunk.separate_part < 0.01
    # Runs in which nothing could have been saved give no information.
    trunk.observe(1.0, 1.0, 9.0)
    assert trunk.separate_part < 0.01

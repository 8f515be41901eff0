import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overwinter.core.errors import CallerError
from overwinter.core.function import Settings
from overwinter.core.profile import Configuration, Point, Profile
from overwinter.core.profiling import (
    CONFIGURATIONS_MAX,
    ConfigurationLimits,
    ProfileOptions,
    configurations_to_measure,
    values_to_measure,
    with_points,
)


@given(st.integers(1, 10_000))
def test_values_to_measure_at_most_double_and_end_with_the_maximum(most):
    found = values_to_measure(most)
    assert found[0] == 1
    assert found[-1] == most
    assert list(found) == sorted(set(found))
    assert all(2 * before >= after for before, after in itertools.pairwise(found))


@given(st.integers(1, 64), st.integers(1, 300), st.integers(1, 8), st.integers(1, 64), st.integers(1, 300))
def test_configurations_stay_within_settings_machine_and_program(threads, max_batch, concurrency, cores, batch):
    settings = Settings(threads=threads, max_batch=max_batch, concurrency=concurrency)
    configurations = configurations_to_measure(ProfileOptions(), settings, ConfigurationLimits(cores, batch))
    assert len(set(configurations)) == len(configurations)
    assert max(configuration.cores for configuration in configurations) == min(threads, cores)
    assert max(configuration.batch for configuration in configurations) == min(max_batch, batch)
    assert max(configuration.concurrency for configuration in configurations) == concurrency
    assert configurations[0] == Configuration(1, 1, 1)


def test_for_the_same_cores_and_concurrency_batches_ascend_so_that_the_first_too_slow_one_is_the_last():
    configurations = configurations_to_measure(
        ProfileOptions(cores=(2, 1), batches=(4, 1)), Settings(concurrency=2), ConfigurationLimits(2, 8)
    )
    assert [tuple(getattr(s, name) for name in ("cores", "concurrency", "batch")) for s in configurations] == [
        *((1, 1, 1), (1, 1, 4), (1, 2, 1), (1, 2, 4)),
        *((2, 1, 1), (2, 1, 4), (2, 2, 1), (2, 2, 4)),
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (ProfileOptions(cores=(3,)), "cores must be from 1 to 2 here, not 3"),
        (ProfileOptions(batches=(1, 9)), "batch must be from 1 to 8 here, not 9"),
        (ProfileOptions(concurrency=(0,)), "concurrency must be from 1 to 32 here, not 0"),
        (ProfileOptions(batches=()), "not none"),
    ],
)
def test_what_cannot_be_measured_here_is_refused(options, said):
    with pytest.raises(CallerError, match=said):
        configurations_to_measure(options, Settings(), ConfigurationLimits(2, 8))


def test_too_many_configurations_are_refused():
    def asked(batches):
        options = ProfileOptions(cores=(1, 2), batches=tuple(range(1, batches + 1)), concurrency=(1, 2))
        return configurations_to_measure(options, Settings(), ConfigurationLimits(2, 1 << 20))

    assert len(asked(CONFIGURATIONS_MAX // 4)) == CONFIGURATIONS_MAX
    with pytest.raises(CallerError, match=f"{CONFIGURATIONS_MAX + 4} configurations .*: ask for fewer"):
        asked(CONFIGURATIONS_MAX // 4 + 1)


def test_new_points_take_the_place_of_old_ones_and_leave_the_others():
    old = Profile(weight_bytes=1, macs=2, points=(Point(1, 10, 1, 1, 0.1), Point(1, 11, 2, 1, 0.2)), wake_s=0.5)
    new = with_points(old, [Point(2, 30, 1, 1, 0.05), Point(1, 20, 1, 1, 0.3)])
    assert new.points == (Point(1, 20, 1, 1, 0.3), Point(1, 11, 2, 1, 0.2), Point(2, 30, 1, 1, 0.05))
    assert new.wake_s == 0.5
    assert with_points(old, (), 0.7).wake_s == 0.7


def test_a_batch_above_the_largest_measured_one_never_takes_less_time():
    known = Profile(weight_bytes=0, macs=0, points=(Point(1, 0, 1, 1, 0.02), Point(1, 0, 4, 1, 0.014)))
    assert [known.latency_s(1, batch, 1) for batch in (2, 4, 5, 64)] == pytest.approx([0.018, 0.014, 0.014, 0.014])

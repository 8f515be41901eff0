"""Functions that can still meet their SLO get devices first."""

import pytest

from overwinter.scheduler.policies.device_queueing import (
    ALPHA_LEAST,
    BUCKET_S,
    EVERYONE,
    RULES,
    WINDOW_S,
    Outcomes,
    Waiting,
    boundary,
    next_alpha,
    required_requests,
)


def waiting(function, required=0.0, level=100, arrived=0.0, due=1.0, has_slo=True) -> Waiting:
    return Waiting(function, level, arrived, due, required, has_slo)


def outcomes(now, *answers) -> Outcomes:
    made = Outcomes()
    for in_time in answers:
        made.add(now, in_time)
    return made


def in_order(rule, functions, last=EVERYONE) -> list[str]:
    return [each.function for each in sorted(functions, key=lambda each: rule(each, last))]


def test_the_required_count_brings_the_function_to_its_percentile():
    made = outcomes(0.0, *[True] * 90, *[False] * 10)
    assert made.required == pytest.approx((0.98 * 100 - 90) / 0.02)
    count = round(made.required)
    assert (90 + count) / (100 + count) == pytest.approx(0.98)
    assert not made.complies
    assert outcomes(0.0, *[True] * 98, *[False] * 2).complies


def test_answers_are_forgotten_after_the_window():
    made = outcomes(0.0, False, True)
    made.add(WINDOW_S / 2, True)
    assert (made.count, made.in_time) == (3, 2)
    made.forget(WINDOW_S + BUCKET_S)
    assert (made.count, made.in_time) == (1, 1)


def test_the_first_functions_have_high_priority_up_to_a_part_of_all_required_requests():
    required = [(10.0, "a"), (30.0, "b"), (60.0, "c"), (-5.0, "d")]
    assert boundary(required, 1.0) == (60.0, "c")
    assert boundary(required, 0.4) == (30.0, "b")
    assert boundary(required, 0.39) == (10.0, "a")
    assert boundary(required, 0.0) == (0.0, "")


def test_of_equal_functions_only_those_within_the_part_have_high_priority():
    last = boundary([(50.0, "a"), (50.0, "b")], 0.5)
    assert [required_requests(waiting(name, 50.0), last)[1] for name in "ab"] == [False, True]


def test_high_priority_is_served_by_descending_count_and_low_by_ascending_count():
    functions = [waiting("met", -7.0), waiting("near", 5.0), waiting("far", 90.0), waiting("farther", 200.0)]
    last = boundary([(each.required, each.function) for each in functions], 0.02)
    assert in_order(RULES["rrc"], functions, last) == ["near", "met", "far", "farther"]
    assert in_order(RULES["rrc"], functions, EVERYONE) == ["farther", "far", "near", "met"]


def test_those_in_time_go_first_by_their_wait_for_blocks_then_those_without_an_slo_then_late_ones():
    waits = Waiting("waits", 100, 0.0, 1.0, 0.0, swap_wait_s=0.03)
    shorter = Waiting("shorter", 100, 2.0, 3.0, 90.0, swap_wait_s=0.01)
    same = Waiting("same", 100, 1.0, 3.0, 0.0, swap_wait_s=0.01)
    late, later = (Waiting(name, 100, at, at, 0.0, is_late=True) for name, at in (("late", 0.1), ("later", 0.2)))
    urgent = Waiting("urgent", 0, 5.0, 5.0, 0.0, is_late=True)
    free = waiting("free", arrived=0.5, has_slo=False)
    shuffled = [later, free, waits, shorter, late, urgent, same]
    assert in_order(RULES["overwinter"], shuffled) == ["urgent", "same", "shorter", "waits", "free", "late", "later"]


def test_the_baselines_order_by_arrival_and_by_due_time_after_the_priority_of_requests():
    functions = [waiting("a", arrived=1.0, due=2.0), waiting("b", arrived=0.0, due=3.0), waiting("c", 0.0, 1, 9.0, 9.0)]
    assert in_order(RULES["fifo"], functions) == ["c", "b", "a"]
    assert in_order(RULES["due-time"], functions) == ["c", "a", "b"]


@pytest.mark.parametrize(
    ("alpha", "before", "now", "after"),
    [
        (0.25, 0.5, 0.55, 0.5),
        (0.25, 0.55, 0.5, 0.125),
        (0.25, 0.5, 0.53, 0.25),
        (1.0, 0.5, 0.9, 1.0),
        (ALPHA_LEAST, 0.9, 0.5, ALPHA_LEAST),
    ],
)
def test_alpha_follows_the_ratio_of_compliant_functions(alpha, before, now, after):
    assert next_alpha(alpha, before, now) == after

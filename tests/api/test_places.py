"""How many of the shared places each caller gets."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from overwinter.api.places import Places


def test_callers_get_equal_parts_and_one_more_would_get_as_much() -> None:
    for callers in range(1, 6):
        places = Places(60)
        for _ in range(60):
            for caller in range(callers):
                places.take(str(caller))
        assert set(places.of.values()) == {60 // (callers + 1)}


def test_one_place_is_for_one_caller() -> None:
    places = Places(1)
    assert places.take("a")
    assert not places.take("a")
    assert not places.take("b")
    places.leave("a")
    assert places.take("b")


@given(st.integers(1, 20), st.lists(st.tuples(st.booleans(), st.sampled_from("abcd")), max_size=80))
def test_a_caller_never_gets_more_than_are_free(most: int, steps: list[tuple[bool, str]]) -> None:
    places, taken = Places(most), Counter[str]()
    for takes, caller in steps:
        if takes:
            free = most - taken.total()
            assert places.take(caller) == (taken[caller] < free)
            taken[caller] += taken[caller] < free
        elif taken[caller]:
            places.leave(caller)
            taken[caller] -= 1
        assert (places.taken, places.of) == (taken.total(), +taken)

"""How many of the shared places each caller gets."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from overwinter.api.places import Places


def take_all(places: Places, *callers: str) -> None:
    for _ in range(places.most):
        for caller in callers:
            places.take(caller)


def test_callers_get_equal_parts_and_one_more_would_get_as_much() -> None:
    for callers in ("a", "ab", "abc"):
        places = Places(60)
        take_all(places, *callers)
        assert set(places.of.values()) == {60 // (len(callers) + 1)}


def test_callers_that_come_later_find_places() -> None:
    places = Places(2048)
    for number in range(65):
        take_all(places, str(number))
    assert sorted(places.of.values(), reverse=True) == [1024, 512, *[8] * 63]
    uploads = Places(32)
    for number in range(10):
        take_all(uploads, str(number))
    assert sorted(uploads.of.values(), reverse=True) == [16, 8, *[1] * 8]


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
            if places.take(caller):
                assert taken[caller] < most - taken.total()
                taken[caller] += 1
            else:
                assert taken[caller] or taken.total() == most
        elif taken[caller]:
            places.leave(caller)
            taken[caller] -= 1
        assert (places.taken, places.of) == (taken.total(), +taken)

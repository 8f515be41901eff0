"""How many of the shared slots each caller gets."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from overwinter.api.slots import FairSlots


def take_all(slots: FairSlots, *callers: str) -> None:
    for _ in range(slots.capacity):
        for caller in callers:
            slots.take(caller)


def test_callers_get_equal_parts_and_one_more_would_get_as_much() -> None:
    for callers in ("a", "ab", "abc"):
        slots = FairSlots(60)
        take_all(slots, *callers)
        assert set(slots.by_caller.values()) == {60 // (len(callers) + 1)}


def test_callers_that_come_later_find_slots() -> None:
    slots = FairSlots(2048)
    for number in range(65):
        take_all(slots, str(number))
    assert sorted(slots.by_caller.values(), reverse=True) == [1024, 512, *[8] * 63]
    uploads = FairSlots(32)
    for number in range(10):
        take_all(uploads, str(number))
    assert sorted(uploads.by_caller.values(), reverse=True) == [16, 8, *[1] * 8]


def test_one_slot_is_for_one_caller() -> None:
    slots = FairSlots(1)
    assert slots.take("a")
    assert not slots.take("a")
    assert not slots.take("b")
    slots.release("a")
    assert slots.take("b")


@given(st.integers(1, 20), st.lists(st.tuples(st.booleans(), st.sampled_from("abcd")), max_size=80))
def test_a_caller_gets_a_slot_only_while_it_holds_fewer_than_are_free(most: int, steps: list[tuple[bool, str]]) -> None:
    slots, taken = FairSlots(most), Counter[str]()
    for takes, caller in steps:
        if takes:
            if slots.take(caller):
                assert taken[caller] < most - taken.total()
                taken[caller] += 1
            else:
                assert taken[caller] or taken.total() == most
        elif taken[caller]:
            slots.release(caller)
            taken[caller] -= 1
        assert (slots.taken, slots.by_caller) == (taken.total(), +taken)

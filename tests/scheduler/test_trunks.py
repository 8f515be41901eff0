"""Which functions of a family have most of their weights in common?"""

from hypothesis import given
from hypothesis import strategies as st

from overwinter.scheduler import trunks as module
from overwinter.scheduler.trunks import COMMON_PART, COMPARED_MAX, Trunks, separate_part_of


def test_a_function_with_half_of_its_bytes_in_common_with_a_member_joins_its_trunk_and_others_start_one():
    trunks = Trunks()
    assert trunks.join("f", {"a": 10, "b": 2}) == "f"
    assert trunks.join("g", {"c": 10, "b": 2}) == "g"
    assert trunks.join("h", {"a": 10, "c": 1}) == "f"
    assert trunks.join("k", {"c": 10, "d": 30}) == "k"
    assert trunks.join("l", {"b": 2, "c": 10, "d": 2}) == "g"
    assert list(trunks) == ["f", "g", "k"]


def test_a_trunk_exists_as_long_as_it_has_a_member():
    trunks = Trunks()
    for name in "fg":
        trunks.join(name, {"a": 10})
    trunks.leave("f")
    assert trunks.join("h", {"a": 10}) == "f"
    for _ in range(2):
        trunks.leave("f")
    assert not trunks
    assert trunks.join("g", {"a": 10}) == "g"


def test_a_function_that_returns_with_other_weights_starts_a_trunk_of_its_own():
    trunks = Trunks()
    for name in "fg":
        trunks.join(name, {"a": 10})
    trunks.leave("f")
    assert trunks.join("f", {"b": 10}) == "f"
    assert trunks.join("h", {"b": 10}) == "f"
    for _ in range(3):
        trunks.leave("f")
    assert not trunks


def test_functions_without_weights_share_a_trunk():
    trunks = Trunks()
    assert [trunks.join(name, {}) for name in "fg"] == ["f", "f"]


@given(functions=st.lists(st.sets(st.sampled_from("abcde"), min_size=1), min_size=1, max_size=8))
def test_every_function_with_enough_in_common_is_grouped(functions):
    nbytes = dict(zip("abcde", (1, 2, 4, 8, 16), strict=True))
    trunks = Trunks()
    for number, addresses in enumerate(functions):
        sizes = {address: nbytes[address] for address in addresses}
        alike = {id_ for id_, trunk in trunks.items() if separate_part_of(sizes, trunk.sizes) <= 1 - COMMON_PART}
        found = trunks.join(str(number), sizes)
        assert found in (alike or {str(number)})


def test_a_function_is_compared_with_a_bounded_number_of_trunks(monkeypatch):
    trunks, shared = Trunks(), {f"shared{number}": 1 for number in range(9)}
    for number in range(4 * COMPARED_MAX):
        # Less than half of it is shared, so each starts a trunk.
        trunks.join(f"f{number}", {**shared, f"own{number}": 10})
    assert len(trunks) == 4 * COMPARED_MAX
    compared = []
    monkeypatch.setattr(module, "separate_part_of", lambda *of: (compared.append(of), separate_part_of(*of))[1])
    assert trunks.join("small", shared) == "small"
    assert 0 < len(compared) <= COMPARED_MAX
    compared.clear()
    assert trunks.join("other", {"own": 10, **shared}) == "other"
    assert compared == []
    # The latest trunks are looked at first.
    assert trunks.join("alike", {**shared, "more": 2}) == "small"

"""Names of the parts of functions, which callers do not know."""

import pytest

from overwinter.core.ids import function_id, program_id, slice_name, whole_id, whole_names


def test_a_part_belongs_to_a_function():
    second = function_id(slice_name("f", 2), 3)
    assert {whole_id(each) for each in ("f@3", program_id("f@3"), second)} == {"f@3"}


@pytest.mark.parametrize("part", ["f:program@3", "f:12@3", "f@3"])
def test_ids_of_parts_in_a_text_become_ids_of_functions_or_only_those_of_the_given_function(part):
    assert whole_names(f"{part} failed, as did g:2@1") == "f@3 failed, as did g@1"
    assert whole_names(f"{part} failed at 12:30@noon, 4:3@2 and g:2@1", part) == (
        "f@3 failed at 12:30@noon, 4:3@2 and g:2@1"
    )

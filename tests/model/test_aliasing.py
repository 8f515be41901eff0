"""Which values may share memory, and where a program may be cut."""

import pytest

from overwinter.core.errors import ProgramError
from overwinter.model.aliasing import check_span, check_writes, written_slot
from overwinter.model.program import Call, Slot, Value
from tests.model.tiny import BATCH_BY_4, chain, make_program


def slice_assignment():
    """out = zeros; out[0] = x[0]; out + 1: values 2 (out), 3 (view of it), 4 (x[0]), 5 (copy_), 6."""
    return make_program(
        [
            Call("aten.zeros.default", ((2, 4),), {}, (2,)),
            Call("aten.select.int", (Slot(2), 0, 0), {}, (3,)),
            Call("aten.select.int", (Slot(1), 0, 0), {}, (4,)),
            Call("aten.copy_.default", (Slot(3), Slot(4)), {}, (5,)),
            Call("aten.add.Tensor", (Slot(2), 1), {}, (6,)),
        ]
    )


def test_the_written_slot_is_the_first_argument_of_a_call_that_writes_in_place():
    assert written_slot(Call("aten.copy_.default", (Slot(3), Slot(4)), {}, (5,))) == 3
    assert written_slot(Call("aten.add.Tensor", (Slot(3), Slot(4)), {}, (5,))) is None


def test_reading_a_view_of_an_input_while_writing_elsewhere_is_allowed():
    check_writes(slice_assignment())


@pytest.mark.parametrize("cut", [0, 1, 4, 5])
def test_cuts_outside_a_slice_assignment_are_allowed(cut):
    check_span(slice_assignment(), 0, cut)
    check_span(slice_assignment(), cut, 5)


@pytest.mark.parametrize("cut", [2, 3])
def test_cut_between_a_view_and_the_write_through_it_is_refused(cut):
    with pytest.raises(ProgramError, match="share across the cut"):
        check_span(slice_assignment(), 0, cut)


def test_span_that_writes_to_an_earlier_value_read_later_is_refused():
    program = make_program(
        [
            Call("aten.clone.default", (Slot(1),), {}, (2,)),
            Call("aten.relu_.default", (Slot(2),), {}, (3,)),
            Call("aten.add.Tensor", (Slot(2), 1), {}, (4,)),
        ]
    )
    check_span(program, 0, 2)
    check_span(program, 1, 3)
    with pytest.raises(ProgramError, match="earlier value"):
        check_span(program, 1, 2)


def test_any_cut_of_a_program_without_writes_is_allowed():
    for cut in range(4):
        check_span(chain(), 0, cut)
        check_span(chain(), cut, 3)


def test_tensors_that_are_reshaped_to_the_same_number_share_no_memory():
    """Two tensors reshaped by the same number share no memory, so one may be written to after the cut."""
    calls = [
        Call("aten.sym_size.int", (Slot(1), 0), {}, (2,)),
        Call("aten.relu.default", (Slot(1),), {}, (3,)),
        Call("aten.exp.default", (Slot(1),), {}, (4,)),
        Call("aten.view.default", (Slot(3), (Slot(2), 4)), {}, (5,)),
        Call("aten.view.default", (Slot(4), (Slot(2), 4)), {}, (6,)),
        Call("aten.neg_.default", (Slot(5),), {}, (7,)),
        Call("aten.add.Tensor", (Slot(7), Slot(6)), {}, (8,)),
    ]
    program = make_program(calls, values=(Value("symint"), *[Value("float32", BATCH_BY_4)] * 6))
    check_span(program, 5, 7)

"""The lifetimes of values, the values that cross a cut, and the peak memory."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overwinter.core.errors import ProgramError
from overwinter.model.liveness import alive_across, live_in, live_out, peak_activation_bytes
from overwinter.model.program import Call, Slot, Term, Value, validate
from overwinter.model.structure import slots_of
from tests.model.tiny import BATCH_BY_4, chain, make_program


def test_values_die_after_their_last_use():
    assert [call.frees for call in chain().calls] == [(), (2,), (3,)]


def test_unused_results_die_after_the_call_that_gives_them_and_outputs_never():
    program = make_program(
        [Call("aten.max.dim", (Slot(1), 1), {}, (2, 3)), Call("aten.relu.default", (Slot(2),), {}, (4,))], outputs=(2,)
    )
    assert [call.frees for call in program.calls] == [(3,), (4,)]
    validate(program)


def test_spans_take_and_return_the_values_that_cross_their_ends():
    program = chain()
    assert live_in(program) == (1,)
    assert live_out(program) == (4,)
    assert live_in(program, 1) == (2,)
    assert live_out(program, 1) == (2,)
    assert live_in(program, 2, 3) == (3,)
    assert live_out(program, 2, 1) == (3,)
    assert live_in(program, 3) == (4,)


def test_span_out_of_range_is_refused():
    for start, stop in ((0, 4), (2, 1), (-1, 2)):
        with pytest.raises(ProgramError, match="not a span"):
            live_in(chain(), start, stop)


def test_peak_counts_inputs_and_what_is_alive_together():
    assert peak_activation_bytes(chain(), {"batch": 1}) == 16 * 3
    assert peak_activation_bytes(chain(), {"batch": 10}) == 160 * 3
    assert peak_activation_bytes(chain()) == 16 * 3


def test_peak_counts_shared_memory_once_and_as_long_as_a_view_lives():
    calls = [
        Call("aten.mul.Tensor", (Slot(1), 2), {}, (2,)),
        Call("aten.view.default", (Slot(2), (-1,)), {}, (3,)),
        Call("aten.exp.default", (Slot(3),), {}, (4,)),
        Call("aten.exp.default", (Slot(4),), {}, (5,)),
    ]
    owned = Value("float32", BATCH_BY_4)
    program = make_program(calls, values=(owned, Value("float32", BATCH_BY_4, 2), owned, owned))
    assert program.calls[1].frees == (2,)
    assert peak_activation_bytes(program, {"batch": 1}) == 16 * 3


def test_views_of_weights_and_inputs_cost_nothing():
    values = (Value("float32", BATCH_BY_4, 0), Value("float32", BATCH_BY_4, 1))
    calls = [Call("aten.t.default", (Slot(0),), {}, (2,)), Call("aten.t.default", (Slot(1),), {}, (3,))]
    assert peak_activation_bytes(make_program(calls, values=values), {"batch": 1}) == 16


def test_sizes_may_be_any_polynomial():
    values = (Value("float32", (Term(4.0, (2,)), Term(0.5, (1,)), Term(-1.0, (0,)))),)
    program = make_program([Call("aten.relu.default", (Slot(1),), {}, (2,))], values=values)
    assert peak_activation_bytes(program, {"batch": 3}) == 3 * 16 + 36 + 1 - 1


def test_sizes_are_checked():
    with pytest.raises(ProgramError, match="no dimension 'rows'"):
        peak_activation_bytes(chain(), {"rows": 1})
    with pytest.raises(ProgramError, match="65, which is not within 1 to 64"):
        peak_activation_bytes(chain(), {"batch": 65})


@st.composite
def programs(draw):
    """Draw any dataflow over an input and a weight."""
    calls = []
    for slot in range(2, 2 + draw(st.integers(1, 12))):
        args = (Slot(draw(st.integers(0, slot - 1))), Slot(draw(st.integers(0, slot - 1))))
        calls.append(Call("aten.add.Tensor", args, {}, (slot,)))
    outputs = draw(st.lists(st.integers(1, 1 + len(calls)), min_size=1, max_size=3))
    return make_program(calls, outputs=tuple(outputs))


@given(programs(), st.data())
def test_spans_return_all_that_later_spans_need(program, data):
    validate(program)
    ends = sorted(data.draw(st.sets(st.integers(0, len(program.calls)))) | {len(program.calls)})
    held = set(range(program.first_input, program.first_value))
    start = 0
    for stop in ends:
        assert held.issuperset(live_in(program, start, stop))
        held.update(live_out(program, stop, start))
        start = stop
    assert held.issuperset(program.output_slots)


@given(programs())
def test_frees_leave_exactly_what_crosses_each_cut(program):
    alive = set()
    for cut, call in enumerate(program.calls, 1):
        assert alive.issuperset(slot for slot in slots_of(call) if slot >= program.first_value)
        alive = (alive | set(call.outputs)) - set(call.frees)
        assert alive == alive_across(program, cut)


def test_the_modules_that_describe_programs_do_not_import_pytorch():
    code = (
        "import sys, overwinter.model.program, overwinter.model.operators, overwinter.model.liveness, "
        "overwinter.model.layers, overwinter.model.aliasing; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

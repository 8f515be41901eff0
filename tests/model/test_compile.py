"""Programs run: with weights bound later, in spans, with every kind of literal; calls that do not fit are refused."""

import gc
import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.programs import sized_inputs
from overwinter.core.errors import ProgramError
from overwinter.model.aliasing import check_span
from overwinter.model.compile import compile_program, compile_waiting
from overwinter.model.liveness import first_uses, live_in, live_out
from overwinter.model.program import Call, Device, Dtype, MemoryFormat, Slot, Value, validate
from tests.model.tiny import BATCH_BY_4, chain, make_program
from tests.model.zoo_models import exported

X = torch.tensor([[1.0, -2.0, 3.0, -4.0]])
W = torch.tensor([1.0, 1.0, 2.0, 2.0])


def run(program, weights=(W,), inputs=(X,)):
    validate(program)
    with torch.inference_mode():
        return compile_program(program)(weights, inputs)


def test_a_chain_of_calls_computes_what_pytorch_computes():
    (result,) = run(chain())
    assert torch.equal(result, torch.relu(X * W + W))


def test_weights_are_looked_up_at_each_run():
    compiled = compile_program(chain())
    weights = [W]
    compiled(weights, (X,))
    weights[0] = W * 3
    (result,) = compiled(weights, (X,))
    assert torch.equal(result, torch.relu(X * W * 3 + W * 3))


def test_only_the_weights_that_calls_read_are_looked_up():
    asked = []

    class Arriving(list):
        def __getitem__(self, index):
            asked.append(index)
            return super().__getitem__(index)

    calls = [
        Call("aten.mul.Tensor", (Slot(3), Slot(0)), {}, (4,)),
        Call("aten.add.Tensor", (Slot(4), Slot(2)), {}, (5,)),
    ]
    compile_program(make_program(calls, weights=3))(Arriving([W, W, W]), (X,))
    assert asked == [0, 2]


def test_a_program_waits_before_each_call_that_is_the_first_to_read_a_weight():
    calls = [
        Call("aten.relu.default", (Slot(3),), {}, (4,)),
        Call("aten.mul.Tensor", (Slot(4), Slot(1)), {}, (5,)),
        Call("aten.add.Tensor", (Slot(5), Slot(1)), {}, (6,)),
        Call("aten.add.Tensor", (Slot(6), Slot(0)), {}, (7,)),
    ]
    program = make_program(calls, weights=3)
    assert first_uses(program) == [3, 1, 4]
    weights = [torch.zeros(4) for _ in range(3)]
    waited = []

    def wait(call):
        waited.append(call)
        for weight, first_use in enumerate(first_uses(program)):
            if first_use == call:
                weights[weight].copy_(W)

    (result,) = compile_waiting(program, set(first_uses(program)))(weights, (X,), wait)
    assert waited == [1, 3, 4]
    assert torch.equal(result, torch.relu(X) * W + W + W)


def test_inputs_and_weights_may_be_outputs():
    assert [result.data_ptr() for result in run(make_program([], outputs=(1, 0, 1), layers=()))] == [
        X.data_ptr(),
        W.data_ptr(),
        X.data_ptr(),
    ]


INPUT = Slot(2)
LITERALS = {
    "infinity": ("aten.full_like.default", (INPUT, float("-inf")), {}, torch.full_like(X, float("-inf"))),
    "nan": ("aten.full_like.default", (INPUT, float("nan")), {}, torch.full_like(X, float("nan"))),
    "small": ("aten.add.Tensor", (INPUT, -1e-300), {}, X + -1e-300),
    "exact": ("aten.mul.Scalar", (INPUT, 0.1), {}, X * 0.1),
    "text": ("aten.gelu.default", (INPUT,), {"approximate": "tanh"}, torch.nn.functional.gelu(X, approximate="tanh")),
    "type": ("aten.to.dtype", (INPUT, Dtype("int64")), {}, X.to(torch.int64)),
    "empty list": ("aten.sum.dim_IntList", (INPUT, ()), {}, X.sum()),
    "list of one": ("aten.sum.dim_IntList", (INPUT, (1,), True), {}, X.sum(1, keepdim=True)),
    "list of tensors": ("aten.cat.default", ((INPUT, Slot(0), INPUT), 0), {}, None),
    "nothing": ("aten.clamp.default", (INPUT, None, 0.5), {}, X.clamp(max=0.5)),
    "device": (
        "aten.zeros.default",
        ((2,),),
        {"device": Device(), "dtype": Dtype("int8")},
        torch.zeros(2, dtype=torch.int8),
    ),
    "format": ("aten.clone.default", (INPUT,), {"memory_format": MemoryFormat("contiguous_format")}, X),
    "index": ("aten.index.Tensor", (INPUT, (None, Slot(1))), {}, X[:, torch.tensor([3, 0])]),
}


@pytest.mark.parametrize("literal", LITERALS)
def test_a_literal_of_each_kind_reaches_the_operator(literal):
    operator, args, kwargs, expected = LITERALS[literal]
    weights = (W.reshape(1, 4) if literal == "list of tensors" else W, torch.tensor([3, 0]))
    program = make_program([Call(operator, args, kwargs, (3,))], weights=2)
    (result,) = run(program, weights)
    expected = torch.cat([X, W.reshape(1, 4), X]) if expected is None else expected
    assert result.dtype == expected.dtype
    assert torch.equal(result.nan_to_num(7.0), expected.nan_to_num(7.0))


@given(st.floats())
def test_any_float_reaches_the_operator_unchanged(number):
    program = make_program([Call("aten.full.default", ((1,), number), {"dtype": Dtype("float64")}, (2,))])
    (result,) = run(program)
    assert torch.equal(result.view(torch.int64), torch.tensor([number], dtype=torch.float64).view(torch.int64)) or (
        number != number and result.isnan().all()
    )


@given(st.text(max_size=20).filter(str.isprintable))
def test_text_never_becomes_code(text):
    program = make_program([Call("aten.gelu.default", (Slot(1),), {"approximate": text}, (2,))])
    validate(program)
    compiled = compile_program(program)
    if text not in ("none", "tanh"):
        with pytest.raises(RuntimeError, match="approximate"):
            compiled((W,), (X,))


def test_numbers_computed_from_sizes_may_be_arguments():
    calls = [
        Call("aten.sym_size.int", (Slot(1), 1), {}, (2,)),
        Call("operator.floordiv", (Slot(2), 2), {}, (3,)),
        Call("torch.sym_max", (Slot(3), 1), {}, (4,)),
        Call("aten.view.default", (Slot(1), (Slot(4), -1)), {}, (5,)),
    ]
    kinds = (*[Value("symint")] * 3, Value("float32", BATCH_BY_4, 1))
    (result,) = run(make_program(calls, values=kinds))
    assert torch.equal(result, X.view(2, 2))


def test_a_call_may_have_several_results():
    calls = [Call("aten.sort.default", (Slot(1),), {}, (2, 3)), Call("aten.split.Tensor", (Slot(2), 4, 1), {}, (4,))]
    values, places, part = run(make_program(calls, outputs=(2, 3, 4)))
    assert torch.equal(values, X.sort().values)
    assert torch.equal(places, X.sort().indices)
    assert torch.equal(part, values)


def test_values_are_released_after_their_last_use():
    counts = []

    class Watching(list):
        def __getitem__(self, index):
            tensors = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]
            counts.append(sum(tensor.shape == (3, 1, 4, 1) for tensor in tensors))
            return super().__getitem__(index)

    calls = [
        Call("aten.mul.Tensor", (Slot(1), 2), {}, (2,)),
        Call("aten.exp.default", (Slot(2),), {}, (3,)),
        Call("aten.neg.default", (Slot(3),), {}, (4,)),
        Call("aten.add.Tensor", (Slot(4), Slot(0)), {}, (5,)),
    ]
    compile_program(make_program(calls))(Watching([torch.ones(1)]), (torch.ones(3, 1, 4, 1),))
    assert counts == [2]


FAULTS = {
    "too many": ([Call("aten.relu.default", (Slot(1), 1), {}, (2,))], "positional"),
    "too few": ([Call("aten.add.Tensor", (Slot(1),), {}, (2,))], "lacks its argument 'other'"),
    "unknown": ([Call("aten.relu.default", (Slot(1),), {"inplace": True}, (2,))], "'inplace'"),
    "twice": ([Call("aten.relu.default", (Slot(1),), {"self": Slot(1)}, (2,))], "'self'"),
    "results": ([Call("aten.relu.default", (Slot(1),), {}, (2, 3))], "1 results, not 2"),
    "result": ([Call("aten.sort.default", (Slot(1),), {}, (2,))], "2 results, not 1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_call_that_does_not_fit_its_operator_is_refused(fault):
    calls, message = FAULTS[fault]
    program = make_program(calls)
    validate(program)
    with pytest.raises(ProgramError, match=message):
        compile_program(program)


def test_operator_that_this_pytorch_lacks_is_refused(monkeypatch):
    monkeypatch.setattr("overwinter.model.program.is_allowed", lambda name: True)
    program = make_program([Call("aten.frobnicate.default", (Slot(1),), {}, (2,))])
    with pytest.raises(ProgramError, match=r"no operator aten\.frobnicate\.default"):
        compile_program(program)


def test_errors_of_operators_pass_through():
    program = make_program([Call("aten.view.default", (Slot(1), (3,)), {}, (2,))])
    with pytest.raises(RuntimeError, match="shape"):
        run(program)


@pytest.fixture(scope="module", params=["resnet50", "gpt2", "ssd300"])
def cuttable(request):
    """A model, its program and weights, and the places at which the program can be cut."""
    model, program, weights = exported(request.param)
    return model, program, weights, [cut for cut in range(1, len(program.calls)) if _is_place_to_cut(program, cut)]


@pytest.mark.parametrize("seed", range(4))
def test_spans_run_one_after_another_give_what_the_whole_program_gives(cuttable, seed):
    model, program, weights, places = cuttable
    made = sized_inputs(program, model, {"batch": 3})
    inputs = [made[spec.name] for spec in program.inputs]
    cuts = sorted(random.Random(seed).sample(places, 4))
    held = dict(zip(live_in(program), inputs, strict=True))
    with torch.inference_mode():
        expected = compile_program(program)(weights, inputs)
        given = _in_spans(program, weights, held, [0, *cuts, len(program.calls)])
    assert all(map(torch.equal, expected, given))


def _is_place_to_cut(program, cut):
    try:
        check_span(program, 0, cut)
    except ProgramError:
        return False
    return True


def _in_spans(program, weights, held, ends):
    for start, stop in pairwise(ends):
        taken = [held[slot] for slot in live_in(program, start, stop)]
        given = compile_program(program, start, stop)(weights, taken)
        held.update(zip(live_out(program, stop, start), given, strict=True))
    return [held[slot] for slot in program.output_slots]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 3), st.integers(0, 3))
def test_any_span_of_a_chain_runs_alone(start, stop):
    program = chain()
    if start > stop:
        with pytest.raises(ProgramError):
            compile_program(program, start, stop)
        return
    held = {1: X, 2: X * W, 3: X * W + W, 4: torch.relu(X * W + W)}
    given = compile_program(program, start, stop)((W,), [held[slot] for slot in live_in(program, start, stop)])
    for slot, result in zip(live_out(program, stop, start), given, strict=True):
        assert torch.equal(result, held[slot])

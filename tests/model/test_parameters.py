"""A program passes to an operator what its schema requires, and nothing else that PyTorch would also accept."""

import pytest
import torch

from overwinter.core.errors import ProgramError
from overwinter.model.compile import compile_program
from overwinter.model.parameters import MOST, MOST_OF_CONVOLUTION, MOST_OF_STRIDE, MOST_OF_WINDOW
from overwinter.model.program import Call, Device, Dtype, MemoryFormat, Slot, Value, validate
from tests.model.tiny import BATCH_BY_4, make_program

X = torch.tensor([[1.0, -2.0, 3.0, -4.0]])
W = torch.ones(4)


def run(*calls, values=None):
    program = make_program(list(calls), values)
    validate(program)
    with torch.inference_mode():
        return compile_program(program)((W,), (X,))[0]


@pytest.mark.parametrize(
    ("operator", "args", "kwargs"),
    [
        ("aten.ones.default", ((2,),), {"dtype": 12}),
        ("aten.ones.default", ((2,),), {"dtype": Dtype("float32"), "layout": 1}),
        ("aten.zeros.default", ((2,),), {"device": "meta"}),
        ("aten.new_zeros.default", (Slot(0), (2,)), {"dtype": -1}),
        ("aten.view.dtype", (Slot(0), -1), {}),
        ("aten.to.dtype_layout", (Slot(0),), {"layout": 1}),
        ("aten.to.dtype_layout", (3,), {}),
        ("aten.contiguous.default", (Slot(0),), {"memory_format": 3}),
        ("aten.linalg_eigvals.default", (3,), {}),
        ("aten.relu.default", (None,), {}),
        ("aten.add.Tensor", (Slot(0), None), {}),
        ("aten.cat.default", ((Slot(0), None),), {}),
        ("aten.cat.default", ((Slot(0), 1.0),), {}),
        ("aten.cat.default", (Slot(0),), {}),
        ("aten.sum.dim_IntList", (Slot(0), (Slot(0),)), {}),
        ("aten.select.int", (Slot(0), 0, Slot(0)), {}),
        ("aten.select.int", (Slot(0), 0, 1.0), {}),
        ("aten.add.Scalar", (Slot(0), Slot(0)), {}),
        ("aten.add.Scalar", (Slot(0), "1"), {}),
        ("aten.rrelu.default", (Slot(0),), {"generator": 1}),
        ("aten.max_pool1d.default", (Slot(1), (MOST_OF_WINDOW + 1,)), {}),
        ("aten.conv1d.default", (Slot(1), Slot(1), None, (MOST_OF_STRIDE + 1,)), {}),
        ("aten.conv1d.default", (Slot(1), Slot(1), None, (1,), (MOST_OF_CONVOLUTION + 1,)), {}),
        ("aten._adaptive_avg_pool3d.default", (Slot(1), (0, 3, -1)), {}),
        ("aten.repeat.default", (Slot(0), (MOST + 1,)), {}),
        ("aten.select.int", (Slot(0), 0, -MOST - 1), {}),
    ],
)
def test_arguments_of_another_kind_or_out_of_bounds_are_refused(operator, args, kwargs):
    with pytest.raises(ProgramError, match=operator):
        run(Call(operator, args, kwargs, (2,)))


def test_a_size_is_read_only_along_a_given_dimension():
    size = Call("aten.sym_size.int", (Slot(1), None), {}, (2,))
    with pytest.raises(ProgramError, match="dim"):
        run(size, Call("aten.add.Tensor", (Slot(1), Slot(2)), {}, (3,)), values=(Value("symint"), Value("float32")))


@pytest.mark.parametrize(
    ("operator", "args", "kwargs", "expected"),
    [
        ("aten.add.Tensor", (Slot(0), 2), {}, W + 2),
        ("aten.clamp.default", (Slot(0), None, 0.5), {}, W / 2),
        ("aten.slice.Tensor", (Slot(0), 0, 1, (1 << 63) - 1), {}, W[1:]),
        ("aten.full.default", ((1,), 1 << 62), {"dtype": Dtype("int64"), "device": Device()}, torch.tensor([1 << 62])),
        ("aten.clone.default", (Slot(0),), {"memory_format": MemoryFormat("contiguous_format")}, W),
        ("aten.max_pool1d.default", (Slot(1), 2), {}, torch.tensor([[1.0, 3.0]])),
    ],
)
def test_arguments_that_fit_the_schema_are_accepted(operator, args, kwargs, expected):
    assert torch.equal(run(Call(operator, args, kwargs, (2,))), expected)


@pytest.mark.parametrize(("times", "fits"), [(3, True), (1 << 40, False)])
def test_integers_that_are_computed_in_a_run_are_bounded_too(times, fits):
    calls = [
        Call("aten.sym_size.int", (Slot(1), 0), {}, (2,)),
        Call("operator.mul", (Slot(2), times), {}, (3,)),
        Call("aten.repeat.default", (Slot(0), (Slot(3),)), {}, (4,)),
    ]
    values = (Value("symint"), Value("symint"), Value("float32", BATCH_BY_4))
    if fits:
        assert torch.equal(run(*calls, values=values), W.repeat(times))
        return
    with pytest.raises(ValueError, match="is not within"):
        run(*calls, values=values)

"""Sizes of exported tensors as sums of terms."""

import torch
from torch import nn

from overwinter.model.export import export
from overwinter.model.program import Term
from overwinter.model.structure import evaluate

DYNAMIC = {"x": {0: "batch", 1: "sequence"}}


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def last_value(function, x=None):
    x = torch.ones(2, 6, 4) if x is None else x
    program, _ = export(Net(function), (x,), DYNAMIC)
    return program, program.values[-1]


def test_polynomials_are_exact():
    program, value = last_value(lambda x: x @ x.transpose(1, 2))
    names = list(program.dimensions)
    assert value.nbytes == (Term(4.0, tuple({"batch": 1, "sequence": 2}[name] for name in names)),)


def test_sums_are_exact():
    program, value = last_value(lambda x: torch.cat([x, x[:, :1], x], 1))
    sizes = {name: {"batch": 3, "sequence": 10}[name] for name in program.dimensions}
    assert evaluate(value.nbytes, sizes) == 3 * 21 * 4 * 4


def test_rounding_is_left_out():
    program, value = last_value(lambda x: nn.functional.avg_pool1d(x.transpose(1, 2), 2), torch.ones(2, 8, 4))
    sizes = {name: {"batch": 3, "sequence": 10}[name] for name in program.dimensions}
    assert evaluate(value.nbytes, sizes) == 3 * 4 * 5 * 4


def test_a_size_that_is_divided_and_multiplied_again_is_exact():
    program, value = last_value(lambda x: x.reshape(-1, 2, 4).reshape(x.shape[0], -1))
    sizes = {name: {"batch": 5, "sequence": 10}[name] for name in program.dimensions}
    assert evaluate(value.nbytes, sizes) == 5 * 10 * 4 * 4


def test_sizes_of_half_precision_and_boolean_tensors_are_exact():
    program, value = last_value(lambda x: x.to(torch.bfloat16) + 1)
    assert evaluate(value.nbytes, program.example) == 6 * 4 * 2
    program, value = last_value(lambda x: x > 0)
    assert evaluate(value.nbytes, program.example) == 6 * 4

"""A module around one function, and its program."""

import torch
from torch import nn

from overwinter.model.compile import compile_program
from overwinter.model.export import Exported, export


class Held(nn.Module):
    """A module around one function of its input and of its own tensors."""

    def __init__(self, function, **held):
        super().__init__()
        self.function = function
        for name, value in held.items():
            setattr(self, name, value if isinstance(value, nn.Module) else nn.Parameter(value, requires_grad=False))

    def forward(self, x):
        return self.function(self, x)


def exported(module, inputs, dynamic=None) -> Exported:
    return export(module.eval().requires_grad_(False), inputs, dynamic)


def assert_same(module, made, *inputs):
    with torch.inference_mode():
        expected, given = module(*inputs), compile_program(made.program)(made.weights, inputs)
    expected = expected if isinstance(expected, tuple) else (expected,)
    assert len(expected) == len(given)
    for one, other in zip(expected, given, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)

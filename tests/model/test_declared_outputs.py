"""Every deviation of outputs from their declaration is detected: type, rank, a fixed size, an input's size."""

import pytest
import torch
from torch import nn

from overwinter.model.declared_outputs import DeclaredOutputs
from overwinter.model.export import export


class Pair(nn.Module):
    def forward(self, x):
        return x + 1, torch.cat([x, x], 1)


SIZES = {"x": {0: "batch", 1: "n"}}
DECLARED = DeclaredOutputs(export(Pair(), (torch.zeros(2, 5, 3),), SIZES).program)
X = torch.zeros(4, 6, 3)


def test_what_is_declared_passes():
    assert DECLARED.fault([X], [X, torch.zeros(4, 12, 3)]) == ""


@pytest.mark.parametrize(
    "given",
    [
        X.double(),
        X.long(),
        X[0],
        X[:, :, :2],
        X[:3],
        X[:, :1],
        torch.tensor(0.0),
        X.cfloat(),
        X.to_sparse(),
        X.to("meta"),
    ],
    ids=["float64", "int64", "rank", "fixed", "batch", "named", "scalar", "complex", "sparse", "meta"],
)
def test_an_output_that_differs_from_its_declaration_is_named_with_both_shapes(given):
    fault = DECLARED.fault([X], [given, torch.zeros(4, 12, 3)])
    assert "'output_0'" in fault
    assert str(list(given.shape)) in fault
    assert "['batch', 'n', 3]" in fault

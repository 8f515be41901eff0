"""The comparison of answers: bits, differences relative to the output's magnitude, and what never agrees."""

import pytest
import torch
from torch import nn

from overwinter.core.agreement import Closeness
from overwinter.model.closeness import BOUNDS, ClosenessMeter, bound_of
from overwinter.model.export import export

ONE = torch.tensor([1.0, -2.0, 4.0])


class Identity(nn.Module):
    def forward(self, x):
        return x.clone()


PROGRAM = export(Identity(), (ONE,), {}).program


def measured(wanted, given, bound=1e-3):
    meter = ClosenessMeter(PROGRAM, bound)
    return meter.compare([wanted], [given]), meter.closeness()["output"]


def test_equal_bits_are_exact():
    for value in (ONE, ONE.double(), ONE > 0, ONE.long(), torch.tensor(1.0), torch.empty(0, 3), ONE.bfloat16()):
        assert measured(value, value.clone()) == ("", Closeness(True, 0.0))
    strided = torch.randn(4, 3)
    assert measured(strided.t(), strided.t().contiguous()) == ("", Closeness(True, 0.0))


def test_equal_numbers_with_different_bits_are_not_exact():
    assert measured(torch.tensor([0.0]), torch.tensor([-0.0])) == ("", Closeness(False, 0.0))


def test_a_difference_is_relative_to_the_largest_number():
    fault, closeness = measured(ONE, ONE + torch.tensor([0.002, 0.0, 0.0]))
    assert fault == ""
    assert closeness.difference == pytest.approx(0.0005, rel=1e-3)
    fault, _ = measured(ONE, ONE + 0.02)
    assert "'output'" in fault
    assert "0.005" in fault


def test_the_large_numbers_of_masks_hide_no_difference():
    masked = torch.tensor([1.0, -1e9, torch.finfo(torch.float32).min, torch.inf])
    wrong = masked.clone()
    wrong[0] = 2.0
    assert measured(masked, masked.clone())[0] == ""
    assert measured(masked, wrong)[0] != ""


def test_nan_equals_only_nan_and_infinity_differs_from_its_negative():
    nan = torch.tensor([torch.nan, 1.0])
    assert measured(nan, -nan.neg().clone())[0] == ""
    assert measured(nan, torch.tensor([0.0, 1.0]))[0] != ""
    assert measured(torch.tensor([0.0, 1.0]), nan)[0] != ""
    assert measured(torch.tensor([torch.inf]), torch.tensor([-torch.inf]))[0] != ""


@pytest.mark.parametrize(
    "given", [ONE.double(), ONE[None], ONE[:2], torch.tensor([1, 2, 3])], ids=["dtype", "rank", "size", "kind"]
)
def test_an_output_of_another_dtype_or_shape_never_agrees(given):
    assert "'output'" in measured(ONE, given)[0]


def test_integers_agree_only_if_they_are_equal():
    assert measured(torch.tensor([1_000_000]), torch.tensor([1_000_001]))[0] != ""


def test_the_coarsest_dtype_inside_a_program_sets_the_bound():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3, dtype=torch.bfloat16)

        def forward(self, x):
            return self.layer(x.bfloat16()).float()

    assert bound_of(export(Half(), (torch.zeros(2, 3),)).program) == BOUNDS["bfloat16"]
    assert bound_of(PROGRAM) == BOUNDS["float32"]

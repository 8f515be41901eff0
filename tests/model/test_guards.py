"""Operators that PyTorch checks too little, at arguments for which they would leave their tensors."""

import pytest
import torch

from overwinter.model.compile import compile_program, resolve
from overwinter.model.guards import guarded
from overwinter.model.structure import Call, Slot
from tests.model.tiny import make_program

VALUES = torch.tensor([0.0, 1.0, 2.0, 3.0])
TABLE = torch.arange(15.0).reshape(5, 3)
TOKENS = torch.tensor([0, 1, 2, 3])
ROWS = torch.ones(6, 16)
MATRICES = torch.ones(2, 16, 16)
HISTC = "aten.histc.default"
BAG = "aten.embedding_bag.padding_idx"
GROUPS = "aten._grouped_mm.default"


def run(operator, *args, **kwargs):
    with torch.inference_mode():
        return guarded(operator, resolve(operator))(*args, **kwargs)


def bag(indices, offsets, mode=0, table=TABLE):
    return run(BAG, table, torch.tensor(indices), torch.tensor(offsets), False, mode, False, None, False, -1)


def test_within_bounds_the_operators_answer_as_ever():
    assert torch.equal(run(HISTC, VALUES, bins=2, min=0, max=4), torch.tensor([2.0, 2.0]))
    assert torch.equal(bag([0, 1, 2, 3], [0, 3, 3])[0], torch.stack([TABLE[:3].sum(0), torch.zeros(3), TABLE[3]]))
    assert torch.equal(run(GROUPS, ROWS, MATRICES, torch.tensor([2, 6], dtype=torch.int32)), 16 * torch.ones(6, 16))


@pytest.mark.parametrize(
    ("values", "options"),
    [
        (VALUES.half(), {"bins": 2051, "min": 0, "max": 4}),
        (VALUES.bfloat16(), {"bins": 511, "min": 0, "max": 4}),
        (VALUES, {"bins": (1 << 24) + 3, "min": 0, "max": 4}),
        (VALUES, {"bins": 4, "min": -3.4e38, "max": 3.4e38}),
        (VALUES, {"bins": 4, "min": 1e8, "max": 1e8 + 1}),
        (VALUES, {"bins": 4, "min": float("nan"), "max": 1}),
        (VALUES, {"bins": 4}),
    ],
)
def test_histograms_whose_bins_the_kernel_would_miss_are_refused(values, options):
    with pytest.raises(ValueError, match="histc takes"):
        run(HISTC, values, **options)


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("offsets", [[0, -3], [0, 9], [1, 2], [0, 4, 2], [0, 1 << 40, 4], [-1, 4]])
def test_bags_outside_the_indices_are_refused(mode, offsets):
    with pytest.raises((ValueError, RuntimeError), match="offsets"):
        bag([0, 1, 2, 3], offsets, mode)


def test_bags_of_other_shapes_and_modes_are_refused():
    with pytest.raises(ValueError, match="two lists"):
        bag([[0, 1]], [0])
    with pytest.raises(ValueError, match="modes"):
        bag([0, 1], [0], 3)
    with pytest.raises(RuntimeError):
        bag([0, 9], [0])


def test_results_that_a_mode_of_bags_does_not_write_are_zero():
    _, bags, sizes, maxima = bag([0, 1, 2, 3], [0, 3])
    assert not any(result.any() for result in (bags, sizes, maxima))
    assert bag([0, 1, 2, 3], [0, 3], mode=1)[2].tolist() == [3, 1]
    assert bag([0, 1, 2, 3], [0, 3], mode=2)[3].tolist() == [[2, 2, 2], [3, 3, 3]]


@pytest.mark.parametrize("offsets", [[-1, 6], [4, 2], [2, 7], [2]])
def test_groups_outside_the_rows_are_refused(offsets):
    with pytest.raises(ValueError, match="_grouped_mm takes"):
        run(GROUPS, ROWS, MATRICES, torch.tensor(offsets, dtype=torch.int32))


def test_rows_of_no_group_are_zero():
    given = run(GROUPS, ROWS, MATRICES, torch.tensor([2, 4], dtype=torch.int32))
    assert torch.equal(given, torch.cat([16 * torch.ones(4, 16), torch.zeros(2, 16)]))


def test_programs_run_behind_the_guards():
    run_program = compile_program(make_program([Call(HISTC, (Slot(1),), {"bins": 4}, (2,))]))
    with pytest.raises(ValueError, match="histc takes"):
        run_program([VALUES], [VALUES])

"""Random inputs resemble the examples, differ from each other, and are equal for equal seeds."""

import pytest
import torch
from torch import nn

from overwinter.model.export import export
from overwinter.model.random_inputs import KINDS, RandomInputs


class Texts(nn.Module):
    """Tokens that are looked up in a table of 50, a mask and a scale."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 4)

    def forward(self, ids, mask, scale):
        return self.table(ids.view(-1, ids.shape[-1])) * mask[..., None] * scale


def draws(ids=None, mask=None, scale=None):
    examples = [
        torch.ones(2, 6, dtype=torch.int64) if ids is None else ids,
        torch.ones(2, 6, dtype=torch.int64) if mask is None else mask,
        torch.tensor(3.0) if scale is None else scale,
    ]
    both = {0: "batch", 1: "n"}
    made = export(Texts(), tuple(examples), {"ids": both, "mask": both})
    return RandomInputs(made.program, examples)


def test_tokens_are_rows_of_their_table_and_a_mask_hides_the_end_of_each_text():
    ids, mask, scale = draws().inputs({"batch": 40, "n": 9}, 0, "wide")
    assert ids.shape == mask.shape == (40, 9)
    assert 1 < ids.max() < 50
    assert ids.unique().numel() > 25
    assert (mask[:, 0] == 1).all()
    assert (mask.diff() <= 0).all()
    assert mask.sum(1).unique().numel() > 4
    assert 0 <= scale < 6


def test_inputs_near_the_examples_stay_within_their_range():
    values = torch.tensor([[3, 7, 4], [3, 3, 3]])
    ids, mask, scale = draws(values, torch.ones(2, 3, dtype=torch.int64)).inputs({"batch": 9, "n": 5}, 0, "near")
    assert ids.min() >= 3
    assert ids.max() <= 7
    assert (mask == 1).all()
    assert scale == 3


def test_the_example_may_hold_the_largest_and_the_smallest_integer():
    class Same(nn.Module):
        def forward(self, x):
            return x.clone()

    program = export(Same(), (torch.ones(2, 2, dtype=torch.int64),)).program
    most, least = torch.iinfo(torch.int64).max, torch.iinfo(torch.int64).min
    for low, high in ((5, most), (most, most), (least, most), (least, 5)):
        made = RandomInputs(program, [torch.tensor([[low, high], [high, low]])])
        for kind in ("near", "example", "least"):
            [drawn] = made.inputs({"batch": 9}, 0, kind)
            assert low <= drawn.min()
            assert drawn.max() <= (low if kind == "least" else high)
        assert made.inputs({"batch": 9}, 0, "wide")[0].unique().numel() > 1


def test_examples_are_cut_and_repeated_to_the_given_sizes():
    ids, _, _ = draws(torch.arange(12).reshape(2, 6)).inputs({"batch": 3, "n": 4}, 0, "example")
    assert ids.tolist() == [[0, 1, 2, 3], [6, 7, 8, 9], [0, 1, 2, 3]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_same_inputs_and_leaves_the_authors_generator_alone(kind):
    made = draws()
    before = torch.get_rng_state()
    first, again = (made.inputs({"batch": 4, "n": 5}, 1, kind) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(map(torch.equal, first, again))
    other = made.inputs({"batch": 4, "n": 5}, 2, kind)
    assert (kind != "wide") == all(map(torch.equal, first, other))


def test_numbers_are_spread_as_the_examples_are():
    class Twice(nn.Module):
        def forward(self, x):
            return 2 * x

    for example in (torch.rand(2, 500), 100 + torch.randn(2, 500)):
        [drawn] = RandomInputs(export(Twice(), (example,)).program, [example]).inputs({"batch": 20}, 0, "wide")
        assert example.min() <= drawn.min() < drawn.max() <= example.max()
        assert torch.isclose(drawn.mean(), example.mean(), rtol=0.1)
        assert torch.isclose(drawn.std(), example.std(), rtol=0.3)
    masked = torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])
    [drawn] = RandomInputs(export(Twice(), (masked,)).program, [masked]).inputs({"batch": 50}, 0, "wide")
    assert set(drawn.unique().tolist()) == {0.0, -torch.inf}

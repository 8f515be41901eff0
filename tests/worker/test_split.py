"""Requests of several functions in one run: shared calls run together, and each request gets the result of a separate
run.
"""

import pytest
import torch
from torch import nn

from overwinter.model.closeness import ClosenessMeter, bound_of
from overwinter.model.export import export
from overwinter.model.program import encode_program
from overwinter.worker.messages import Failure
from overwinter.worker.prepared import Prepared
from overwinter.worker.runner import Runner, answer
from overwinter.worker.split import SPLITS_KEPT
from overwinter.worker.weights import differing_weights

IDS = {"ids": torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])}


class Mixed(nn.Module):
    """Weights of every kind: a table, a token inserted before each row, norms, and weights applied to rows that lie in
    another dimension or are folded with positions.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(16, 8)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.norm = nn.LayerNorm(8)
        self.first = nn.Linear(8, 8)
        self.turned = nn.Parameter(torch.randn(8, 8))
        self.folded = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, ids):
        rows = ids.shape[0]
        x = torch.cat([self.token.expand(rows, -1, -1), self.table(ids)], 1)
        x = self.first(self.norm(x)).relu_()
        x = (x.transpose(0, 1) @ self.turned.t()).transpose(0, 1)
        x = x + self.folded(x.reshape(rows * 5, 8)).view(rows, 5, 8)
        return {"out": self.head(x.mean(1)).softmax(-1), "token": x[:, 0]}


class Family:
    """A program, and functions that differ in some of its weights."""

    def __init__(self, module: nn.Module, example: dict[str, torch.Tensor], dynamic=None) -> None:
        dynamic = dynamic or {name: {0: "batch"} for name in example}
        exported = export(module.eval().requires_grad_(False), example, dynamic)
        self.weights = exported.weights
        self.prepared = Prepared(encode_program(exported.program))
        self.program = self.prepared.program
        self.alone = 0
        """The number of runs of one function."""
        run = self.prepared.run

        def counted(weights, inputs):
            self.alone += 1
            return run(weights, inputs)

        self.prepared.run = counted

    def member(self, name: str, *own: int) -> Runner:
        generator = torch.Generator().manual_seed(len(name) + sum(map(ord, name)))
        weights = [
            weight * (1 + 0.5 * torch.rand(weight.shape, generator=generator)) if number in own else weight
            for number, weight in enumerate(self.weights)
        ]
        return Runner(name, self.prepared, weights, None)

    def is_together(self, asked) -> bool:
        """Whether these requests run together; checks that each gets the result of a separate run."""
        wanted = [runner.answer([request])[0] for runner, request in asked]
        self.alone = 0
        given = answer(asked)
        together = not self.alone
        meter = ClosenessMeter(self.program, bound_of(self.program))
        for right, left in zip(wanted, given, strict=True):
            assert not isinstance(left, Failure), left
            assert meter.compare(list(right.values()), list(left.values())) == ""
        return together


@pytest.fixture(scope="module")
def mixed() -> Family:
    return Family(Mixed(), IDS)


def ids(*first: int) -> dict:
    return {"ids": torch.stack([torch.arange(4) + number for number in first])}


def asked(family: Family, *own: int) -> list:
    """Return requests of three functions in rotation, one of them of two rows."""
    members = [family.member(name, *own) for name in ("f", "g", "h")]
    rows = [ids(1), ids(2, 3), ids(4), ids(5), ids(6), ids(7)]
    return [(members[at % 3], each) for at, each in enumerate(rows)]


def test_functions_that_differ_in_any_weight_share_the_rest_and_get_the_results_of_separate_runs(mixed):
    for number, weight in enumerate(mixed.program.weights):
        assert mixed.is_together(asked(mixed, number)), f"not with another {weight.name}"


def test_functions_that_differ_in_several_weights_share_the_calls_between_these_weights(mixed):
    names = {weight.name: number for number, weight in enumerate(mixed.program.weights)}
    for own in (["head.weight", "head.bias"], ["table.weight", "head.bias"], ["token", "norm.bias", "turned"]):
        assert mixed.is_together(asked(mixed, *(names[name] for name in own)))


def test_functions_with_the_same_weights_share_all_calls(mixed):
    assert mixed.is_together(asked(mixed))


def test_functions_that_have_nothing_in_common_run_separately(mixed):
    assert not mixed.is_together(asked(mixed, *range(len(mixed.weights))))


def test_a_split_has_a_separate_span_for_the_differing_weight_only_and_is_kept():
    family = Family(Mixed(), IDS)
    names = {weight.name: number for number, weight in enumerate(family.program.weights)}
    own = frozenset({names["head.weight"]})
    split = family.prepared.splits.of(own)
    assert [span.separate for span in split._spans] == [False, True, False]
    assert family.prepared.splits.of(own) is split


def test_functions_that_differ_in_many_sets_of_weights_need_no_further_splits_after_some_time():
    family = Family(Mixed(), IDS)
    splits = [family.prepared.splits.of(frozenset({number})) for number in range(SPLITS_KEPT)]
    names = {weight.name: number for number, weight in enumerate(family.program.weights)}
    sets = [frozenset({names["head.weight"], names["head.bias"], number}) for number in range(len(names))]
    for _ in range(3):
        made, splits = splits, [family.prepared.splits.of(own) for own in sets]
    assert None not in splits
    assert made == splits
    for own in sets:
        assert family.is_together(asked(family, *own))


def test_a_request_that_fails_fails_alone(mixed):
    number = len(mixed.weights) - 1
    f, g = mixed.member("f", number), mixed.member("g", number)
    for _ in range(2):
        good, bad, other = answer([(f, ids(1)), (g, {"ids": torch.full((1, 4), 99)}), (g, ids(2))])
        assert bad.error == "CallerError"
        assert "g" in bad.message
        assert torch.allclose(good["out"], f.answer([ids(1)])[0]["out"])
        assert torch.allclose(other["out"], g.answer([ids(2)])[0]["out"])
    # An invalid request says nothing about the functions: valid ones share runs as before.
    assert mixed.is_together([(f, ids(1)), (g, ids(2))])


class Turned(nn.Module):
    """Between its weights the rows are in another order, which no shape reveals."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        return {"out": self.third(self.second(self.first(x).flip(0)).flip(0))}


def test_functions_whose_rows_get_mixed_up_run_separately():
    family = Family(Turned(), {"x": torch.randn(2, 4)})
    second = [n for n, weight in enumerate(family.program.weights) if weight.name.startswith("second")]
    f, g = family.member("f", *second), family.member("g", *second)
    assert not family.is_together([(f, {"x": torch.randn(1, 4)}), (g, {"x": torch.randn(1, 4)})])


class Folded(nn.Module):
    """Folds rows and positions into one dimension, and takes means of the results of `score`, which differs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.first, self.score = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, ids):
        x = self.first(self.table(ids))
        return {"out": self.score(x.reshape(-1, 8)).view(ids.shape[0], -1).mean(1)}


def test_requests_of_every_length_get_all_of_their_own_rows_and_no_others():
    family = Family(Folded(), IDS, {"ids": {0: "batch", 1: "sequence"}})
    own = [n for n, weight in enumerate(family.program.weights) if weight.name.startswith("score")]
    f, g = family.member("f", *own), family.member("g", *own)
    for length in (2, 4, 3):
        first, second = (torch.arange(length)[None] + number for number in (1, 9))
        assert family.is_together([(f, {"ids": first}), (g, {"ids": second})])


def test_equal_requests_do_not_prove_that_different_ones_may_share_a_run():
    family = Family(Turned(), {"x": torch.randn(2, 4)})
    own = [n for n, weight in enumerate(family.program.weights) if not weight.name.startswith("first")]
    f, g, same = family.member("f", *own), family.member("g", *own), {"x": torch.zeros(1, 4)}
    family.is_together([(f, same), (g, same)])
    assert not family.is_together([(f, {"x": torch.randn(1, 4)}), (g, {"x": torch.randn(1, 4)})])


class Kept(nn.Module):
    """Writes in place to a value without rows that was computed before the differing weight, `own`, is read."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.own = nn.Linear(4, 4), nn.Parameter(torch.randn(4))

    def forward(self, x):
        kept = torch.zeros(4) + 1
        x = self.first(x)
        return {"out": x + kept.mul_(self.own)}


def test_no_function_sees_what_another_one_writes_in_place():
    family = Family(Kept(), {"x": torch.randn(2, 4)})
    own = [n for n, weight in enumerate(family.program.weights) if weight.name == "own"]
    f, g, h = (family.member(name, *own) for name in "fgh")
    # Nothing is shared, and the answers are those of separate runs.
    assert not family.is_together([(each, {"x": torch.randn(1, 4)}) for each in (f, g, h)])


def test_small_weights_of_the_same_bits_are_the_same_wherever_they_lie():
    small, large = torch.tensor([1.0, float("nan"), -0.0]), torch.ones(16 << 10)
    weights = [small, large, torch.zeros(1)]
    assert differing_weights(weights, [small.clone(), large, torch.tensor([-0.0])]) == {2}
    assert differing_weights(weights, [small, large.clone(), torch.zeros(1)]) == {1}

"""Graphs inside a graph: which become part of a flat program, and that the answer equals the module's."""

import pytest
import torch
from torch import nn

from overwinter.core.errors import ProgramError
from overwinter.model.compile import compile_program
from overwinter.model.export import export
from overwinter.model.nested import inline_nested
from tests.model.held import Held, assert_same, exported

torch.manual_seed(0)
ROWS = torch.randn(3, 8, 4)


def selected(self, x):
    return torch.cond(x.sum() > 0, lambda x: self.layer(x).sin(), lambda x: 1 / (x - x.flatten()[0]), (x,))


def selected_twice(self, x):
    def positive(x, y):
        return torch.cond(y.amax() > 2, lambda x: x.neg().relu_() + 1, lambda x: x.cos(), (x * 2,)), y + 1

    def negative(x, y):
        return x.log(), y.clone()

    one, other = torch.cond(x.sum().reshape(1) > 0, positive, negative, (x, x.sum(-1)))
    return one + 1, other


def with_constants(self, x):
    def positive(x):
        y = x * torch.tensor([1.0, 2.0, 3.0, 4.0])
        y[:, 0] = 7
        return y

    return torch.cond(x.sum() > 0, positive, lambda x: x.masked_fill(x > 0, torch.tensor(-1.0)) + 1, (x,))


@pytest.mark.parametrize("function", [selected, selected_twice])
def test_a_conditional_answers_as_its_module_does(function):
    module = Held(function, layer=nn.Linear(4, 4))
    made = exported(module, (ROWS[:2],))
    answers = []
    for shift in (-9.0, 0.0, 9.0):
        for count in (1, 2, 3):
            assert_same(module, made, ROWS[:count] + shift)
        with torch.inference_mode():
            answers.append(compile_program(made.program)(made.weights, (ROWS + shift,))[0].isfinite().all())
    assert not answers[0]
    assert answers[2]


def test_the_constants_of_a_branch_are_weights():
    module = Held(with_constants)
    made = exported(module, (ROWS[:2],))
    for shift in (-9.0, 9.0):
        assert_same(module, made, ROWS + shift)
    assert len(made.weights) == 3


def looked_up(self, x):
    return torch.cond(x.sum() > 0, lambda x: self.table(x.argmax(-1)), lambda x: x * 1, (x,))


def written(self, x):
    return torch.cond(x.sum() > 0, lambda x: x[:1].relu_() + 1, lambda x: x[:1] * 1, (x * 2,))


def written_in_a_context(self, x):
    def branch(x):
        with torch.enable_grad():
            y = x[:1].relu_()
        return y + 1

    return torch.cond(x.sum() > 0, branch, lambda x: x[:1] * 1, (x * 2,))


def returns_a_view(self, x):
    whole = x * 2
    part = torch.cond(whole.sum() > 0, lambda x: x[:1], lambda x: x[:1] * 1, (whole,))
    part.relu_()
    return whole


def depends_on_a_size(self, x):
    return torch.cond(x.shape[0] > 2, lambda x: x.sin(), lambda x: x.cos(), (x,))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (looked_up, r"aten\.embedding\.default may fail.*held.*torch\.cond"),
        (written, r"aten\.relu_\.default writes.*held.*torch\.cond"),
        (written_in_a_context, r"aten\.relu_\.default writes.*held.*torch\.cond"),
        (returns_a_view, r"torch\.cond returns a view.*held"),
        (depends_on_a_size, r"torch\.cond on a size.*held"),
    ],
)
def test_a_conditional_that_no_flat_program_can_express_is_refused(function, message):
    with pytest.raises(ProgramError, match=message):
        export(Held(function, table=nn.Embedding(4, 4)), (ROWS,))


def test_a_nested_graph_replaces_no_other_attribute_of_the_module():
    """Otherwise a graph's name in a file could hide that graph from the conversion, and the module would run it."""

    module = torch.export.export(Held(selected_twice), (ROWS,)).graph_module
    outer = [str(node.target) for node in module.graph.nodes if node.op == "get_attr"]
    names = [f"{name}_{inner}" for name in outer for inner, _ in module.get_submodule(name).named_children()]
    hidden = nn.Identity()
    for name in names:
        module.add_module(name, hidden)
    inline_nested(module)
    assert names
    assert all(module.get_submodule(name) is hidden for name in names)

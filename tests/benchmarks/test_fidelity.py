"""The comparison with eager PyTorch detects wrong answers, and tests the models that it lists."""

import os
import re
import signal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from benchmarks.fidelity import drawn
from benchmarks.fidelity.__main__ import in_separate_process, listed
from benchmarks.fidelity.architecture import Architecture, floats, leaves
from benchmarks.fidelity.exam import CALLERS, Row, eager, examine
from benchmarks.fidelity.judge import Finding, judged, refused, worst
from benchmarks.fidelity.table import ROOT, escaped, written
from benchmarks.nodes import running_node
from overwinter.core.ids import NAME_PATTERN

LISTED = {architecture.name: architecture for architecture in listed()}
HANDFUL = [
    "bert",
    "gemma-bf16",
    "whisper",
    "clip-separate-batches",
    "segformer",
    "unet",
    "embedding-bag",
    "pt2-twofold",
]
ANSWER = torch.tensor([[1.0, -2.0], [float("nan"), float("inf")]])


def altered(answer, at, value):
    copy = answer.clone()
    copy.view(-1)[at] = value
    return copy


@pytest.mark.parametrize(
    "have",
    [
        altered(ANSWER, 0, 1.001),
        altered(ANSWER, 1, 2.0),
        altered(ANSWER, 2, 0.0),
        altered(ANSWER, 3, float("-inf")),
        altered(ANSWER, 0, float("nan")),
        ANSWER.double(),
        ANSWER.reshape(4),
        ANSWER.flip(1),
    ],
    ids=str,
)
def test_a_different_answer_is_wrong(have):
    assert judged("batch=2", [ANSWER], [have]).verdict == "wrong"


def test_the_same_bits_are_equal_and_a_difference_in_the_last_bit_is_within():
    near = altered(ANSWER, 1, torch.nextafter(ANSWER[0, 1], torch.tensor(0.0)))
    assert judged("batch=2", [ANSWER], [ANSWER.clone()]).verdict == "equal"
    found = judged("batch=2", [ANSWER], [near])
    assert found.verdict == "within"
    assert 0 < found.difference < 1e-6


def test_a_missing_answer_is_wrong():
    assert judged("batch=2", [ANSWER, ANSWER], [ANSWER]).verdict == "wrong"


@given(st.integers(0, 99), st.integers(-5, 5))
def test_whole_numbers_are_equal_or_wrong(at, change):
    want = torch.arange(100)
    found = judged("batch=1", [want], [altered(want, at, at + change)])
    assert found.verdict == ("wrong" if change else "equal")


@pytest.mark.parametrize(
    "sentence",
    [
        "Traceback (most recent call last):\n  File ...",
        "a field '__obj_flatten__' is missing; use another",
        "Could not guard on data-dependent expression 2*u4 - 1 < 0; use another",
        "not all values of L['x'].size()[1] hold; narrow the size",
        "RuntimeError: the model needs batch % 2 == 0",
        "aten.histc.default is not an operator that a program may call",
        "give another size; " + "x" * 400,
    ],
)
def test_an_unclear_refusal_is_wrong(sentence):
    assert refused("deploy", sentence).verdict == "wrong"


@pytest.mark.parametrize(
    "sentence",
    [
        "dimension 'sequence' cannot vary freely: leave it out of `dynamic` to fix it to the example's size",
        "input 'x' of f@1: batch must be 2 to 64, not 1",
        "f@1 cannot run inputs of shapes [[3, 12]]: the model needs batch % 2 == 0",
    ],
)
def test_a_clear_refusal_is_not_wrong(sentence):
    assert refused("deploy", sentence).verdict == "refused_clearly"


def test_one_wrong_answer_outweighs_all_others():
    seen = [Finding("batch=1", "equal"), Finding("batch=2", "wrong"), Finding("batch=3", "refused_clearly")]
    assert worst(seen) == "wrong"
    assert worst(seen[:1]) == "equal"


class Tampered:
    """Builds the author's module at the first call, and a different module for the deploy."""

    def __init__(self, deployed):
        self.modules = [nn.Linear(12, 4), deployed]

    def __call__(self):
        return self.modules.pop(0)


def linear(name, module):
    return Architecture(name, "PyTorch", module, {"input": floats("batch", 12)})


def test_a_node_that_answers_differently_is_detected():
    with running_node("--cores", "1") as node:
        honest = examine(linear("honest", lambda: nn.Linear(12, 4)), node.url, 1)
        tampered = examine(linear("tampered", Tampered(nn.Sequential(nn.Linear(12, 4), nn.Tanh()))), node.url, 1)
        assert node.client.functions() == []
    assert honest.verdict in ("equal", "within")
    assert [finding.where for finding in honest.findings if finding.compared] == ["batch=1", "batch=2", "batch=3"]
    assert honest.shared.compared
    assert f"{CALLERS} requests" in honest.shared.text
    assert tampered.verdict == "wrong"
    assert [finding.verdict for finding in tampered.findings if finding.where.startswith("batch")] == ["wrong"] * 3
    assert tampered.shared.verdict == "wrong"


def test_eager_draws_the_same_random_numbers_twice():
    module = nn.Dropout()
    inputs = {"input": torch.ones(100)}
    assert judged("again", eager(module, inputs), eager(module, inputs)).verdict == "equal"


def test_a_crash_of_an_export_is_a_wrong_result_and_ends_nothing_else():
    row = in_separate_process("crashing", lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert isinstance(row, Row)
    assert (row.name, row.verdict) == ("crashing", "wrong")
    assert in_separate_process("sound", lambda: Row("sound", "", 0, (), Finding("shared", "equal"))).name == "sound"


def test_the_list_is_long_and_its_names_can_be_deployed():
    assert len(LISTED) == len(listed()) >= 60
    assert all(re.fullmatch(NAME_PATTERN, name) for name in LISTED)


@pytest.mark.parametrize("name", HANDFUL)
def test_answers_of_listed_models_are_repeatable_and_depend_on_their_inputs(name):
    architecture = LISTED[name]
    module, twin = architecture.build(1), architecture.build(1)
    inputs, others = architecture.inputs_at({}, 1), architecture.inputs_at({}, 2)
    with torch.inference_mode():
        answers = leaves(module(**inputs))
        assert judged("again", answers, leaves(twin(**inputs))).verdict == "equal"
        assert any(not torch.equal(one, two) for one, two in zip(answers, leaves(module(**others)), strict=True))


def test_the_draw_leaves_out_what_is_listed():
    kinds = drawn.model_types(architecture.kind for architecture in LISTED.values())
    assert len(kinds) > 300
    assert not {"bert", "mixtral", "whisper"} & set(kinds)


def test_a_drawn_type_is_small_and_answers():
    architecture = drawn.architecture("camembert", 1)
    module = architecture.build(1)
    assert sum(parameter.numel() for parameter in module.parameters()) < 1e6
    with torch.inference_mode():
        assert leaves(module(**architecture.inputs_at({}, 1)))


def test_a_type_that_is_part_of_another_is_passed_over():
    with pytest.raises(drawn.CannotBuildError, match="part of another"):
        drawn.architecture("sam_mask_decoder", 1)


def test_the_table_tells_of_each_architecture_and_of_those_passed_over():
    row = Row(
        "bert",
        "transformers BertModel",
        37856,
        tuple(Finding(where, "equal", compared=True) for where in ("batch=1", "batch=2", "texts=5 images=7")),
        Finding("shared", "equal"),
    )
    table = written([row], [("sam", "it is part | of another")], 8)
    assert "| bert | transformers BertModel | 37,856 | batch 1, 2; texts=5 images=7 | equal | 0 |" in table
    assert "`sam`: it is part \\| of another" in table


@pytest.mark.parametrize("prefix", [f"{ROOT}/.venv/lib/python3.11", "/opt/overwinter/lib/python3.12"])
def test_a_table_has_no_paths_of_this_machine(prefix):
    assert escaped(f"called at {prefix}/site-packages/torch/nn.py, {ROOT}/benchmarks/plain.py") == (
        "called at site-packages/torch/nn.py, benchmarks/plain.py"
    )

"""A new version that fails its author's requests is refused; one that fails only a generated request gets a warning."""

import threading

import pytest
import torch

from overwinter.core.errors import CallerError, HandlerError, ProgramError
from overwinter.core.tensor import TensorSpec
from overwinter.model.export import export
from overwinter.model.program import encode_program
from overwinter.worker import trial
from overwinter.worker.handler import Code, Handler
from overwinter.worker.prepared import Prepared
from overwinter.worker.runner import Runner

TEXTS = (TensorSpec("text", "BYTES", ("batch", 2)), TensorSpec("scale", "FP32", ("n",)))
LENGTHS = """
import torch

def preprocess(inputs, state):
    assert inputs["scale"].shape == (3,)
    return {"x": torch.tensor([[float(len(text))] * 3 for text in inputs["text"]])}
"""


class Sum(torch.nn.Module):
    def forward(self, x):
        return {"y": x.sum(dim=1)}


@pytest.fixture(scope="module")
def prepared():
    made = export(Sum(), {"x": torch.zeros(2, 3)}, {"x": {0: "batch", 1: "n"}})
    return Prepared(encode_program(made.program))


def runner(prepared, handler: str, outputs=()) -> Runner:
    return Runner("f@1", prepared, [], Handler(Code(handler), {}), outputs)


def test_a_request_is_generated_from_what_the_handler_declares(prepared):
    assert trial.generated_warning(runner(prepared, LENGTHS), TEXTS) == ""


def test_a_generated_request_of_the_programs_own_inputs_has_the_sizes_of_the_example(prepared):
    made = runner(prepared, "def preprocess(inputs, state):\n    assert inputs['x'].shape[1] == 3\n    return inputs\n")
    assert trial.generated_warning(made, made.program.inputs) == ""


FAULTS = {
    "raises": ("def preprocess(inputs, state):\n    raise KeyError('no picture')\n", "no picture"),
    "leaves": ("def preprocess(inputs, state):\n    raise SystemExit('enough')\n", "enough"),
    "cannot be encoded": ("def preprocess(inputs, state):\n    raise ValueError('\\udc80')\n", "udc80"),
    "names nothing": ("def preprocess(inputs, state):\n    return {1: inputs['x'], 'x': 2}\n", "1 is not a string"),
    "is no function": (
        "class Step:\n    def __call__(self, inputs, state):\n        1 / 0\n\npreprocess = Step()\n",
        "preprocess failed: ZeroDivisionError",
    ),
    "misses": ("def preprocess(inputs, state):\n    return {}\n", "needs a tensor 'x'"),
    "returns nothing": ("def postprocess(outputs, inputs, state):\n    pass\n", "must return a dict"),
    "cannot be sent": (
        "def postprocess(outputs, inputs, state):\n    return {'y': outputs['y'].cfloat()}\n",
        "complex64",
    ),
    "returns another name": (
        "def postprocess(outputs, inputs, state):\n    return {'z': outputs['y']}\n",
        "OUTPUTS, by default the program's outputs, has",
    ),
}


@pytest.mark.parametrize(("handler", "words"), FAULTS.values(), ids=FAULTS.keys())
def test_a_failure_on_a_generated_request_is_reported_with_a_remedy(prepared, handler, words):
    made = runner(prepared, handler, (TensorSpec("y", "FP32", ("batch",)),))
    result = trial.generated_warning(made, made.program.inputs)
    assert words in result.encode().decode()
    assert "--sample" in result


@pytest.mark.parametrize(("handler", "words"), FAULTS.values(), ids=FAULTS.keys())
def test_a_handler_that_fails_on_a_sample_is_refused(prepared, handler, words):
    made = runner(prepared, handler, (TensorSpec("y", "FP32", ("batch",)),))
    with pytest.raises((HandlerError, CallerError), match=words):
        trial.check_samples(made, [{"x": torch.ones(1, 3)}])


def test_a_handler_that_never_returns_is_reported(prepared, monkeypatch):
    monkeypatch.setattr(trial, "GENERATED_S", 1)
    made = runner(prepared, "def preprocess(inputs, state):\n    while True:\n        pass\n")
    assert "more than 1 s" in trial.generated_warning(made, made.program.inputs)


def test_a_handler_that_never_returns_on_a_sample_is_refused(prepared, monkeypatch):
    monkeypatch.setattr(trial, "SAMPLES_S", 1)
    made = runner(prepared, "def preprocess(inputs, state):\n    while True:\n        pass\n")
    with pytest.raises(HandlerError, match="sample 1.*more than 1 s"):
        trial.check_samples(made, [{"x": torch.ones(1, 3)}])


def test_a_program_that_takes_too_long_on_a_sample_is_refused_with_the_number_of_the_sample(prepared, monkeypatch):
    monkeypatch.setattr(trial, "SAMPLES_S", 1)
    made = runner(prepared, "")
    made._run = lambda weights, inputs: threading.Event().wait(60)
    with pytest.raises(ProgramError, match="does not answer sample 1.*more than 1 s"):
        trial.check_samples(made, [{"x": torch.ones(1, 3)}])


def test_the_sample_whose_answer_is_too_large_is_named_by_its_number(prepared):
    large = "{'y': torch.zeros(1).expand(1 << 30)} if inputs['x'].sum() else outputs"
    made = runner(prepared, f"import torch\ndef postprocess(outputs, inputs, state): return {large}")
    with pytest.raises(HandlerError, match="sample 2: the answer has 4294967296 bytes"):
        trial.check_samples(made, [{"x": torch.zeros(1, 3)}, {"x": torch.ones(1, 3)}])


def test_the_sample_that_failed_is_named_by_its_number(prepared):
    made = runner(prepared, "def preprocess(inputs, state):\n    1 / inputs['x'][0, 0].item()\n    return inputs\n")
    trial.check_samples(made, [{"x": torch.ones(1, 3)}])
    with pytest.raises(HandlerError, match="sample 2.*ZeroDivisionError"):
        trial.check_samples(made, [{"x": torch.ones(1, 3)}, {"x": torch.zeros(1, 3)}])


@pytest.mark.parametrize(
    ("handler", "words"),
    [
        ("def preprocess(inputs):\n    return inputs\n", r"preprocess\(inputs, state\).*too many"),
        ("def preprocess(inputs, state, more):\n    return inputs\n", "missing a required argument: 'more'"),
        ("def postprocess(outputs, state):\n    return outputs\n", r"postprocess\(outputs, inputs, state\)"),
        ("preprocess = 3\n", "preprocess is of type int"),
        ("def read_asset(data):\n    return data\n", r"read_asset\(name, data\)"),
    ],
)
def test_a_handler_function_that_cannot_be_called_with_its_arguments_is_refused(handler, words):
    with pytest.raises(HandlerError, match=words):
        Handler(Code(handler), {})


def test_a_handler_function_may_have_further_parameters_with_defaults():
    handler = Handler(Code("def preprocess(*inputs, more=1):\n    return {'x': inputs[0]['x'] + more}\n"), {})
    assert handler.preprocess({"x": torch.zeros(1)}) == {"x": torch.ones(1)}


class Lookup(torch.nn.Module):
    """Looks up numbers counted from 1, so that 0 is invalid."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(10, 4).requires_grad_(False)

    def forward(self, ids):
        return {"y": self.table(ids - 1)}


def test_a_program_that_fails_for_some_values_may_fail_on_zeros():
    made = export(Lookup(), {"ids": torch.ones(2, 3, dtype=torch.int64)})
    one = Runner("f@1", Prepared(encode_program(made.program)), made.weights, None)
    nbytes, warning = trial.run_on_zeros(one)
    assert nbytes == 0
    for named in ("f@1", "zeros", "--sample"):
        assert named in warning
    trial.check_samples(one, [{"ids": torch.ones(1, 3, dtype=torch.int64)}])
    with pytest.raises(CallerError, match="sample 1"):
        trial.check_samples(one, [{"ids": torch.zeros(1, 3, dtype=torch.int64)}])


def test_a_program_that_always_fails_is_refused(prepared, monkeypatch):
    def failing(weights, inputs):
        raise RuntimeError("no such kernel")

    one = Runner("f@1", prepared, [], None, run=failing)
    monkeypatch.setattr(prepared, "run", failing)
    with pytest.raises(RuntimeError, match="no such kernel"):
        trial.run_on_zeros(one)

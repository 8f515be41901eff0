"""Exports of models to programs: what is kept, what is refused, and the messages of refusals."""

import sys

import pytest
import torch
from torch import nn
from torch.export import Dim

from overwinter.core.errors import ProgramError
from overwinter.core.tensor import TensorSpec
from overwinter.model.agreement import agree
from overwinter.model.compile import compile_program
from overwinter.model.export import export, export_saved
from overwinter.model.liveness import peak_activation_bytes
from overwinter.model.program import encode_program, validate

X = torch.arange(56.0).reshape(2, 7, 4) / 10
SEQUENCE = {"x": {0: "batch", 1: "sequence"}}


class Net(nn.Module):
    """A module around one function, with a weight and a buffer that it can use."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(-1, 1, 128).reshape(32, 4))
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x):
        return self.function(self, x)


def same(module, program, weights, *inputs):
    """Whether the program returns what the module returns, bit for bit."""
    with torch.inference_mode():
        expected, given = module(*inputs), compile_program(program)(weights, inputs)
    expected = expected if isinstance(expected, tuple) else (expected,)
    return len(expected) == len(given) and all(map(torch.equal, expected, given))


def operators(program):
    return [call.operator for call in program.calls]


def test_batch_is_dynamic_by_default_and_an_example_of_batch_one_is_enough():
    module = Net(lambda self, x: x @ self.weight.t())
    program, weights = export(module, (X[:1],))
    assert program.inputs == (TensorSpec("x", "FP32", ("batch", 7, 4)),)
    assert program.outputs == (TensorSpec("output", "FP32", ("batch", 7, 32)),)
    assert program.dimensions == {"batch": (1, 1024)}
    assert program.example == {"batch": 1}
    for batch in (1, 2, 5):
        assert same(module, program, weights, X[:1].repeat(batch, 1, 1))


def test_empty_dynamic_fixes_all_sizes():
    program, _ = export(Net(lambda self, x: x + 1), (X,), {})
    assert program.inputs[0].shape == (2, 7, 4)
    assert program.dimensions == {}
    assert peak_activation_bytes(program) == 2 * X.nbytes


def test_inputs_by_name_keep_the_order_of_forward():
    class Two(nn.Module):
        def forward(self, first, second=None, third=None):
            return first - third

    program, _ = export(Two(), {"third": X, "first": X})
    assert [spec.name for spec in program.inputs] == ["first", "third"]


def test_starred_inputs_are_numbered():
    class Many(nn.Module):
        def forward(self, *parts):
            return sum(parts)

    program, weights = export(Many(), (X, X))
    assert [spec.name for spec in program.inputs] == ["parts_0", "parts_1"]
    assert same(Many(), program, weights, X, X)


def test_outputs_are_named_by_their_path():
    program, _ = export(Net(lambda self, x: {"a": x + 1, "b": [x + 2, {"c": x + 3}], "none": None}), (X,))
    assert [spec.name for spec in program.outputs] == ["a", "b_0", "b_1_c"]
    program, _ = export(Net(lambda self, x: (x + 1, x + 2)), (X,))
    assert [spec.name for spec in program.outputs] == ["output_0", "output_1"]


def test_range_of_a_dynamic_size_is_narrowed_to_what_the_model_allows():
    module = Net(lambda self, x: x + self.weight[: x.shape[1]])
    program, weights = export(module, (X,), SEQUENCE)
    assert program.dimensions == {"batch": (1, 1024), "sequence": (1, 32)}
    assert same(module, program, weights, X[:, :1])


def test_author_may_give_the_range_of_a_size():
    module = Net(lambda self, x: nn.functional.conv1d(x[:, None], torch.ones(1, 1, 400), stride=160))
    audio = torch.rand(2, 1600)
    for size in (("samples", 700, 480_000), Dim("samples", min=700, max=480_000)):
        program, weights = export(module, (audio,), {"x": {0: ("batch", 1, 5000), 1: size}})
        assert program.dimensions == {"batch": (1, 5000), "samples": (700, 480_000)}
        assert same(module, program, weights, torch.rand(1, 9000))


def test_largest_size_is_what_the_memory_of_one_request_allows():
    linear, _ = export(Net(lambda self, x: x + 1), (X,), SEQUENCE)
    square, _ = export(Net(lambda self, x: x @ x.transpose(1, 2)), (X,), SEQUENCE)
    given, _ = export(Net(lambda self, x: x @ x.transpose(1, 2)), (X,), {"x": {1: ("sequence", 1, 500_000)}})
    assert linear.dimensions["sequence"][1] > 480_000
    assert 8192 <= square.dimensions["sequence"][1] < linear.dimensions["sequence"][1]
    assert given.dimensions["sequence"][1] == 500_000
    assert peak_activation_bytes(square, {"sequence": square.dimensions["sequence"][1]}) <= 4 << 30


def test_sizes_that_depend_on_each_other_keep_their_names():
    def twice(self, x, y):
        return torch.cat([x, x], 1) + y

    class Two(Net):
        def forward(self, x, y):
            return self.function(self, x, y)

    inputs = {"x": torch.rand(2, 3), "y": torch.rand(2, 6)}
    program, weights = export(Two(twice), inputs, {"x": {0: "batch", 1: "n"}, "y": {0: "batch", 1: "m"}})
    assert [spec.shape for spec in program.inputs] == [("batch", "n"), ("batch", "m")]
    assert same(Two(twice), program, weights, torch.rand(3, 4), torch.rand(3, 8))
    with pytest.raises(RuntimeError, match=r"m == 2 \* n|n == m // 2"):
        compile_program(program)(weights, (torch.rand(3, 4), torch.rand(3, 1)))


def test_the_minimum_of_a_size_is_raised_if_the_model_needs_it():
    module = Net(lambda self, x: x[:, ::2].mean(-1))
    program, weights = export(module, (X,), SEQUENCE)
    low, _ = program.dimensions["sequence"]
    assert 1 < low <= 7
    assert program.outputs[0].shape[0] == "batch"
    assert "sequence" in program.outputs[0].shape[1]
    assert same(module, program, weights, X)


def test_unused_weights_are_dropped_and_the_rest_come_in_order_of_use():
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(3, 3)
            self.last = nn.Linear(8, 2)
            self.first = nn.Conv1d(7, 8, 1)
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x):
            return self.last(self.norm(self.first(x)).mean(-1))

    program, weights = export(Norm(), (X,))
    names = [weight.name for weight in program.weights]
    assert names[:2] == ["first.weight", "first.bias"]
    assert set(names[2:6]) == {"norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"}
    assert names[6:] == ["last.weight", "last.bias"]
    assert all(weight.is_contiguous() and not weight.requires_grad for weight in weights)


def test_constants_become_weights_and_copies_that_are_written_to_stay_copies():
    def forward(self, x):
        scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
        offset = torch.tensor([1.0, 2.0, 3.0, 4.0])
        offset += 1
        return x * scale + offset

    module = Net(forward)
    program, weights = export(module, (X,))
    assert len(weights) == 2
    assert operators(program).count("aten.clone.default") == 1
    assert same(module, program, weights, X)
    assert same(module, program, weights, X)


def test_gradient_switches_and_disabled_autocast_are_inlined():
    def forward(self, x):
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            y = x @ self.weight.t()
        with torch.enable_grad():
            return y + 1

    module = Net(forward)
    program, weights = export(module, (X,))
    assert operators(program) == ["aten.t.default", "aten.matmul.default", "aten.add.Tensor"]
    assert same(module, program, weights, X)


def test_dropout_and_assertions_on_fixed_sizes_leave_no_call():
    def forward(self, x):
        torch._assert(x.shape[1] > 0, "empty")
        return nn.functional.dropout(x.detach(), 0.5, self.training) + 1

    program, _ = export(Net(forward).train(), (X,))
    assert operators(program) == ["aten.add.Tensor"]


def test_a_write_through_the_result_of_dropout_is_kept():
    def forward(self, x):
        y = x.clone()
        z = nn.functional.dropout(y, 0.5, self.training)
        z[:, 0].add_(1)
        return y

    module = Net(forward).eval()
    program, weights = export(module, (X,))
    assert same(module, program, weights, X)


def test_a_converted_copy_of_an_input_or_a_weight_may_be_written_to():
    def forward(self, x):
        y = x.float()
        y.div_(255)[:, 0].add_(self.weight.double().mul_(2).sum().float())
        return y.to(torch.float32, copy=True).neg_() + y

    module, pixels = Net(forward), (X * 10).to(torch.uint8)
    assert same(module, *export(module, (pixels,)), pixels)
    with pytest.raises(ProgramError, match="writes in place to input 'x'"):
        export(module, (X,))


def test_the_square_root_of_a_size_is_computed_in_each_run():
    module = Net(lambda self, x: x / torch.sym_sqrt(x.shape[1]))
    program, weights = export(module, (X,), SEQUENCE)
    assert all(same(module, program, weights, X[:, :length]) for length in (1, 3, 7))


def test_an_output_may_have_one_of_two_sizes():
    module = Net(lambda self, x: x[:, : torch.sym_ite(x.shape[1] > 4, x.shape[1] - 2, x.shape[1])])
    program, weights = export(module, (X,), SEQUENCE)
    assert "sequence" in program.outputs[0].shape[1]
    assert all(same(module, program, weights, X[:, :length]) for length in (3, 4, 5, 7))


def test_slice_assignment_and_operators_with_several_results_give_the_same_bits():
    def forward(self, x):
        canvas = torch.zeros(x.shape[0], 9, 4)
        canvas[:, 1:8] = x
        best, place = canvas.max(1)
        first, second = canvas.split(5, 1)
        values, _ = second.topk(2, 1)
        return best, place, first.sum((1, 2)), values

    module = Net(forward)
    program, weights = export(module, (X,))
    for batch in (1, 3):
        assert same(module, program, weights, X[:1].repeat(batch, 1, 1))


def test_a_recurrent_model_keeps_the_lstm_operator_and_gives_the_same_bits():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True, dropout=0.5)

        def forward(self, x):
            outputs, (hidden, _) = self.lstm(x)
            return outputs[:, -1], hidden

    module = Recurrent()
    program, weights = export(module, (X,))
    assert "aten.lstm.input" in operators(program)
    assert len(weights) == 16
    for batch in (1, 3):
        assert same(module, program, weights, X[:1].repeat(batch, 1, 1))


def test_programs_of_one_architecture_are_equal_whatever_the_weights():
    def build(seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    assert encode_program(export(build(0), (X,)).program) == encode_program(export(build(1), (X,)).program)


class Opaque:
    """An object that is not a tensor."""


def refusals():
    """Return functions with which a module cannot be exported, each by a part of its error message."""

    def fails(self, x):
        raise KeyError("vocabulary")

    def branches(self, x):
        if x.sum() > 0:
            return x
        return x + 1

    def partly_random(self, x):
        y = x.clone()
        y[0].normal_()
        return y

    def with_autocast(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ self.weight.t()

    def batch_norm(self, x):
        return nn.functional.batch_norm(x, torch.zeros(7), torch.ones(7), training=True)

    return {
        "vocabulary": fails,
        "if x.sum": branches,
        "autocast": with_autocast,
        "training must be False": batch_norm,
        "aten.rand_like.default.*test_export.py": lambda self, x: x + torch.rand_like(x),
        "aten.normal_.default.*test_export.py": partly_random,
        "aten.nonzero.default": lambda self, x: torch.nonzero(x),
        "aten.index.Tensor.*torch.where": lambda self, x: x[x > 0].sum(),
        "aten.dropout.default": lambda self, x: nn.functional.dropout(x, 0.5, True),
        "aten.empty_strided.*raw strides": lambda self, x: torch.empty_strided(x.shape, (0, 1, 2)).fill_(1),
        "aten.add_.Tensor, writes in place to weight 'total'": lambda self, x: x + self.total.add_(x.mean()),
        "aten.mul_.Tensor, writes in place to input 'x'": lambda self, x: x.mul_(2),
        "aten.zero_.default, writes in place to weight 'weight'": lambda self, x: x + self.weight[0].zero_(),
        "'batch' cannot vary freely: the model needs batch = 2": lambda self, x: x.view(2, -1),
        r"the model needs batch = 2 \(.*test_export.py": lambda self, x: x if x.shape[0] == 2 else -x,
        "returns a .*Opaque; return tensors": lambda self, x: Opaque(),
        "uses NumPy.*test_export.py": lambda self, x: torch.from_numpy(x.numpy()),
        "output 'output_0' must be a tensor": lambda self, x: (x.shape[0], x),
        "complex64": lambda self, x: torch.view_as_complex(x.reshape(-1, 14, 2)),
    }


@pytest.mark.parametrize("message", refusals())
def test_what_cannot_be_exported_is_named_in_one_sentence(message, capfd):
    with pytest.raises(ProgramError, match=message) as raised:
        export(Net(refusals()[message]), (X,))
    assert "\n" not in str(raised.value)
    assert capfd.readouterr() == ("", "")


def test_what_the_model_prints_is_printed(capfd):
    def chatty(self, x):
        sys.stderr.write("reading")
        return x + 1

    export(Net(chatty), (X,))
    assert "reading" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("example", "dynamic", "message"),
    [
        ((X, X), None, "do not fit"),
        ({"y": X}, None, "do not fit"),
        ((3,), None, "is of type int"),
        ((X.to_sparse(),), None, "'x' is torch.sparse_coo; inputs are dense"),
        ((X.to("meta"),), None, "'x' is without data"),
        ((X,), {"y": {0: "batch"}}, "not an input; the inputs are x"),
        ((X,), {"x": {3: "batch"}}, "has 3 dimensions"),
        ((X,), {"x": {0: ("batch", 1, 9), -3: "other"}}, "dimension 0 of input 'x' twice"),
        ((X,), {"x": {0: "a b"}}, "like a variable"),
        ((X,), {"x": {0: "class"}}, "'class' of input 'x' must be named like a variable"),
        ((X,), {"x": {1: ("n", 5, 4)}}, "smallest"),
        ((X,), {"x": {1: ("n", 8, 64)}}, "'x' has 7 for 'n'"),
        ((X,), {"x": {1: Dim.AUTO}}, "write a name"),
        ((X,), {"x": {1: 2 * Dim("n")}}, "found by the export"),
        ((X,), {"x": {1: ("n", 2, 64), 2: ("n", 2, 32)}}, "two ranges"),
        ((X,), {"x": {0: "n", 1: "n"}}, "equal examples"),
        ((X[:0],), None, "no elements"),
    ],
)
def test_wrong_examples_and_dynamic_sizes_are_named(example, dynamic, message):
    with pytest.raises(ProgramError, match=message):
        export(Net(lambda self, x: x + 1), example, dynamic)


def test_keyword_inputs_that_forward_does_not_name_are_refused():
    class Free(nn.Module):
        def forward(self, **inputs):
            return inputs["x"] + 1

    with pytest.raises(ProgramError, match=r"\*\*inputs"):
        export(Free(), {"x": X})


def test_sparse_weights_are_refused():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.eye(4).to_sparse())

        def forward(self, x):
            return torch.mm(self.table, x[0].t())

    with pytest.raises(ProgramError, match="table.* torch.sparse_coo"):
        export(Sparse(), (X,))


def test_a_saved_export_becomes_a_program_with_the_same_answers_and_ranges(tmp_path):
    module = Net(lambda self, x: x @ self.weight.t()).eval()
    batch, length = torch.export.Dim("batch", max=64), torch.export.Dim("length", max=32)
    saved = torch.export.export(module, (X,), dynamic_shapes={"x": {0: batch, 1: length}}, strict=False)
    torch.export.save(saved, tmp_path / "net.pt2")
    program, weights = export_saved(tmp_path / "net.pt2")
    assert program.inputs == (TensorSpec("x", "FP32", ("batch", "size_1", 4)),)
    assert program.dimensions["size_1"][1] == 32
    assert program.example == {"batch": 1, "size_1": 7}
    assert same(module, program, weights, X[:1, :5])


def test_a_saved_export_may_write_into_the_copy_of_a_constant(tmp_path):
    def forward(self, x):
        scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
        scale[1] = 5.0
        scale.view(2, 2).detach()[1].mul_(x[0, 0, 1])
        return x * scale + torch.tensor([1.0, 2.0, 3.0, 4.0])

    torch.export.save(torch.export.export(Net(forward), (X,)), tmp_path / "net.pt2")
    program, weights = export_saved(tmp_path / "net.pt2")
    assert operators(program).count("aten.clone.default") == 1
    assert same(Net(forward), program, weights, X + 1)


def test_file_that_is_no_export_is_refused(tmp_path):
    (tmp_path / "net.pt2").write_bytes(b"nothing")
    with pytest.raises(ProgramError, match=r"cannot open net\.pt2"):
        export_saved(tmp_path / "net.pt2")


def test_an_export_within_autocast_is_refused():
    module = Net(lambda self, x: x @ self.weight.t())
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ProgramError, match="autocast"):
        export(module, (X,))


def test_an_operators_argument_without_a_default_may_be_none():
    module = Net(lambda self, x: torch.div(x, self.weight[0], rounding_mode=None))
    assert same(module, *export(module, (X,)), X)


def counts(self, x):
    self.total.add_(1)
    return x + self.total


def writes(self, x):
    x.mul_(2)
    return x + 1


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize(("function", "named"), [(counts, "total"), (writes, "args_0|x")])
def test_a_saved_export_that_changes_a_buffer_or_an_input_is_refused(function, named, tmp_path):
    saved = torch.export.export(Net(function), (X.clone(),)).run_decompositions()
    torch.export.save(saved, tmp_path / "net.pt2")
    with pytest.raises(ProgramError, match=f"changes '({named})'"):
        export_saved(tmp_path / "net.pt2")


class Difference(nn.Module):
    def forward(self, x, y):
        return x - y


def test_one_tensor_may_be_the_example_of_several_inputs():
    program, weights = export(Difference(), (X, X))
    with torch.inference_mode():
        [given] = compile_program(program)(weights, (X, 2 * X))
    assert torch.equal(given, -X)


def test_a_weight_of_the_model_may_be_an_example():
    module = Net(lambda self, x: x - self.weight)
    program, weights = export(module, (module.weight,), {})
    assert same(module, program, weights, module.weight.detach() * 3)


class Powered(nn.Module):
    def forward(self, x, k):
        return x + (0 if k is None else k)


@pytest.mark.parametrize("value", [None, 3])
def test_a_saved_export_with_an_argument_that_is_no_tensor_is_refused(value, tmp_path):
    torch.export.save(torch.export.export(Powered(), (X, value)), tmp_path / "net.pt2")
    with pytest.raises(ProgramError, match="input 'k' must be a tensor"):
        export_saved(tmp_path / "net.pt2")


def test_a_limit_on_memory_does_not_lower_the_maximum_below_the_size_of_the_example(monkeypatch):
    class Wide(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q = torch.nn.Linear(4, 64, bias=False)

        def forward(self, x):
            return {"y": self.q(x).relu().sum(1)}

    # With this limit, the small model stands for one whose activations exceed 4 GiB at the size of its example.
    monkeypatch.setattr("overwinter.model.export.MEMORY_BYTES", 1 << 20)
    program = agree(export(Wide().eval(), {"x": torch.randn(2, 6000, 4)}, {"x": {0: "batch", 1: "n"}}), 1).program
    assert program.dimensions["n"] == (1, 6000)
    validate(program)

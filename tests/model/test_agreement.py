"""A program is compared with its module: at the sizes where exports fail, and for requests that share a run."""

import itertools
import re

import pytest
import torch
from torch import nn

from overwinter.core.errors import ProgramError
from overwinter.model.agreement import agree
from overwinter.model.compile import compile_program
from overwinter.model.export import export, export_saved

X = torch.arange(56.0).reshape(2, 7, 4) / 10
BATCH = {"x": {0: "batch"}}
BOTH = {"x": {0: "batch", 1: "sequence"}}


class Net(nn.Module):
    """A module around one function, with a weight that it can use."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16).reshape(4, 4))

    def forward(self, x):
        return self.function(self, x)


def agreed(function, dynamic=BOTH, x=X):
    return agree(export(Net(function), (x,), dynamic))


def squeezed(_, x):
    y = x.mean(-1).squeeze()
    return x * (2 if y.dim() == 2 else 3)


def scaled(_, x):
    return x * 100 if x.shape[0] == 1 else x


@pytest.mark.parametrize(
    ("function", "least"),
    [
        (lambda self, x: x @ self.weight, (1, 1)),
        (scaled, (2, 1)),
        (lambda _, x: x if x.shape[1] <= 1 else x + 1, (1, 2)),
        (lambda _, x: x - 1 if x.shape[0] > 1 else x, (2, 1)),
        (squeezed, (2, 2)),
    ],
)
def test_the_minimum_of_a_size_becomes_two_if_the_answers_at_one_are_wrong(function, least):
    program, weights, agreement = agreed(function)
    lows = {name: low for name, (low, _) in program.dimensions.items()}
    assert tuple(lows.values()) == least
    assert all(any(note.startswith(name) for note in agreement.notes) for name, low in lows.items() if low > 1)
    run = compile_program(program)
    for batch, sequence in itertools.product((least[0], 3), (least[1], 5)):
        x = torch.randn(batch, sequence, 4)
        with torch.inference_mode():
            assert torch.equal(run(weights, (x,))[0], Net(function)(x))


def test_a_program_whose_batch_is_at_least_two_describes_its_layers_at_a_batch_of_two():
    agreement = agreed(lambda self, x: scaled(self, x @ self.weight), BATCH)
    assert agreement.program.example == {"batch": 2}
    [layer] = agreement.program.layers
    assert layer.output_bytes == 2 * 7 * 4 * 4


def test_a_program_with_fixed_sizes_is_compared_at_these_sizes_only():
    assert agreed(lambda _, x: x + 1, {}).agreement.sizes == ({},)


def test_a_difference_at_a_larger_size_is_refused_and_the_error_names_the_size_and_the_output():
    class Long(nn.Module):
        def forward(self, x):
            # Libraries have such branches for the exporter.
            return x if torch.compiler.is_exporting() or x.shape[0] < 3 else 2 * x

    with pytest.raises(ProgramError) as caught:
        agree(export(Long(), (X,), BATCH))
    assert "batch 3" in str(caught.value)
    assert "'output'" in str(caught.value)


def test_a_module_that_answers_differently_each_time_is_refused():
    class Counting(nn.Module):
        calls = 0

        def forward(self, x):
            Counting.calls += 1
            return x + Counting.calls

    with pytest.raises(ProgramError, match="outputs are random"):
        agree(export(Counting(), (X,)))


@pytest.mark.parametrize("kept", ["calls", "last"])
def test_a_module_whose_state_changes_its_answers_is_refused_and_left_as_it_was(kept):
    class Keeping(nn.Module):
        calls, last = 0, None

        def forward(self, x):
            self.calls += 1
            before, self.last = self.last, x
            return x * self.calls if kept == "calls" else x + (0 if before is None else before)

    module = Keeping()
    with pytest.raises(ProgramError, match="returns other outputs when the same call is repeated"):
        agree(export(module, (X,)))
    assert (module.calls, module.last) == (0, None)


def test_a_module_may_keep_state_that_changes_no_answer():
    class Caching(nn.Module):
        scale = None

        def forward(self, x):
            if self.scale is None:
                self.scale = torch.arange(4.0)
            return x * self.scale

    assert not agree(export(Caching(), (X,))).agreement.notes


def test_a_module_that_fails_above_the_size_of_its_example_gets_a_narrower_range():
    class Picky(nn.Module):
        def forward(self, x):
            if not torch.compiler.is_exporting() and x.shape[1] > 7:
                raise ValueError("too long")
            return x + 1

    program, _, agreement = agree(export(Picky(), (X,), BOTH))
    assert program.dimensions == {"batch": (1, 1024), "sequence": (1, 7)}
    assert any("too long" in note for note in agreement.notes)


def test_the_program_of_a_saved_export_is_compared_with_that_export(tmp_path):
    sizes = {0: torch.export.Dim("rows")}
    torch.export.save(
        torch.export.export(Net(lambda self, x: x @ self.weight), (X,), dynamic_shapes=(sizes,)), tmp_path / "x.pt2"
    )
    agreement = agree(export_saved(tmp_path / "x.pt2")).agreement
    assert {"batch": 1} in agreement.sizes
    assert agreement.outputs["output"].exact


def test_equal_bits_are_recorded_as_such():
    agreement = agreed(lambda self, x: (x @ self.weight, x > 1)).agreement
    assert list(agreement.outputs) == ["output_0", "output_1"]
    assert all(output.exact and output.difference == 0 for output in agreement.outputs.values())
    assert len(agreement.sizes) == 5


@pytest.mark.parametrize("padded", [False, True])
def test_an_encoder_with_a_padding_mask_agrees_within_the_bound(padded):
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)

        def forward(self, x, mask):
            return self.encoder(x, src_key_padding_mask=mask)

    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 3:] = padded
    sizes = {0: "batch", 1: "sequence"}
    found = agree(export(Encoder(), (torch.randn(2, 5, 8), mask), {"x": sizes, "mask": sizes})).agreement
    assert found.outputs["output"].difference < found.bound
    assert any("fused encoder" in note for note in found.notes)
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("factory", [lambda: torch.full((4,), 0.1), lambda: torch.arange(4.0), lambda: torch.eye(4)[0]])
def test_a_default_dtype_of_the_author_is_kept(factory):
    torch.set_default_dtype(torch.float64)
    try:
        program, weights, agreement = agreed(lambda _, x: x[:, :, 0] * 2 + factory().sum(), {}, X.double())
    finally:
        torch.set_default_dtype(torch.float32)
    assert program.outputs[0].datatype == "FP64"
    [answer] = compile_program(program)(weights, (X.double(),))
    assert answer.dtype == torch.float64
    assert agreement.outputs["output"].exact


def test_a_default_dtype_that_cannot_be_kept_is_refused():
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(ProgramError, match="float32.*float64"):
            agreed(lambda _, x: x / 2, x=torch.ones(2, 3, 4, dtype=torch.int64))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("function", "dynamic", "words"),
    [
        (lambda _, x: x - x.mean(0), BATCH, "other outputs"),
        (lambda _, x: x.softmax(0), BATCH, "other outputs"),
        (lambda _, x: x.mean(0), BATCH, "output 'output'"),
        (lambda _, x: torch.where(x.sum() > 0, x, -x), BATCH, "other outputs"),
        (lambda _, x: torch.where(x.amax() > 500, x, -x), BATCH, "other outputs"),
        (lambda _, x: x[:, 0] @ x[:, 0].t(), BATCH, "'batch'"),
        (lambda _, x: torch.cat([x, x]), BATCH, "output 'output'"),
        (lambda _, x: x.flip(0), BATCH, "other outputs"),
        (lambda _, x: x.cumsum(0), BATCH, "other outputs"),
        (lambda _, x: x + 1, {}, "input 'x'"),
    ],
)
def test_a_program_that_mixes_rows_or_has_an_input_or_output_without_batch_is_not_batched(function, dynamic, words):
    assert re.search(words, agreed(function, dynamic).agreement.batching.obstacle)


@pytest.mark.parametrize(
    "function",
    [
        lambda _, x: torch.where((x > 100).any(), x * 2, x),
        lambda _, x: torch.where(x.min() < -100, x.flip(0), x),
        lambda _, x: torch.where(x.isnan().any(), 0, x),
        lambda _, x: torch.cond(x.max() > 100, lambda x: x - x.mean(0), lambda x: x + 0, (x,)),
    ],
)
def test_a_program_that_mixes_rows_only_if_one_has_values_that_no_example_has_is_not_batched(function):
    assert "other outputs" in agreed(function, BATCH).agreement.batching.obstacle


@pytest.mark.parametrize(
    "function",
    [
        lambda _, x: torch.where((x > 100).any(), x / 255, x),
        lambda _, x: torch.where(x[0].amax() > 100, x / 255, x),
    ],
)
def test_a_program_that_mixes_rows_if_one_has_values_that_all_examples_have_is_not_batched(function):
    assert "other outputs" in agreed(function, BATCH, 100 + X.abs()).agreement.batching.obstacle


def test_a_minimum_size_that_the_program_itself_refuses_is_only_noted():
    made = agreed(lambda _, x: x[:, 1:-1].mean(1))
    assert made.agreement.notes
    x = torch.randn(3, 5, 4)
    with torch.inference_mode():
        [given] = compile_program(made.program)(made.weights, (x,))
    torch.testing.assert_close(given, x[:, 1:-1].mean(1))


def test_a_lazily_negated_output_is_compared():
    assert agreed(lambda _, x: torch.fft.rfft(x, dim=1).conj().imag, BATCH).agreement.outputs["output"].exact


def test_a_program_that_counts_equal_requests_in_the_batch_is_not_batched():
    def alone(_, x):
        rows = x.flatten(1)
        return x / (rows[:, None] == rows).all(2).sum(1)[:, None, None]

    assert "other outputs" in agreed(alone, BATCH).agreement.batching.obstacle


def test_a_program_that_fails_on_extreme_values_may_be_batched():
    class Checked(nn.Module):
        def forward(self, x):
            torch._assert_async((x.abs() < 20).all(), "too large")
            return x + 1

    assert agree(export(Checked(), (X,), BATCH)).agreement.batching.obstacle == ""


@pytest.mark.parametrize(
    ("holds", "refused", "answered"),
    [
        (lambda batch, sequence: sequence <= batch + 5, (3, 11), (6, 11)),
        (lambda batch, sequence: sequence * batch <= 20, (3, 7), (1, 20)),
        (lambda batch, sequence: sequence * batch >= 14, (1, 7), (1, 14)),
    ],
)
def test_sizes_that_a_check_of_the_program_refuses_are_noted_and_the_others_are_answered(holds, refused, answered):
    program, weights, agreement = agreed(lambda _, x: x - 1 if holds(*x.shape[:2]) else x)
    assert [low for low, _ in program.dimensions.values()] == [1, 1]
    assert any("the model needs" in note for note in agreement.notes)
    run = compile_program(program)
    with pytest.raises(RuntimeError, match="sequence"):
        run(weights, [torch.ones(*refused, 4)])
    assert torch.equal(run(weights, [torch.ones(*answered, 4)])[0], torch.zeros(*answered, 4))


def test_a_size_with_wrong_answers_at_one_is_found_although_a_check_refuses_other_sizes():
    def torn(_, x):
        scale = 100 if x.shape[0] == 1 else 1
        return x * scale - 1 if x.shape[0] * x.shape[1] >= 14 else x

    assert [low for low, _ in agreed(torn).program.dimensions.values()] == [2, 1]


def test_a_program_whose_answers_change_only_in_large_batches_may_run_in_smaller_ones():
    def crowded(_, x):
        return x + (torch.arange(x.shape[0]) >= 20)[:, None, None]

    exported = export(Net(crowded), (X,), BATCH)
    assert not agree(exported, max_batch=16).agreement.batching.obstacle
    assert "32 requests" in agree(export(Net(crowded), (X,), BATCH), max_batch=32).agreement.batching.obstacle


def test_a_module_that_accepts_no_two_different_requests_is_not_batched():
    class Stubborn(nn.Module):
        def forward(self, x):
            if not torch.compiler.is_exporting() and (x != 7).any():
                raise ValueError("must be 7")
            return x - x.float().mean(0)

    obstacle = agree(export(Stubborn(), (torch.full((2, 3), 7),))).agreement.batching.obstacle
    assert "no two different requests" in obstacle


def test_an_input_whose_two_dimensions_are_both_the_batch_is_not_batched():
    square = {"x": {0: "batch", 1: "batch"}}
    assert "'x'" in agreed(lambda _, x: x @ x, square, torch.randn(3, 3)).agreement.batching.obstacle


def test_a_program_that_keeps_rows_apart_may_be_batched_also_with_requests_of_several_rows():
    batching = agreed(lambda self, x: (x @ self.weight).softmax(-1), BATCH).agreement.batching
    assert batching.obstacle == ""
    assert any(len(set(rows)) > 1 for rows in batching.rows)
    assert batching.outputs["output"].difference < 1e-6


def test_a_program_whose_answers_hardly_depend_on_other_requests_is_still_not_batched():
    batching = agreed(lambda _, x: 50 + x / 100 - x.mean(0) / 200, BATCH).agreement.batching
    assert "other outputs" in batching.obstacle

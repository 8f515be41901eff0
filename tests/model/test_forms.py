"""Less common forms of models: each becomes a program that answers bit for bit as the module does."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2Model, MixtralConfig, MixtralModel

from overwinter.core.errors import ProgramError
from overwinter.model.agreement import agree
from overwinter.model.compile import compile_program
from overwinter.model.export import export, export_saved
from tests.model.held import Held, assert_same, exported

torch.manual_seed(0)
ROWS = torch.randn(3, 8, 4)
IMAGES = torch.randn(3, 4, 6, 10)
WAVES = torch.randn(3, 64)
WINDOW = torch.hann_window(16)
TOKENS = torch.randint(0, 10, (3, 5))
BOUNDS = torch.tensor([-1.0, 0.0, 0.5, 2.0])


def spectrum(self, x):
    return torch.stft(x, 16, window=self.window, return_complex=True)


def resampled(self, x):
    grid = F.affine_grid(self.theta.expand(x.shape[0], 2, 3), x.shape, align_corners=False)
    return F.grid_sample(x, grid, align_corners=False, padding_mode="border")


def filled(self, x):
    result = x.new_empty(x.shape[0], 8, 8)
    result[..., :4] = x
    result[..., 4:] = torch.empty_like(x).fill_(2)
    return result + torch.empty(8).copy_(x[0, :, 0])


def counted(self, x):
    return torch.histc(x.argmax(-1).float().flatten(), bins=4, min=0, max=3)


FORMS = {
    "histc": (Held(counted), ROWS),
    "memory that is written before it is read": (Held(filled), ROWS),
    "fft over dims": (Held(lambda self, x: torch.fft.ifftn(torch.fft.fftn(x, dim=(1, 2))).real), ROWS),
    "fft2": (
        Held(lambda self, x: torch.fft.ifft2(torch.fft.fft2(x) * self.filter).real, filter=torch.rand(6, 10)),
        IMAGES,
    ),
    "rfft2": (Held(lambda self, x: torch.fft.irfft2(torch.fft.rfft2(x), s=(6, 10))), IMAGES),
    "fftshift": (Held(lambda self, x: torch.fft.fftshift(torch.fft.fft(x).abs(), dim=-1)), ROWS),
    "stft": (Held(lambda self, x: spectrum(self, x).abs(), window=WINDOW), WAVES),
    "istft": (Held(lambda self, x: torch.istft(spectrum(self, x), 16, window=self.window), window=WINDOW), WAVES),
    "conjugate": (Held(lambda self, x: torch.fft.fft(x).conj().imag), ROWS),
    "complex weights": (
        Held(
            lambda self, x: torch.view_as_real(torch.fft.fft(x) * self.scale * self.turned),
            scale=torch.randn(4, dtype=torch.complex64),
            turned=torch.randn(4, dtype=torch.complex64).conj(),
        ),
        ROWS,
    ),
    "bags of equal length": (nn.EmbeddingBag(10, 4, mode="sum"), TOKENS),
    "means of bags": (nn.EmbeddingBag(10, 4, padding_idx=2), TOKENS),
    "maxima of bags": (nn.EmbeddingBag(10, 4, mode="max"), TOKENS),
    "bucketize": (Held(lambda self, x: torch.bucketize(x, self.bounds, right=True), bounds=BOUNDS), ROWS),
    "searchsorted": (Held(lambda self, x: torch.searchsorted(self.bounds, x), bounds=BOUNDS), ROWS),
    "affine grid": (Held(resampled, theta=torch.randn(1, 2, 3)), IMAGES),
    "unpooling": (Held(lambda self, x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)), IMAGES),
    "solving": (Held(lambda self, x: torch.linalg.solve(x[:, :4] @ x[:, :4].mT + torch.eye(4), x[:, 4:])), ROWS),
    "entropy": (Held(lambda self, x: torch.special.entr(x.softmax(-1)).sum(-1)), ROWS),
    "loss": (Held(lambda self, x: F.cross_entropy(x, x.argmax(-1)[:, :4] % 8, reduction="none")), ROWS),
    "cell": (Held(lambda self, x: self.cell(x[:, 0]), cell=nn.RNNCell(4, 5, nonlinearity="relu")), ROWS),
    "norm by statistics of training": (
        nn.Sequential(nn.BatchNorm2d(4), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
        IMAGES,
    ),
    "dropout and noise of training": (nn.Sequential(nn.FeatureAlphaDropout(), nn.RReLU()), ROWS),
    "int8 weights with scales": (
        Held(
            lambda self, x: F.linear(x, self.weight.to(x.dtype) * self.scale),
            weight=torch.randint(-127, 127, (6, 4), dtype=torch.int8),
            scale=torch.rand(6, 1),
        ),
        ROWS,
    ),
    "bfloat16": (nn.Sequential(nn.Linear(4, 3), nn.GELU()).bfloat16(), ROWS.bfloat16()),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_program_of_each_form_answers_as_its_module_does(form):
    module, example = FORMS[form]
    made = exported(module, (example[:2],))
    for count in (1, 2, 3):
        assert_same(module, made, example[:count])


class Bags(nn.Module):
    """Bags of any length, given by their offsets."""

    def __init__(self, **options):
        super().__init__()
        self.bags = nn.EmbeddingBag(10, 4, **options)

    def forward(self, tokens, offsets):
        return self.bags(tokens, offsets)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 2, "include_last_offset": True}])
def test_a_program_with_bags_of_any_length_answers_as_its_module_does(mode, options):
    module = Bags(mode=mode, **options)
    dynamic = {"tokens": {0: "length"}, "offsets": {0: "bags"}}
    made = exported(module, (torch.arange(9), torch.tensor([0, 2, 2, 9])), dynamic)
    for offsets in ([0, 2, 5], [0, 0, 3, 5], [0, 1, 2, 3, 5]):
        assert_same(module, made, TOKENS[0], torch.tensor(offsets))


def test_the_error_for_a_complex_input_or_output_says_how_to_pass_it():
    with pytest.raises(ProgramError, match=r"'x' is of torch.complex64.*view_as_real"):
        export(Held(lambda self, x: x.abs()), (ROWS.to(torch.complex64),))
    with pytest.raises(ProgramError, match=r"'output' is of torch.complex64.*view_as_real"):
        export(Held(lambda self, x: torch.fft.fft(x)), (ROWS,))


def test_a_tensor_and_its_conjugate_in_the_same_memory_are_two_weights():
    plain = torch.randn(4, dtype=torch.complex64)
    module = Held(lambda self, x: torch.view_as_real(x * self.one + self.other), one=plain, other=plain)
    module.other = nn.Parameter(plain.conj(), requires_grad=False)
    made = exported(module, (ROWS[:2],))
    assert len(made.weights) == 2
    assert_same(module, made, ROWS)


def test_a_language_model_returns_no_cache():
    config = GPT2Config(vocab_size=50, n_embd=8, n_layer=1, n_head=2, n_positions=32)
    model = GPT2Model(config).eval().requires_grad_(False)
    dynamic = {"input_ids": {0: "batch", 1: "sequence"}}
    program, weights, _ = agree(export(model, {"input_ids": TOKENS[:2]}, dynamic))
    assert config.use_cache
    assert [spec.name for spec in program.outputs] == ["last_hidden_state"]
    with torch.inference_mode():
        for tokens in (TOKENS[:1], TOKENS[:, :2], torch.randint(0, 50, (2, 9))):
            (given,) = compile_program(program)(weights, (tokens,))
            assert torch.equal(given, model(tokens, use_cache=False).last_hidden_state)


def test_a_mixture_of_experts_answers_as_its_module_does():
    config = MixtralConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    model = MixtralModel(config).eval().requires_grad_(False)
    program, weights = export(model, {"input_ids": TOKENS[:2]}, {"input_ids": {0: "batch", 1: "sequence"}})
    assert {"aten.histc.default", "aten._grouped_mm.default"} <= {call.operator for call in program.calls}
    with torch.inference_mode():
        for tokens in (TOKENS[:1, :1], TOKENS[:, :2], torch.randint(0, 50, (2, 9))):
            (given,) = compile_program(program)(weights, (tokens,))
            assert torch.equal(given, model(tokens, use_cache=False).last_hidden_state)


def test_a_saved_graph_with_raw_memory_operators_becomes_a_program_without_them(tmp_path):
    module = Held(lambda self, x: torch.ops.aten._reshape_alias(x, [3, 32], [32, 1]) + 1)
    torch.export.save(torch.export.export(module, (ROWS,), strict=False), tmp_path / "net.pt2")
    made = export_saved(tmp_path / "net.pt2")
    assert "aten.reshape.default" in {call.operator for call in made.program.calls}
    assert_same(module, made, ROWS)

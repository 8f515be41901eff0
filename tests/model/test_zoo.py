"""The zoo: every model can be built, small and at the published size, and its answers depend on its inputs."""

import inspect
import subprocess
import sys

import pytest
import torch

from benchmarks import zoo

PARAMETERS = {
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "densenet169": 14_149_480,
    "densenet201": 20_013_928,
    "inception-v3": 23_834_568,
    "efficientnet-b5": 30_389_784,
    "mobilenet-v2": 3_504_872,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "ssd300": 35_641_826,
    "yolov8x": 68_229_648,
    "vit-base": 86_567_656,
    "bert-base": 109_482_240,
    "bert-large": 334_094_338,
    "distilbert": 66_362_880,
    "minilm": 22_565_376,
    "gpt2": 124_439_808,
}
"""As published for these architectures (MiniLM without the pooler that a sentence embedding does not use)."""

MEGABYTES = {"textcnn": 11, "lstm": 23, "dssm": 25, "mlp": 5}
"""Tetris's table 4; for the MLP, the size that the overhead benchmarks need."""


def answers(module, inputs):
    with torch.inference_mode():
        answer = module(**inputs)
    return answer if isinstance(answer, tuple) else (answer,)


@pytest.fixture(scope="module", params=zoo.NAMES)
def small(request):
    return zoo.build(request.param, small=True)


def test_a_small_model_is_ready_to_be_deployed(small):
    assert not small.module.training
    assert not any(parameter.requires_grad for parameter in small.module.parameters())
    assert list(small.example_inputs) == list(inspect.signature(small.module.forward).parameters)
    assert list(small.dynamic) == list(small.example_inputs)
    assert all(names[0] == "batch" for names in small.dynamic.values())
    assert all(tensor.shape[0] == zoo.BATCH for tensor in small.example_inputs.values())
    assert zoo.parameters_mb(small.module) < 10


def test_answers_are_finite_and_depend_on_the_inputs(small):
    for answer in answers(small.module, small.example_inputs):
        assert answer.shape[0] == zoo.BATCH
        assert answer.isfinite().all()
        assert (answer[0] - answer[1]).abs().max() > 1e-3


def test_models_run_at_other_sizes(small):
    for length in {5, 40} if any(len(names) > 1 for names in small.dynamic.values()) else {None}:
        inputs = {}
        for name, tensor in small.example_inputs.items():
            shape = [3, *tensor.shape[1:]] if length is None else [3, length]
            inputs[name] = torch.ones(shape, dtype=tensor.dtype)
        for answer in answers(small.module, inputs):
            assert answer.shape[0] == 3


def test_no_two_weights_are_equal(small):
    # Equal tensors would be stored once, and a benchmark would count that as saved by the store.
    seen = {}
    for name, tensor in [*small.module.named_parameters(), *small.module.named_buffers()]:
        if tensor.is_floating_point() and tensor.numel() > 1:
            twin = seen.setdefault(tensor.numpy().tobytes(), name)
            assert twin == name or "inv_freq" in name, f"{name} equals {twin}"


def test_variances_are_positive(small):
    variances = [buffer for name, buffer in small.module.named_buffers() if name.endswith("running_var")]
    assert all((variance > 0).all() for variance in variances)


@pytest.mark.parametrize("name", ["resnet50", "yolov8x", "gpt2", "lstm"])
def test_the_seed_decides_the_weights_and_the_inputs(name):
    before = torch.get_rng_state()
    first, same, other = (zoo.build(name, small=True, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    for key, tensor in first.module.state_dict().items():
        assert torch.equal(tensor, same.module.state_dict()[key])
    assert torch.equal(next(iter(first.example_inputs.values())), next(iter(same.example_inputs.values())))
    assert not torch.equal(next(first.module.parameters()), next(other.module.parameters()))


@pytest.mark.parametrize("name", [*PARAMETERS, *MEGABYTES])
def test_full_size_is_the_published_one(name):
    with torch.device("meta"):
        module = zoo.RECIPES[name].module(False)
    if name in PARAMETERS:
        assert sum(parameter.numel() for parameter in module.parameters()) == PARAMETERS[name]
    if name in MEGABYTES:
        assert zoo.parameters_mb(module) == pytest.approx(MEGABYTES[name], abs=0.5)


def test_small_and_full_have_the_same_layers(small, request):
    name = request.node.callspec.params["small"]
    with torch.device("meta"):
        full = zoo.RECIPES[name].module(False)
    kinds = [[type(layer).__name__ for layer in module.modules()] for module in (small.module, full)]
    assert kinds[0] == kinds[1]


def test_a_detector_whose_offsets_are_zero_returns_its_default_boxes():
    # If every offset is zero, a detector returns its default boxes, which cover the image.
    detector = zoo.build("ssd300", small=True).module
    boxes = detector.decode(torch.zeros(1, 8732, 4))[0]
    centres, sides = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]
    assert torch.allclose(torch.cat([centres, sides], dim=1), detector.defaults, atol=1e-3)
    assert detector.defaults[0].tolist() == pytest.approx([4.0, 4.0, 21.0, 21.0])
    assert detector.defaults[-1, :2].tolist() == [150.0, 150.0]


def test_padding_changes_no_sentence_embedding():
    module, inputs, _ = zoo.build("minilm", small=True)
    longer = {name: torch.nn.functional.pad(tensor, (0, 7)) for name, tensor in inputs.items()}
    (short,), (padded,) = answers(module, inputs), answers(module, longer)
    assert torch.allclose(short, padded, atol=1e-6)
    assert torch.allclose(short.norm(dim=1), torch.ones(2))


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r"no model is called 'resnet51'; there are resnet50"):
        zoo.build("resnet51")


def test_transformers_is_imported_only_where_needed():
    script = "import sys; from benchmarks import zoo; zoo.build('mlp'); sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_table_has_a_line_for_each_model(capsys):
    zoo.main()
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == list(zoo.NAMES)
    assert lines[0].split()[:4] == ["resnet50", "25,557,032", "102.4", "267"]

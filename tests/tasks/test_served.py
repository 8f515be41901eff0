"""Tasks through a real node, against the pipelines of transformers on the same directory.

Most directories are opened in this process, which has imported `transformers`; a sandbox would import it again.
"""

import io
import json
from functools import partial

import numpy
import pytest
import torch
import transformers
from PIL import Image

from examples.weights import weights_path, weights_present
from overwinter.api.client import Client
from overwinter.api.directories import deploy_directory
from overwinter.core.errors import CallerError, OverwinterError
from tests.tasks.directories import TAGS, WEATHER, image_directory, speech_directory, text_directory

TEXTS = ["The quick brown fox came slowly to Zürich!", "well", "it works 7 times: works & works, 雪 snow"]


@pytest.fixture(scope="session")
def ask(node):
    """Return a function that returns the answers of a deployed function."""
    with Client(node.url) as client:

        def answer(name, **inputs):
            return client.infer(name, inputs)

        yield answer


@pytest.fixture(scope="session")
def deploy(node):
    """Return a function that deploys a directory for a task."""
    return partial(deploy_directory, url=node.url, trust=True)


def picture(height: int, width: int, form: str = "PNG", mode: str = "RGB") -> bytes:
    source = numpy.random.default_rng(height)
    values = source.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=numpy.uint8)
    content = io.BytesIO()
    Image.fromarray(values).resize((width, height), Image.Resampling.BICUBIC).convert(mode).save(content, form)
    return content.getvalue()


@pytest.fixture(scope="module")
def weather(node, tmp_path_factory):
    """Return the directory of a deployed classifier."""
    path = text_directory(tmp_path_factory.mktemp("weather"), "BertForSequenceClassification", WEATHER)
    deploy_directory(path, name="weather", task="text-classification", url=node.url)
    return path


@pytest.fixture(scope="module")
def tags(deploy, tmp_path_factory):
    """Return the directory of a deployed tagger."""
    path = text_directory(tmp_path_factory.mktemp("tags"), "BertForTokenClassification", TAGS)
    deploy(path, name="tags", task="token-classification", options={"aggregation": "none"})
    return path


@pytest.fixture(scope="module")
def sky(deploy, tmp_path_factory):
    """Return the directory of a deployed classifier of images."""
    path = image_directory(tmp_path_factory.mktemp("sky"))
    deploy(path, name="sky", task="image-classification", options={"top_k": 2})
    return path


def test_texts_are_classified_as_by_the_pipeline(weather, ask):
    assert_classified(ask("weather", text=TEXTS), weather)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("DistilBertForSequenceClassification", {}),
        ("RobertaForSequenceClassification", {"problem_type": "multi_label_classification"}),
    ],
)
def test_texts_are_classified_by_other_architectures(kind, config, deploy, ask, tmp_path):
    path = text_directory(tmp_path, kind, WEATHER, **config)
    deploy(path, name="other", task="text-classification")
    assert_classified(ask("other", text=TEXTS), path)


def assert_classified(answer, path):
    expected = [transformers.pipeline("text-classification", str(path))(text, top_k=None) for text in TEXTS]
    labels = [[label.decode() for label in row] for row in answer["labels"]]
    assert labels == [[each["label"] for each in row] for row in expected]
    scores = [[each["score"] for each in row] for row in expected]
    numpy.testing.assert_allclose(answer["scores"], scores, atol=1e-5)


def test_with_top_k_1_only_the_best_label_is_returned(weather, deploy, ask):
    deploy(weather, name="best", task="text-classification", options={"top_k": 1})
    best = transformers.pipeline("text-classification", str(weather))(TEXTS)
    assert ask("best", text=TEXTS)["labels"].tolist() == [[each["label"].encode()] for each in best]


def test_entities_are_found_as_by_the_pipeline(tags, ask):
    assert_tagged(ask("tags", text=TEXTS), tags, "none")


def test_words_of_an_entity_are_joined_as_by_the_pipeline(tags, deploy, ask):
    deploy(tags, name="joined", task="token-classification", options={"aggregation": "simple"})
    assert_tagged(ask("joined", text=TEXTS), tags, "simple")


def assert_tagged(answer, path, aggregation: str) -> None:
    pipeline = transformers.pipeline("token-classification", str(path), aggregation_strategy=aggregation)
    answers = answer["entities"]
    assert any(answer != b"[]" for answer in answers)
    for found, text in zip(answers, TEXTS, strict=True):
        assert_entities(found, pipeline(text))


def assert_entities(answer: bytes, wanted: list[dict]) -> None:
    found = json.loads(answer)
    assert [each.pop("score") for each in found] == pytest.approx([each.pop("score") for each in wanted], abs=1e-5)
    assert found == wanted


def test_too_long_a_text_is_cut_only_where_the_pipeline_cuts_it(weather, tags, ask):
    long = "works " * 200
    wanted = transformers.pipeline("token-classification", str(tags))(long)
    assert_entities(ask("tags", text=[long])["entities"][0], wanted)
    with pytest.raises(OverwinterError, match="sequence must be 1 to 70"):
        ask("weather", text=[long])


def test_text_that_is_not_utf_8_is_refused(weather, ask):
    with pytest.raises(CallerError, match="'text' is not UTF-8"):
        ask("weather", text=[b"works", b"\xff\xfe"])
    assert len(ask("weather", text=[b"works"])["labels"]) == 1


def test_features_are_those_of_the_pipeline(deploy, ask, tmp_path):
    path = text_directory(tmp_path, "BertModel")
    deploy(path, name="features", task="feature-extraction")
    deploy(path, name="mean", task="feature-extraction", options={"pooling": "mean"})
    expected = transformers.pipeline("feature-extraction", str(path))(TEXTS)
    answer, means = ask("features", text=TEXTS), ask("mean", text=TEXTS)["embedding"]
    assert answer["lengths"].tolist() == [len(row[0]) for row in expected]
    for features, mean, row in zip(answer["features"], means, expected, strict=True):
        numpy.testing.assert_allclose(features[: len(row[0])], row[0], atol=1e-5)
        assert not features[len(row[0]) :].any()
        numpy.testing.assert_allclose(mean, numpy.mean(row[0], 0), atol=1e-5)


@pytest.mark.skipif("minilm-tokenizer" not in weights_present(), reason="MiniLM's package is not installed")
def test_real_tokenizer_gives_the_features_of_the_pipeline(deploy, ask, tmp_path):
    rules = str(weights_path("minilm-tokenizer"))
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokens = transformers.PreTrainedTokenizerFast(tokenizer_file=rules, model_max_length=64, **special)
    path = text_directory(tmp_path, "BertModel", tokens=tokens)
    options = {"pooling": "mean", "truncation": True}
    deploy(path, name="meaning", task="feature-extraction", options=options)
    texts = [*TEXTS, "A much longer text, that goes on and on. " * 20]
    pipeline = transformers.pipeline("feature-extraction", str(path), truncation=True)
    expected = [numpy.mean(pipeline(text)[0], 0) for text in texts]
    numpy.testing.assert_allclose(ask("meaning", text=texts)["embedding"], expected, atol=1e-5)


def test_model_of_one_length_takes_shorter_texts(deploy, ask, tmp_path):
    path = text_directory(tmp_path, "MambaModel")
    options = {"sequence": 24}
    deploy(path, name="fixed", task="feature-extraction", options=options)
    [expected] = transformers.pipeline("feature-extraction", str(path))("well")
    features = ask("fixed", text=["well"])["features"][0]
    numpy.testing.assert_allclose(features, expected, atol=1e-5)


def test_images_are_classified_as_by_the_pipeline(sky, ask):
    forms = [("PNG", "RGB"), ("JPEG", "RGB"), ("PNG", "L"), ("PNG", "RGBA"), ("PNG", "P"), ("JPEG", "L")]
    images = [picture(50 + 9 * at, 70, *form) for at, form in enumerate(forms)]
    answer = ask("sky", image=images)
    pipeline = transformers.pipeline("image-classification", str(sky), use_fast=False)
    expected = [pipeline(Image.open(io.BytesIO(image)), top_k=2) for image in images]
    assert [[x.decode() for x in row] for row in answer["labels"]] == [[e["label"] for e in row] for row in expected]
    numpy.testing.assert_allclose(answer["scores"], [[e["score"] for e in row] for row in expected], atol=1e-5)


def test_an_input_that_is_no_image_is_refused_and_affects_no_other(sky, ask):
    for broken in (b"no image", b"", picture(40, 40)[:200], picture(40, 40, "JPEG")[:20]):
        with pytest.raises(CallerError, match="element 1 of input 'image' cannot be read"):
            ask("sky", image=[picture(40, 40), broken])
    assert ask("sky", image=[picture(40, 40)])["labels"].shape == (1, 2)


@pytest.mark.slow
def test_speech_is_recognized_as_by_the_pipeline(node, ask, tmp_path):
    path = speech_directory(tmp_path / "speech")
    deploy_directory(path, name="speech", task="automatic-speech-recognition", url=node.url)
    pipeline = transformers.pipeline("automatic-speech-recognition", str(path))
    for samples in (1999, 20_000):
        audio = torch.randn(3, samples, generator=torch.Generator().manual_seed(0)) * torch.linspace(0, 1, samples)
        expected = [pipeline(row.numpy())["text"] for row in audio]
        assert len(set(expected)) == 3
        assert [text.decode() for text in ask("speech", audio=audio)["text"]] == expected

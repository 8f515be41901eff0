"""Opening directories of `transformers` for a task, and the errors for incomplete ones."""

import io
import json
import logging

import pytest
import torch
import transformers
from PIL import Image
from tokenizers import processors

from overwinter.core.errors import AuthorError, CallerError, ProgramError
from overwinter.tasks.directory import TASKS, export_directory, open_directory
from overwinter.tasks.handlers import image
from overwinter.tasks.image import SHAPES
from overwinter.worker.handler import Code, Handler
from tests.tasks.directories import TAGS, WEATHER, image_directory, speech_directory, text_directory, tokenizer


@pytest.fixture(scope="module")
def weather(tmp_path_factory):
    """Return a directory of a text classifier, for tests that do not change it."""
    return text_directory(tmp_path_factory.mktemp("weather"), "BertForSequenceClassification", WEATHER)


def copy_without(directory, path, file):
    for each in directory.iterdir():
        if each.name != file:
            (path / each.name).write_bytes(each.read_bytes())
    return path


def test_without_a_task_a_directory_is_opened_as_the_raw_program(weather):
    opened = open_directory(weather)
    assert opened.handler is None
    assert not opened.samples
    assert set(opened.example_inputs) == {"input_ids", "attention_mask"}


def test_sample_is_one_that_the_function_can_answer(weather):
    opened = open_directory(weather, "text-classification")
    [sample] = opened.samples
    handler = Handler(Code(opened.handler), opened.assets)
    with torch.inference_mode():
        answer = handler.postprocess(opened.module(**opened.example_inputs), dict(sample))
    assert [len(row) for row in answer["labels"]] == [3] * len(sample["text"])


@pytest.mark.parametrize(
    ("task", "options", "words"),
    [
        ("summarization", {}, f"no task 'summarization'; the tasks: {', '.join(TASKS)}"),
        ("text-classification", {"pooling": "mean"}, "no option 'pooling'; its options: top_k, truncation, sequence"),
        ("text-classification", {"top_k": 0}, "top_k of text-classification"),
        ("text-classification", {"truncation": "yes"}, "truncation of text-classification is False or True"),
        ("token-classification", {}, "BertForSequenceClassification; token-classification needs"),
        ("image-classification", {}, "BertForSequenceClassification; image-classification needs"),
    ],
)
def test_wrong_task_or_option_is_named(task, options, words, weather):
    with pytest.raises((CallerError, AuthorError), match=words):
        open_directory(weather, task, options)


@pytest.mark.parametrize(
    ("make", "task", "file"),
    [
        (image_directory, "image-classification", "preprocessor_config.json"),
        (speech_directory, "automatic-speech-recognition", "preprocessor_config.json"),
        (speech_directory, "automatic-speech-recognition", "vocab.json"),
    ],
)
def test_missing_file_is_named_with_the_remedy(make, task, file, tmp_path):
    path = make(tmp_path / "whole")
    (path / file).unlink()
    with pytest.raises(ProgramError, match=f"has no {file}, which {task} needs: .*save_pretrained"):
        open_directory(path, task)


def test_missing_tokenizer_and_labels_are_named(weather, tmp_path):
    with pytest.raises(ProgramError, match=r"has no tokenizer\.json, which text-classification needs"):
        open_directory(copy_without(weather, tmp_path, "tokenizer.json"), "text-classification")
    config = json.loads((weather / "config.json").read_text())
    del config["id2label"], config["label2id"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_bytes((weather / "tokenizer.json").read_bytes())
    with pytest.raises(ProgramError, match="no id2label, which text-classification needs"):
        open_directory(tmp_path, "text-classification")


@pytest.mark.parametrize(
    ("make", "task"), [(image_directory, "image-classification"), (text_directory, "text-classification")]
)
def test_classes_that_are_not_numbered_from_0_are_named(make, task, tmp_path):
    path = make(tmp_path) if make is image_directory else make(tmp_path, "BertForSequenceClassification", WEATHER)
    config = json.loads((path / "config.json").read_text()) | {"id2label": {"1": "rain", "2": "snow", "3": "sunshine"}}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ProgramError, match=r"id2label in config\.json names 3 classes, but not number 0"):
        open_directory(path, task)


def test_model_whose_outputs_depend_on_the_padding_is_refused(tmp_path):
    path = text_directory(tmp_path, "FNetForSequenceClassification", WEATHER)
    with pytest.raises(
        ProgramError, match="FNetForSequenceClassification gives other outputs for an input that is padded"
    ):
        open_directory(path, "text-classification")


def test_the_error_for_a_model_of_one_length_names_the_option(tmp_path):
    path = text_directory(tmp_path, "MambaModel")
    with pytest.raises(ProgramError, match="the option sequence=N"):
        export_directory(open_directory(path))


PROCESSORS = {
    "ViT": {"size": {"height": 32, "width": 32}},
    "DeiT": {"size": {"height": 40, "width": 44}, "crop_size": {"height": 32, "width": 32}},
    "CLIP": {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
    "ConvNext": {"size": {"shortest_edge": 32}, "crop_pct": 0.9},
    "PoolFormer": {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}, "crop_pct": 0.8},
    "Levit": {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
    "EfficientNet": {"size": {"height": 32, "width": 32}, "rescale_offset": True},
    "Bit": {"size": {"shortest_edge": 24}, "crop_size": {"height": 32, "width": 32}, "do_normalize": False},
    "Siglip": {"size": {"height": 32, "width": 32}, "do_rescale": False},
}


@pytest.mark.parametrize("kind", list(PROCESSORS))
def test_images_are_read_as_by_their_processor(kind, tmp_path):
    """The values equal the processor's own pixel values within 1e-5."""
    processor = getattr(transformers, f"{kind}ImageProcessorPil")(**PROCESSORS[kind])
    opened = open_directory(image_directory(tmp_path, processor), "image-classification")
    handler = Handler(Code(opened.handler), opened.assets)
    for shape in (*SHAPES, (33, 500), (31, 30)):
        content = io.BytesIO()
        noise = torch.randint(0, 256, (*shape, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
        Image.frombytes("RGB", shape[::-1], bytes(noise.flatten().tolist())).save(content, "PNG")
        expected = processor(images=Image.open(content), return_tensors="pt")["pixel_values"]
        given = handler.preprocess({"image": [content.getvalue()]})["pixel_values"]
        torch.testing.assert_close(given, expected, atol=1e-5, rtol=0)


def test_images_of_different_sizes_are_refused_if_the_processor_keeps_their_sizes():
    state = {"resize": None, "crop": None, "scale": 1 / 255, "mean": [0.5] * 3, "std": [0.5] * 3, "dtype": "float32"}
    contents = []
    for size in ((8, 8), (9, 8)):
        content = io.BytesIO()
        Image.new("RGB", size).save(content, "PNG")
        contents.append(content.getvalue())
    assert image.preprocess({"image": contents[:1] * 2}, state)["pixel_values"].shape == (2, 3, 8, 8)
    with pytest.raises(CallerError, match=r"\(8, 8\) and \(9, 8\)"):
        image.preprocess({"image": contents}, state)


def test_an_image_that_needs_too_much_memory_is_refused_for_that(monkeypatch):
    def without_memory(file):
        raise MemoryError

    monkeypatch.setattr(image.Image, "open", without_memory)
    with pytest.raises(CallerError, match="element 1 of input 'image' has too many pixels.*memory_mib"):
        image.read(1, b"", {})


def test_processor_that_does_more_than_the_handler_is_refused(tmp_path):
    processor = transformers.MobileViTImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}, do_flip_channel_order=True
    )
    with pytest.raises(
        ProgramError, match="transformers and the handler of this task compute different 'pixel_values'"
    ):
        open_directory(image_directory(tmp_path, processor), "image-classification")


@pytest.mark.parametrize("side", ["left", "right"])
def test_long_texts_are_cut_on_the_side_that_their_tokenizer_cuts(side, tmp_path):
    path = text_directory(tmp_path, "BertForSequenceClassification", WEATHER)
    config = path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"truncation_side": side}))
    opened = open_directory(path, "text-classification", {"truncation": True})
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    assert tokenizer.truncation_side == side
    text = " ".join(f"rain {number}" for number in range(tokenizer.model_max_length))
    expected = tokenizer(text, truncation=True)["input_ids"]
    given = Handler(Code(opened.handler), opened.assets).preprocess({"text": [text.encode()]})["input_ids"]
    assert given.tolist() == [expected]


@pytest.mark.parametrize("longest", [64, 10**30])
def test_texts_are_cut_to_the_fixed_length_of_a_program(longest, tmp_path):
    path = text_directory(tmp_path, "BertForSequenceClassification", WEATHER, tokens=tokenizer(longest=longest))
    opened = open_directory(path, "text-classification", {"truncation": True, "sequence": 16})
    given = Handler(Code(opened.handler), opened.assets).preprocess({"text": [b"works " * 40]})
    assert given["input_ids"].shape == (1, 16)


@pytest.mark.parametrize("options", [{"sequence": 3}, {"sequence": 1, "truncation": True}])
def test_a_fixed_length_too_short_for_a_word_is_refused_with_one_that_is_not(options, tmp_path):
    path = text_directory(tmp_path, "BertForSequenceClassification", WEATHER)
    with pytest.raises(CallerError, match=f"sequence={options['sequence']} is too short for a word.*give 4 or more"):
        open_directory(path, "text-classification", options)
    opened = open_directory(path, "text-classification", {**options, "sequence": 4})
    assert opened.example_inputs["input_ids"].shape == (3, 4)


@pytest.mark.parametrize("options", [{}, {"sequence": 16}])
def test_a_text_without_tokens_is_refused_also_among_others(options, tmp_path):
    tokens = tokenizer()
    tokens.backend_tokenizer.post_processor = processors.TemplateProcessing("$A", "$A $B", [])
    path = text_directory(tmp_path, "BertModel", tokens=tokens)
    opened = open_directory(path, "feature-extraction", {"pooling": "mean", **options})
    handler = Handler(Code(opened.handler), opened.assets)
    for texts, number in (([b""], 0), ([b"rain", b" "], 1)):
        with pytest.raises(CallerError, match=f"element {number} of input 'text' has no tokens"):
            handler.preprocess({"text": texts})


@pytest.mark.parametrize(
    "size", [{"shortest_edge": 32, "longest_edge": 64}, {"longest_edge": 64}, {"max_height": 32, "max_width": 32}]
)
def test_a_processor_that_limits_the_longer_side_is_refused(size, tmp_path):
    processor = transformers.ViTImageProcessorPil(size=size)
    with pytest.raises(ProgramError, match="longer side"):
        open_directory(image_directory(tmp_path, processor), "image-classification")


def test_without_truncation_the_handler_does_not_limit_the_length_of_texts(tmp_path):
    path = text_directory(tmp_path, "DistilBertForTokenClassification", TAGS)
    opened = open_directory(path, "token-classification", {"truncation": False})
    assert json.loads(opened.assets["task.json"])["longest"] is None


@pytest.mark.parametrize("make", [image_directory, speech_directory])
def test_model_in_16_bits_is_given_inputs_in_16_bits(make, tmp_path):
    path = make(tmp_path / "wide")
    kind = transformers.ViTForImageClassification if make is image_directory else transformers.Wav2Vec2ForCTC
    kind.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
    task = "image-classification" if make is image_directory else "automatic-speech-recognition"
    [example] = open_directory(path, task).example_inputs.values()
    assert example.dtype == torch.bfloat16


def test_tokens_beyond_the_vocabulary_of_the_model_are_refused(weather, tmp_path):
    config = transformers.BertConfig.from_pretrained(weather)
    config.vocab_size = 20
    copy_without(weather, tmp_path, "model.safetensors")
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(ProgramError, match="cannot answer a sample of text-classification: index out of range"):
        open_directory(tmp_path, "text-classification")


def test_sample_too_long_for_the_model_is_cut_without_a_warning(weather, caplog):
    library = logging.getLogger("transformers")
    library.addHandler(caplog.handler)
    transformers.logging.set_verbosity_warning()
    try:
        open_directory(weather, "text-classification")
    finally:
        transformers.logging.set_verbosity_error()
        library.removeHandler(caplog.handler)
    assert not caplog.messages

"""Directories written by `transformers` are opened and exported."""

import json
import sys
from functools import cache

import pytest
import torch
import transformers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
)

from overwinter.core.errors import ProgramError
from overwinter.model.closeness import ClosenessMeter
from overwinter.model.compile import compile_program
from overwinter.model.export import export
from overwinter.model.pretrained import load_transformers

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 50}


def bert():
    return BertForSequenceClassification(BertConfig(**SMALL, max_position_embeddings=40))


def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50, n_positions=40))


def resnet():
    return ResNetForImageClassification(ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]))


@pytest.mark.parametrize("build", [bert, gpt2, resnet])
def test_saved_model_gives_the_same_bits(build, tmp_path):
    torch.manual_seed(0)
    model = build().eval()
    model.save_pretrained(tmp_path)
    opened = load_transformers(tmp_path)
    program, weights = export(*opened)
    inputs = {name: tensor[:1].repeat(3, *[1] * (tensor.dim() - 1)) for name, tensor in opened.example_inputs.items()}
    if build is bert:
        # The longest sequence is found, because the model fails at longer ones.
        assert program.dimensions["sequence"] == (1, 40)
    if "sequence" in program.dimensions:
        inputs = {name: tensor[:, :9].contiguous() for name, tensor in inputs.items()}
    with torch.inference_mode():
        expected = model(**inputs).logits
        (given,) = compile_program(program)(weights, [inputs[spec.name] for spec in program.inputs])
    assert [spec.name for spec in program.outputs] == ["logits"]
    assert torch.equal(given, expected)


LAYERS = {key: SMALL[key] for key in SMALL if key != "vocab_size"}
DECODING = {
    "d_model": 16,
    **{f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 1), ("attention_heads", 2))},
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "vocab_size": 50,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


def clip():
    text = {**SMALL, "max_position_embeddings": 20, "projection_dim": 8, "eos_token_id": 49}
    config = {"text_config": text, "vision_config": {**LAYERS, "image_size": 32, "patch_size": 16, "projection_dim": 8}}
    return transformers.CLIPModel(transformers.CLIPConfig(**config, projection_dim=8))


def t5():
    config = transformers.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=50)
    return transformers.T5ForConditionalGeneration(config)


def bart():
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**DECODING, max_position_embeddings=40))


def whisper():
    positions = {"max_source_positions": 30, "max_target_positions": 20}
    config = transformers.WhisperConfig(**DECODING, **positions, num_mel_bins=8)
    return transformers.WhisperForConditionalGeneration(config)


def swin():
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4
    )
    return transformers.SwinForImageClassification(config)


def vit():
    return transformers.ViTForImageClassification(transformers.ViTConfig(**LAYERS, image_size=32, patch_size=16))


def detr():
    layers = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "out_features": ["stage2"]}
    sizes = {key: DECODING[key] for key in DECODING if key.startswith(("d_", "encoder", "decoder_a", "decoder_f"))}
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone_config=ResNetConfig(**layers),
        num_queries=4,
        decoder_layers=1,
        **sizes,
    )
    return transformers.DetrForObjectDetection(config)


def segformer():
    config = transformers.SegformerConfig(
        hidden_sizes=[8, 8, 8, 8], depths=[1] * 4, num_attention_heads=[1] * 4, decoder_hidden_size=8
    )
    return transformers.SegformerForSemanticSegmentation(config)


def spectrogram():
    config = transformers.ASTConfig(**LAYERS, max_length=64, num_mel_bins=16)
    return transformers.ASTForAudioClassification(config)


def mamba():
    config = transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=50, state_size=4)
    return transformers.MambaForCausalLM(config)


def wav2vec2():
    lanes = {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 4), "num_feat_extract_layers": 2}
    places = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
    return transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**SMALL, **lanes, **places))


def opened_of(build, path, **options):
    torch.manual_seed(0)
    build().eval().save_pretrained(path)
    return load_transformers(path, options)


@pytest.fixture(scope="module")
def exported_of(tmp_path_factory):
    """Return a function that opens and exports a model once."""

    @cache
    def exported(build, **options):
        opened = opened_of(build, tmp_path_factory.mktemp("model"), **options)
        return opened, *export(*opened)

    return exported


OTHER_SIZES = {"sequence": 9, "decoder_sequence": 5, "height": 96, "width": 160, "samples": 9_999}


@pytest.mark.parametrize(
    ("build", "options", "inputs"),
    [
        (clip, {}, {"input_ids": 2, "attention_mask": 2, "pixel_values": 4}),
        (clip, {"part": "text"}, {"input_ids": 2, "attention_mask": 2}),
        (clip, {"part": "image"}, {"pixel_values": 4}),
        (t5, {}, {"input_ids": 2, "attention_mask": 2, "decoder_input_ids": 2}),
        (t5, {"part": "encoder"}, {"input_ids": 2, "attention_mask": 2}),
        (bart, {}, {"input_ids": 2, "attention_mask": 2, "decoder_input_ids": 2}),
        (whisper, {}, {"input_features": 3, "decoder_input_ids": 2}),
        (whisper, {"part": "encoder"}, {"input_features": 3}),
        (swin, {}, {"pixel_values": 4}),
        (vit, {}, {"pixel_values": 4}),
        (detr, {}, {"pixel_values": 4}),
        (segformer, {"height": 64, "width": 128}, {"pixel_values": 4}),
        (resnet, {"height": "any"}, {"pixel_values": 4}),
        (spectrogram, {}, {"input_values": 3}),
        (mamba, {"sequence": 6}, {"input_ids": 2, "attention_mask": 2}),
        (wav2vec2, {}, {"input_values": 2}),
        (wav2vec2, {"samples": 1000}, {"input_values": 2}),
    ],
)
def test_architecture_gives_the_same_answers_at_other_sizes(build, options, inputs, exported_of):
    opened, program, weights = exported_of(build, **options)
    assert {spec.name: len(spec.shape) for spec in program.inputs} == inputs
    others = {}
    for name, example in opened.example_inputs.items():
        for dim, size in opened.dynamic[name].items():
            indices = torch.arange(OTHER_SIZES.get(size, 3 if size == "batch" else 1)) % example.shape[dim]
            example = example.index_select(dim, indices)
        others[name] = example
    with torch.inference_mode():
        expected = opened.module(**others)
        given = compile_program(program)(weights, [others[spec.name] for spec in program.inputs])
    assert [spec.name for spec in program.outputs] == list(expected)
    # The kernels of some processors differ in the last bit by where values lie in memory.
    assert not ClosenessMeter(program, 1e-6).compare(list(expected.values()), given)


def test_texts_and_images_of_clip_have_separate_batch_sizes(exported_of):
    _, program, _ = exported_of(clip)
    shapes = {spec.name: spec.shape for spec in (*program.inputs, *program.outputs)}
    assert shapes["input_ids"] == ("texts", "sequence")
    assert shapes["pixel_values"] == ("images", 3, 32, 32)
    assert shapes["logits_per_image"] == ("images", "texts")
    assert program.dimensions["sequence"] == (1, 20)


def test_the_example_of_a_text_model_has_no_more_tokens_than_the_model_has_positions(tmp_path):
    BertForSequenceClassification(BertConfig(**SMALL, max_position_embeddings=8)).save_pretrained(tmp_path)
    opened = load_transformers(tmp_path)
    assert opened.example_inputs["input_ids"].shape[1] == 8
    opened.module(**opened.example_inputs)


def test_an_encoder_that_was_saved_without_its_decoder_is_opened(tmp_path):
    whisper().get_encoder().save_pretrained(tmp_path)
    opened = load_transformers(tmp_path)
    assert opened.example_inputs["input_features"].shape == (2, 8, 60)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"samples": 9}, "'samples'; there are batch, sequence"),
        ({"sequence": 0}, "sequence must be an integer"),
        ({"sequence": "long"}, "sequence must be an integer"),
        ({"part": "encoder"}, "no part 'encoder'"),
        ({"part": "head"}, "no part 'head'"),
    ],
)
def test_invalid_options_are_named(options, words, tmp_path):
    with pytest.raises(ProgramError, match=words):
        opened_of(bert, tmp_path, **options)


def test_faults_of_a_directory_are_named(tmp_path):
    with pytest.raises(ProgramError, match=r"no config\.json"):
        load_transformers(tmp_path)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(ProgramError, match="not a JSON object"):
        load_transformers(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NoSuchModel"]}))
    with pytest.raises(ProgramError, match="'NoSuchModel'"):
        load_transformers(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertModel"], "model_type": "bert"}))
    with pytest.raises(ProgramError, match="cannot load"):
        load_transformers(tmp_path)


def test_the_error_without_transformers_says_how_to_install_it(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ProgramError, match="pip install transformers"):
        load_transformers(tmp_path)


AUTO_MAP = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
OWN_CODE = """
import pathlib
from transformers import PretrainedConfig, PreTrainedModel
pathlib.Path({marker!r}).touch()
class OwnConfig(PretrainedConfig):
    model_type = "own"
class OwnModel(PreTrainedModel):
    config_class = OwnConfig
"""


@pytest.mark.parametrize("names", [None, ["OwnModel"], ["AutoModel"]])
def test_code_in_a_directory_never_runs(names, tmp_path, monkeypatch):
    config = {"model_type": "own", "auto_map": AUTO_MAP} | ({"architectures": names} if names else {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(OWN_CODE.format(marker=str(tmp_path / "ran")))
    # A prompt that asks whether to run code would be answered with yes.
    monkeypatch.setattr("builtins.input", lambda prompt: "y")
    with pytest.raises(ProgramError, match="module:callable"):
        load_transformers(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_kernels_are_not_fetched(tmp_path):
    bert().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    nested = {"attn_implementation": {"text_config": "some/kernels"}}
    for extra in ({"attn_implementation": "some/kernels"}, {"text_config": nested}, nested):
        (tmp_path / "config.json").write_text(json.dumps(config | extra))
        with pytest.raises(ProgramError, match="some/kernels"):
            load_transformers(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", {"quantization_config": {"quant_method": "hqq"}}, "quantization_config"),
        ("config.json", {"text_config": [{"transformers_weights": "w.bin"}]}, "transformers_weights"),
        ("config.json", {"configuration_files": ["config.4.0.0.json"]}, "configuration_files"),
        ("config.json", {"attribute_map": {"a": "_attn_implementation"}, "a": "x/y"}, "attribute_map"),
        ("config.json", {"_attn_implementation": "flash_attention_2"}, "flash_attention_2"),
        ("adapter_config.json", {}, "adapter"),
        ("model.safetensors.index.json", {"weight_map": {"a": "w.bin"}}, "w.bin"),
        ("model.safetensors.index.json", {"weight_map": {"a": "../w.safetensors"}}, "w.safetensors"),
        ("model.safetensors.index.json", {"weight_map": 1}, "names 1"),
    ],
)
def test_a_directory_that_names_code_or_other_files_is_refused(file, content, words, tmp_path):
    bert().save_pretrained(tmp_path)
    place = tmp_path / file
    before = json.loads(place.read_text()) if place.exists() else {}
    place.write_text(json.dumps(before | content))
    with pytest.raises(ProgramError, match=words):
        load_transformers(tmp_path)


@pytest.mark.parametrize("name", ["AutoTokenizer", "GenerationConfig", "BertConfig", "pipeline"])
def test_a_class_that_is_no_model_is_named(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": [name]}))
    with pytest.raises(ProgramError, match=name):
        load_transformers(tmp_path)

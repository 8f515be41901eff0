"""Directories written by transformers, opened and exported."""

import json
import sys

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from overwinter.core.errors import ProgramError
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
    if "sequence" in program.dimensions:
        inputs = {name: tensor[:, :9].contiguous() for name, tensor in inputs.items()}
    with torch.inference_mode():
        expected = model(**inputs).logits
        (given,) = compile_program(program)(weights, [inputs[spec.name] for spec in program.inputs])
    assert [spec.name for spec in program.outputs] == ["logits"]
    assert torch.equal(given, expected)


def test_longest_sequence_is_found_where_the_model_shows_it(tmp_path):
    bert().save_pretrained(tmp_path)
    program, _ = export(*load_transformers(tmp_path))
    assert program.dimensions["sequence"] == (1, 40)


def test_model_with_a_decoder_of_its_own_is_refused(tmp_path):
    config = T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=50)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(ProgramError, match="decoder"):
        load_transformers(tmp_path)


def test_incomplete_directories_are_named(tmp_path):
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


def test_missing_transformers_is_said(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ProgramError, match="pip install transformers"):
        load_transformers(tmp_path)

"""Handler of MiniLM: sentences in, one embedding for each out. Asset: tokenizer.json."""

import torch
from tokenizers import Tokenizer
from torch.nn.utils.rnn import pad_sequence

INPUTS = [{"name": "text", "datatype": "BYTES", "shape": ["batch"]}]
OUTPUTS = [{"name": "embedding", "datatype": "FP32", "shape": ["batch", 384]}]

LONGEST = 256
"""Tokens of a sentence that count: the model was trained on no more."""


def read_asset(name: str, data: bytes) -> Tokenizer:
    """The tokenizer, which functions that have the same one share: nothing changes it after."""
    tokenizer = Tokenizer.from_str(data.decode())
    tokenizer.no_padding()
    tokenizer.enable_truncation(LONGEST)
    return tokenizer


def setup(assets: dict[str, Tokenizer]) -> Tokenizer:
    """The only asset."""
    return assets["tokenizer.json"]


def preprocess(inputs: dict[str, list[bytes]], state: Tokenizer) -> dict[str, torch.Tensor]:
    """Text [batch] to token ids and mask, each [batch, longest sentence]."""
    # One by one: a batch would start threads, and a sandbox may have none to give.
    tokens = [torch.tensor(state.encode(sentence.decode()).ids) for sentence in inputs["text"]]
    masks = [torch.ones_like(ids) for ids in tokens]
    return {
        "input_ids": pad_sequence(tokens, batch_first=True),
        "attention_mask": pad_sequence(masks, batch_first=True),
    }

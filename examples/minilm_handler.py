"""The handler of MiniLM: takes sentences, returns an embedding for each. Asset: tokenizer.json."""

import torch
from tokenizers import Tokenizer
from torch.nn.utils.rnn import pad_sequence

from overwinter.core.errors import CallerError

INPUTS = [{"name": "text", "datatype": "BYTES", "shape": ["batch"]}]
OUTPUTS = [{"name": "embedding", "datatype": "FP32", "shape": ["batch", 384]}]

LONGEST = 256
"""The most tokens of a sentence; the model was trained on no more."""


def read_asset(name: str, data: bytes) -> Tokenizer:
    """Read the tokenizer. Functions with the same file share the result, which never changes."""
    tokenizer = Tokenizer.from_str(data.decode())
    tokenizer.no_padding()
    tokenizer.enable_truncation(LONGEST)
    return tokenizer


def setup(assets: dict[str, Tokenizer]) -> Tokenizer:
    """Return the only asset."""
    return assets["tokenizer.json"]


def preprocess(inputs: dict[str, list[bytes]], state: Tokenizer) -> dict[str, torch.Tensor]:
    """Convert text [batch] to token ids and mask, each [batch, longest sentence]."""
    if not inputs["text"]:
        raise CallerError("input 'text' is empty")
    # Encode one by one: a batch would start threads, which a sandbox may not allow.
    try:
        tokens = [torch.tensor(state.encode(sentence.decode()).ids) for sentence in inputs["text"]]
    except UnicodeDecodeError as error:
        raise CallerError(f"input 'text' is not UTF-8: {error}") from error
    masks = [torch.ones_like(ids) for ids in tokens]
    return {
        "input_ids": pad_sequence(tokens, batch_first=True),
        "attention_mask": pad_sequence(masks, batch_first=True),
    }

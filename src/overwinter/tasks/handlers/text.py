"""Converts texts to token ids and masks. Assets: tokenizer.json, task.json."""

import json
from typing import Any

import torch
from tokenizers import Encoding, Tokenizer
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from overwinter.core.errors import CallerError

INPUTS = [{"name": "text", "datatype": "BYTES", "shape": ["batch"]}]


def setup(assets: dict[str, bytes]) -> dict[str, Any]:
    """Read the tokenizer, once for each function in a worker."""
    state = json.loads(assets["task.json"])
    tokenizer = Tokenizer.from_str(assets["tokenizer.json"].decode())
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if state["longest"] is not None:
        tokenizer.enable_truncation(state["longest"], direction=state["truncation_side"])
    return {**state, "tokenizer": tokenizer}


def preprocess(inputs: dict[str, list[bytes]], state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Convert text [batch] to ids, mask and type ids, each [batch, tokens]."""
    tokens = tokenized(inputs, state)
    return {
        "input_ids": padded([text.ids for text in tokens], state["pad"], state),
        "attention_mask": padded([text.attention_mask for text in tokens], 0, state),
        "token_type_ids": padded([text.type_ids for text in tokens], state["pad_type"], state),
    }


def tokenized(inputs: dict[str, list[bytes]], state: dict[str, Any]) -> list[Encoding]:
    """Tokenize each text; raise CallerError if there is none, or one cannot be tokenized."""
    if not inputs["text"]:
        raise CallerError("input 'text' is empty")
    try:
        texts = [text.decode() for text in inputs["text"]]
    except UnicodeDecodeError as error:
        raise CallerError(f"input 'text' is not UTF-8: {error}") from error
    # Encode one by one: a batch would start threads, which a sandbox may not allow.
    tokens = [state["tokenizer"].encode(text) for text in texts]
    for number, text in enumerate(tokens):
        if not text.ids:
            # A model would answer for the padding alone.
            raise CallerError(f"element {number} of input 'text' has no tokens: give it words")
    return tokens


def padded(rows: list[list[int]], filler: int, state: dict[str, Any]) -> torch.Tensor:
    """Pad the rows to the longest of them, or to the only length that the program takes."""
    joined = pad_sequence(
        [torch.tensor(row, dtype=torch.int64) for row in rows], batch_first=True, padding_value=filler
    )
    return pad(joined, (0, max(0, (state["sequence"] or 0) - joined.shape[1])), value=filler)

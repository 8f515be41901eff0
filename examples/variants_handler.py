"""The handler of the MiniLM classifiers: takes sentences, returns the class of each. Assets: tokenizer.json,
labels.txt.
"""

from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch.nn.utils.rnn import pad_sequence

from overwinter.core.errors import CallerError

INPUTS = [{"name": "text", "datatype": "BYTES", "shape": ["batch"]}]
OUTPUTS = [
    {"name": "label", "datatype": "BYTES", "shape": ["batch"]},
    {"name": "scores", "datatype": "FP32", "shape": ["batch", "classes"]},
]

LONGEST = 256
"""The most tokens of a sentence; the model was trained on no more."""


class State(NamedTuple):
    """The state that a worker keeps between requests."""

    tokenizer: Tokenizer
    labels: list[bytes]


def read_asset(name: str, data: bytes) -> Tokenizer | list[bytes]:
    """Read the tokenizer or the names of the classes. All variants share the tokenizer, which never changes."""
    if name == "labels.txt":
        return data.splitlines()
    tokenizer = Tokenizer.from_str(data.decode())
    tokenizer.no_padding()
    tokenizer.enable_truncation(LONGEST)
    return tokenizer


def setup(assets: dict[str, Any]) -> State:
    """Return the state from both assets."""
    return State(assets["tokenizer.json"], assets["labels.txt"])


def preprocess(inputs: dict[str, list[bytes]], state: State) -> dict[str, torch.Tensor]:
    """Convert text [batch] to token ids and mask, each [batch, longest sentence]."""
    if not inputs["text"]:
        raise CallerError("input 'text' is empty")
    # Encode one by one: a batch would start threads, which a sandbox may not allow.
    try:
        tokens = [torch.tensor(state.tokenizer.encode(sentence.decode()).ids) for sentence in inputs["text"]]
    except UnicodeDecodeError as error:
        raise CallerError(f"input 'text' is not UTF-8: {error}") from error
    masks = [torch.ones_like(ids) for ids in tokens]
    return {
        "input_ids": pad_sequence(tokens, batch_first=True),
        "attention_mask": pad_sequence(masks, batch_first=True),
    }


def postprocess(
    outputs: dict[str, torch.Tensor], inputs: dict[str, list[bytes]], state: State
) -> dict[str, torch.Tensor | list[bytes]]:
    """Convert scores [batch, classes] to the names of the best classes [batch]."""
    scores = outputs["scores"]
    return {"label": [state.labels[best] for best in scores.argmax(1).tolist()], "scores": scores}

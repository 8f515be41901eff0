"""Writes features: one vector for each token, zeros after the last one of a shorter text."""

from typing import Any

import torch

OUTPUTS = [
    {"name": "features", "datatype": "FP32", "shape": ["batch", "tokens", "width"]},
    {"name": "lengths", "datatype": "INT64", "shape": ["batch"]},
]


def postprocess(
    outputs: dict[str, torch.Tensor], inputs: dict[str, list[bytes]], state: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Return the hidden states [batch, tokens, width] and the number of tokens of each text."""
    [states] = outputs.values()
    lengths = torch.tensor([len(state["tokenizer"].encode(text.decode()).ids) for text in inputs["text"]])
    longest = int(lengths.max())
    present = torch.arange(longest)[None, :] < lengths[:, None]
    return {"features": states[:, :longest].float() * present[:, :, None], "lengths": lengths}

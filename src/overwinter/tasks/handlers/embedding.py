"""Writes an embedding: the mean of the vectors of a text's tokens."""

from typing import Any

import torch

OUTPUTS = [{"name": "embedding", "datatype": "FP32", "shape": ["batch", "width"]}]


def postprocess(
    outputs: dict[str, torch.Tensor], inputs: dict[str, list[bytes]], state: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Convert hidden states [batch, tokens, width] to embeddings [batch, width]."""
    [states] = outputs.values()
    lengths = [len(state["tokenizer"].encode(text.decode()).ids) for text in inputs["text"]]
    means = [row[:length].float().mean(0) for row, length in zip(states, lengths, strict=True)]
    return {"embedding": torch.stack(means)}

"""Writes a transcript: the likeliest token of each frame, with repeats merged and blanks left out. task.json: tokens,
blank, delimiter, lower.
"""

from itertools import groupby
from typing import Any

import torch

OUTPUTS = [{"name": "text", "datatype": "BYTES", "shape": ["batch"]}]


def postprocess(
    outputs: dict[str, torch.Tensor], inputs: dict[str, torch.Tensor], state: dict[str, Any]
) -> dict[str, list[bytes]]:
    """Convert logits [batch, frames, tokens] to one text each."""
    return {"text": [transcribed(row, state).encode() for row in outputs["logits"].argmax(2).tolist()]}


def transcribed(ids: list[int], state: dict[str, Any]) -> str:
    """Return the text of the tokens."""
    tokens = [token for token, _ in groupby(state["tokens"][index] for index in ids)]
    spoken = [token for token in tokens if token != state["blank"]]
    text = "".join(" " if token == state["delimiter"] else token for token in spoken).strip()
    return text.lower() if state["lower"] else text

"""Writes classes: labels and scores, the best first. task.json: labels, function, top_k."""

from typing import Any

import torch

OUTPUTS = [
    {"name": "labels", "datatype": "BYTES", "shape": ["batch", "top"]},
    {"name": "scores", "datatype": "FP32", "shape": ["batch", "top"]},
]


def postprocess(
    outputs: dict[str, torch.Tensor], inputs: dict[str, list[bytes]], state: dict[str, Any]
) -> dict[str, torch.Tensor | list[list[bytes]]]:
    """Convert logits [batch, classes] to the best labels and their scores."""
    scores = outputs["logits"].float()
    if state["function"] == "softmax":
        scores = scores.softmax(1)
    elif state["function"] == "sigmoid":
        scores = scores.sigmoid()
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    scores, order = scores[:, : state["top_k"]], order[:, : state["top_k"]]
    labels = [[state["labels"][index].encode() for index in row] for row in order.tolist()]
    return {"labels": labels, "scores": scores.contiguous()}

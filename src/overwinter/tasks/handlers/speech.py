"""Reads sound: samples at the rate that the model was trained for. Asset: task.json."""

import json
from typing import Any

import torch

INPUTS = [{"name": "audio", "datatype": "FP32", "shape": ["batch", "samples"]}]


def setup(assets: dict[str, bytes]) -> dict[str, Any]:
    """Read the settings of the feature extractor."""
    state: dict[str, Any] = json.loads(assets["task.json"])
    return state


def preprocess(inputs: dict[str, torch.Tensor], state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return mono audio [batch, samples], with mean 0 and standard deviation 1 in each row if the model needs that."""
    audio = inputs["audio"]
    if state["normalize"]:
        deviation = (audio.var(1, keepdim=True, unbiased=False) + 1e-7).sqrt()
        audio = (audio - audio.mean(1, keepdim=True)) / deviation
    return {"input_values": audio.to(getattr(torch, state["dtype"]))}

"""Gives back the BYTES that it takes."""

import torch

INPUTS = [{"name": "words", "datatype": "BYTES", "shape": ["count"]}]
OUTPUTS = [{"name": "words", "datatype": "BYTES", "shape": ["count"]}]


def preprocess(inputs, state):
    return {"x": torch.zeros(1, 4)}


def postprocess(outputs, inputs, state):
    return {"words": inputs["words"]}

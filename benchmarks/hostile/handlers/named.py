"""The common end of two hostile handlers: the deployed source is `kernel.py` or `spy.py`, followed by this file
(`functions.source`). A request is a JSON object: `way` names the attempt to make, and the other keys describe objects
outside the sandbox.

The answer begins with "did: " if the attempt succeeded, and with "could not: " if it failed.
"""

import json

import torch

INPUTS = [{"name": "what", "datatype": "BYTES", "shape": [1]}]
OUTPUTS = [{"name": "found", "datatype": "BYTES", "shape": [1]}]


def found_by(asked):
    way = asked["way"]
    try:
        return f"did: {globals()[way](asked)!r}"
    except BaseException as error:
        return f"could not: {type(error).__name__}: {error}"


def preprocess(inputs, state):
    try:
        asked = json.loads(inputs["what"][0])
    except ValueError:
        return {"x": torch.zeros(1, 4)}
    state["found"] = found_by(asked)
    return {"x": torch.zeros(1, 4)}


def setup(assets):
    return {"found": ""}


def postprocess(outputs, inputs, state):
    return {"found": [state["found"].encode()[: 1 << 20]]}

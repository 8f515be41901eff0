"""The cost of a separate process per model: a plain PyTorch program that loads a classifier and answers once."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from examples import minilm, variants
from examples.demo_node import own_bytes


class PlainProcess(NamedTuple):
    """The memory of a process before it loads the model and after its first answer, and the time from its start to its
    end, right after that answer.
    """

    empty_bytes: int
    loaded_bytes: int
    first_answer_seconds: float


def measure_plain_process(classifier: nn.Module, sentence: str) -> PlainProcess:
    """Start a process for a classifier of examples/variants.py and wait until it has answered and ended."""
    with tempfile.NamedTemporaryFile(suffix=".pt") as checkpoint:
        torch.save(classifier.state_dict(), checkpoint.name)
        command = [sys.executable, "-m", "examples.plain_process", checkpoint.name, sentence]
        began = time.perf_counter()
        process = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=Path(__file__).parents[1])
        seconds = time.perf_counter() - began
    empty, loaded = json.loads(process.stdout)
    return PlainProcess(empty, loaded, seconds)


def main(checkpoint: str, sentence: str) -> None:
    """Serve a classifier as its author would do without Overwinter, in as little memory as possible."""
    torch.set_num_threads(1)
    empty = own_bytes(os.getpid())
    with torch.inference_mode():
        state = torch.load(checkpoint, weights_only=True)
        with torch.device("meta"):
            module = variants.Classifier(minilm.MiniLM(), nn.Linear(minilm.WIDTH, len(state["head.bias"])))
        module.load_state_dict(state, assign=True)
        module.eval()(**variants.tokens([sentence]))
    print(json.dumps([empty, own_bytes(os.getpid())]))


if __name__ == "__main__":
    main(*sys.argv[1:])

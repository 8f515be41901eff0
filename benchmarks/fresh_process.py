"""Runs a model once in a new process: imports, loads and answers. A baseline without a server.

`benchmarks.wake` runs it as `python -m benchmarks.fresh_process MODEL DIRECTORY`. It is written as an author of such a
program would write it, with only the imports that it needs. It prints the seconds since its last import, and the
beginning of its answer.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

SHOWN = 16
"""The numbers of the answer that are printed."""


def load(name: str, directory: Path) -> tuple[float, Callable[..., list[torch.Tensor]]]:
    """Load the model from a directory that `save_pretrained` wrote; return it with the time at which all imports were
    done.
    """
    if name.startswith("resnet"):
        from transformers import ResNetForImageClassification

        imported = time.perf_counter()
        network = ResNetForImageClassification.from_pretrained(directory).eval()
        return imported, lambda image: [network(pixel_values=image).logits]

    from transformers import BertModel

    imported = time.perf_counter()
    if name == "minilm":
        network = BertModel.from_pretrained(directory, add_pooling_layer=False).eval()
        return imported, lambda input_ids, attention_mask: [embed(network, input_ids, attention_mask)]
    network = BertModel.from_pretrained(directory).eval()
    return imported, lambda **inputs: [network(**inputs)[key] for key in ("last_hidden_state", "pooler_output")]


def embed(network: torch.nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Return the mean of the states of the real tokens, with length one."""
    states = network(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    mask = attention_mask.unsqueeze(-1).to(states.dtype)
    mean = (states * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1.0)
    return torch.nn.functional.normalize(mean, dim=1)


def main() -> None:
    name, directory = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    imported, network = load(name, directory)
    with torch.inference_mode():
        outputs = network(**load_file(directory / "inputs.safetensors"))
    shown = outputs[0].flatten()[:SHOWN].tolist()
    print(json.dumps([time.perf_counter() - imported, *shown]), flush=True)


if __name__ == "__main__":
    main()

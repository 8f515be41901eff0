"""What does serving a model cost without Overwinter? A plain PyTorch process that loads, runs once and waits.

`python -m benchmarks.plain MODEL WEIGHTS INPUTS LOADER` builds the model without memory for its weights (on the meta
device), which is the kindest way for it, takes them from the file, answers once, prints a digest and waits for the end
of its input.
"""

import hashlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks import zoo
from benchmarks.programs import flatten

State = dict[str, torch.Tensor]
LOADERS: dict[str, Callable[[Path], State]] = {
    "torch.load": lambda path: torch.load(path, weights_only=True),
    "mmap": lambda path: torch.load(path, weights_only=True, mmap=True),
    "safetensors": load_file,
}
SUFFIX = {"torch.load": ".pt", "mmap": ".pt", "safetensors": ".safetensors"}


class Crowd:
    """Several plain processes of one model, alive until closed; each has answered once."""

    def __init__(self, model: str, loader: str, weights: Sequence[Path], inputs: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.plain", model]
        self._processes = [
            subprocess.Popen(
                [*command, str(path.with_suffix(SUFFIX[loader])), str(inputs), loader],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for path in weights
        ]
        self.pids = [process.pid for process in self._processes]
        self.digests = [process.stdout.readline().strip() for process in self._processes if process.stdout]

    def __enter__(self) -> "Crowd":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.communicate()


def save(state: State, place: Path) -> None:
    """Write the weights in both formats; `place` has no suffix."""
    state = {name: tensor.clone() for name, tensor in state.items()}
    torch.save(state, place.with_suffix(".pt"))
    save_file(state, place.with_suffix(".safetensors"))


def fill(module: torch.nn.Module, state: State) -> None:
    """Give a module without memory its parameters and buffers, those that `state_dict` leaves out included."""
    module.load_state_dict(state, strict=False, assign=True)
    for name, buffer in list(module.named_buffers()):
        if buffer.is_meta:
            path, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(path), attribute, state[name])


def main() -> None:
    name, weights, inputs, loader = sys.argv[1:]
    torch.set_num_threads(1)
    with torch.device("meta"):
        module = zoo.RECIPES[name].module(False).eval()
    fill(module, LOADERS[loader](Path(weights)))
    with torch.inference_mode():
        outputs = flatten(module(**load_file(inputs)))
    print(hashlib.sha256(b"".join(output.numpy().tobytes() for output in outputs)).hexdigest(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()

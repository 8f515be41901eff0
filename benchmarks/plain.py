"""Serves a model without Overwinter: a plain PyTorch process that loads it, runs it once and waits.

`python -m benchmarks.plain MODEL INPUTS LOADER WEIGHTS ...` builds the model without memory for its weights (on the
meta device, which needs the least memory), loads them from the file, answers once, prints its process id and a
digest, and waits for the end of its input. With several files it forks one process per file after all imports, as a
pre-forking server does; if all are the same file, after loading the model.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks import zoo
from benchmarks.programs import flatten

State = dict[str, torch.Tensor]
LOADERS: dict[str, Callable[[Path], State]] = {
    "torch.load": lambda path: torch.load(path, weights_only=True),
    "mmap": lambda path: torch.load(path, weights_only=True, mmap=True),
}


class PlainProcesses:
    """Several plain processes of one model, alive until closed; each has answered once."""

    def __init__(self, model: str, loader: str, weights: Sequence[Path], inputs: Path) -> None:
        self._processes = [started(model, inputs, loader, [path]) for path in weights]
        self.pids = [process.pid for process in self._processes]
        self.digests = [answered(process)[1] for process in self._processes]

    def __enter__(self) -> "PlainProcesses":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.communicate()


class ForkedProcesses:
    """Processes forked from one that has imported PyTorch and, if all weights are one file, has loaded the model. That
    process is in `pids` too. All are alive until closed, and each has answered.
    """

    def __init__(self, model: str, weights: Sequence[Path], inputs: Path) -> None:
        self._process = started(model, inputs, "torch.load", weights)
        answers = [answered(self._process) for _ in weights]
        self.pids = list(dict.fromkeys([self._process.pid, *(pid for pid, _ in answers)]))
        self.digests = [digest for _, digest in answers]

    def __enter__(self) -> "ForkedProcesses":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def started(model: str, inputs: Path, loader: str, weights: Sequence[Path]) -> "subprocess.Popen[str]":
    """Start a process of this file."""
    files = [str(path.with_suffix(".pt")) for path in weights]
    command = [sys.executable, "-m", "benchmarks.plain", model, str(inputs), loader, *files]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def answered(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Return the pid and the digest of the next process that has answered; raise RuntimeError if there is none."""
    assert process.stdout is not None
    line = process.stdout.readline().split()
    if len(line) != 2:
        raise RuntimeError(f"a plain process ended with status {process.wait()}")
    return int(line[0]), line[1]


def save(state: State, path: Path) -> None:
    """Write the weights to one file, each tensor with its own storage; `path` has no suffix."""
    torch.save({name: tensor.clone() for name, tensor in state.items()}, path.with_suffix(".pt"))


def fill(module: torch.nn.Module, state: State) -> None:
    """Give a module on the meta device its parameters and buffers, including those that `state_dict` leaves out."""
    module.load_state_dict(state, strict=False, assign=True)
    for name, buffer in list(module.named_buffers()):
        if buffer.is_meta:
            path, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(path), attribute, state[name])


def loaded(name: str, loader: str, weights: str) -> torch.nn.Module:
    """Return the model with the weights of a file."""
    with torch.device("meta"):
        module = zoo.RECIPES[name].module(False).eval()
    fill(module, LOADERS[loader](Path(weights)))
    return module


def answer(module: torch.nn.Module, inputs: zoo.Inputs) -> None:
    """Answer once, print the process id and a digest of the answer, and wait."""
    with torch.inference_mode():
        outputs = flatten(module(**inputs))
    digest = hashlib.sha256(b"".join(output.numpy().tobytes() for output in outputs)).hexdigest()
    # Use one write, so that lines of several processes do not mix.
    os.write(sys.stdout.fileno(), f"{os.getpid()} {digest}\n".encode())
    sys.stdin.read()


def main() -> None:
    name, inputs, loader, *weights = sys.argv[1:]
    torch.set_num_threads(1)
    tensors = load_file(inputs)
    with torch.device("meta"):
        # Building the model once imports its classes.
        zoo.RECIPES[name].module(False)
    module = loaded(name, loader, weights[0]) if len(set(weights)) == 1 else None
    if module is not None and len(weights) == 1:
        answer(module, tensors)
        return
    for path in weights:
        if os.fork() == 0:
            answer(module or loaded(name, loader, path), tensors)
            return
    for _ in weights:
        os.wait()


if __name__ == "__main__":
    main()

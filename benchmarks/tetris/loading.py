"""Measures the start of a plain PyTorch process, part by part.

`python -m benchmarks.tetris.loading MODEL WEIGHTS INPUTS` imports all that it needs and prints a line. After a line of
input it builds the model without memory for its weights, loads them from the file, answers twice, and prints the times
as JSON.
"""

import json
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file

from benchmarks import zoo
from benchmarks.plain import LOADERS, fill


class Loaded(msgspec.Struct, frozen=True):
    """The seconds of a plain process."""

    load_s: float
    """The time until the weights are in the model."""
    first_s: float
    """The time of the first answer."""
    warm_s: float
    """The time of the second answer."""
    import_s: float = 0.0
    """The time from the start of the process until only the model is missing."""

    @property
    def model_s(self) -> float:
        """The time to bring the model into a running process: to its first answer, without the answer itself."""
        return self.load_s + self.first_s - self.warm_s

    @property
    def start_s(self) -> float:
        """The same from the start of the process."""
        return self.import_s + self.model_s


class Loader:
    """A plain process that waits until it may load."""

    def __init__(self, model: str, weights: Path, inputs: Path) -> None:
        began = time.perf_counter()
        command = [sys.executable, "-m", "benchmarks.tetris.loading", model, str(weights), str(inputs)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()
        self._import_s = time.perf_counter() - began

    def go(self) -> None:
        """Let it load."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def loaded(self) -> Loaded:
        """Return its times; the process ends."""
        answer = msgspec.convert(self._answer(), Loaded)
        self._process.communicate()
        return msgspec.structs.replace(answer, import_s=self._import_s)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a plain process ended with status {self._process.wait()}")
        return json.loads(line)


def main() -> None:
    name, weights, inputs = sys.argv[1:]
    torch.set_num_threads(1)
    tensors = load_file(inputs)
    # Building the model once imports its classes.
    with torch.device("meta"):
        zoo.RECIPES[name].module(False)
    print(json.dumps("ready"), flush=True)
    sys.stdin.readline()
    marks = [time.perf_counter()]
    with torch.device("meta"):
        module = zoo.RECIPES[name].module(False).eval()
    fill(module, LOADERS["torch.load"](Path(weights)))
    marks.append(time.perf_counter())
    with torch.inference_mode():
        for _ in range(2):
            module(**tensors)
            marks.append(time.perf_counter())
    parts = (end - begin for begin, end in pairwise(marks))
    print(json.dumps(dict(zip(("load_s", "first_s", "warm_s"), parts, strict=True))), flush=True)


if __name__ == "__main__":
    main()

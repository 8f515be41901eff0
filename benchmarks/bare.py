"""Runs a model in a bare PyTorch loop in a separate process: the cost of a request without serving.

`python -m benchmarks.bare URL DIRECTORY MODEL [TOKEN]` deploys the model, writes its requests to the files
`MODEL.binary` and `MODEL.json`, and prints a line when this is done. Then, for each line of input, a number of seconds,
it calls the model for that long and prints the latencies in microseconds as JSON.
"""

import json
import sys
import time
from pathlib import Path

import torch

from benchmarks.families import Family, as_tensors
from benchmarks.wire import Connection, binary_request, json_request, with_token
from overwinter.api.client import Client

TOKENS = 16
WARM_UP = 20


class Bare(Family):
    """A model with a small input."""

    def __init__(self, name: str) -> None:
        """Build the model; its input is one row, which has 16 tokens if it is a text."""
        super().__init__(name, tokens=TOKENS)

    def serve(self, url: str, directory: Path, token: str | None) -> None:
        """Deploy, write the requests, and see that the node answers as plain PyTorch does."""
        with Client(url, token=token) as client:
            self.deploy(client, self.name, keep_alive_s=600)
        inputs = self.one()
        tensors = as_tensors(inputs)
        binary = with_token(binary_request(self.name, tensors), token)
        (directory / f"{self.name}.binary").write_bytes(binary)
        values = [tensor.flatten().tolist() for tensor in inputs.values()]
        (directory / f"{self.name}.json").write_bytes(with_token(json_request(self.name, tensors, values), token))
        with Connection(int(url.rpartition(":")[2])) as connection:
            if connection.ask(binary).tensors != self.answer():
                raise RuntimeError(f"the node's answer of {self.name} is not plain PyTorch's")

    def loop(self, seconds: float) -> list[float]:
        """Return the latencies of consecutive calls, in seconds."""
        inputs = self.one()
        latencies: list[float] = []
        with torch.inference_mode():
            for _ in range(WARM_UP):
                self.module(**inputs)
            end = time.perf_counter() + seconds
            while (began := time.perf_counter()) < end:
                self.module(**inputs)
                latencies.append(time.perf_counter() - began)
        return latencies


def main() -> None:
    url, directory, name, *token = sys.argv[1:]
    torch.set_num_threads(1)
    bare = Bare(name)
    bare.serve(url, Path(directory), token[0] if token else None)
    print("deployed", flush=True)
    for line in sys.stdin:
        print(json.dumps([round(latency * 1e6, 1) for latency in bare.loop(float(line))]), flush=True)


if __name__ == "__main__":
    main()

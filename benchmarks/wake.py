"""How long does a request take when nothing of its function runs?

`python -m benchmarks.wake [--runs N] [model ...]`, batch 1, one thread everywhere. Each model is deployed twice over
the same blocks, once with a keep-alive of 0. A round takes, one after the other:

* warm: a body is alive and has answered just before (the second of two requests, so that its heap is in place),
* wake: no body is alive, the weights lie in the host store,
* fresh: a new Python process imports, loads the same weights from safetensors (in the page cache) and answers once;
* loaded: of that, what comes after its last import. It is the control: most of a fresh process's time is imports.

Then, as often, the node is started again with an empty host store and the page cache of its repository dropped:

* disk: the first request after that; its program is not prepared in the zygote either. TMPDIR chooses the disk.

Times are the client's, over one connection that stays open, requests encoded beforehand; every answer of the node is
compared with plain PyTorch's, bit for bit.
"""

import argparse
import json
import math
import os
import struct
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.families import Family, as_tensors
from benchmarks.measure import print_result, told_spread
from benchmarks.nodes import Node, forget_pages, running_node
from benchmarks.wire import Connection, binary_request

MODELS = ("minilm", "resnet50", "resnet152", "bert-base")
KINDS = ("warm", "wake", "disk", "fresh", "loaded")
DISCARDED = 2
QUIET = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
Times = dict[str, list[float]]


class Subject:
    """One deployed model: its requests, its right answer, and the directory for fresh processes."""

    def __init__(self, name: str, node: Node, directory: Path) -> None:
        self.name = name
        self.directory = directory
        family = Family(name)
        inputs = family.one()
        self.wake_request = binary_request(name, as_tensors(inputs))
        self.warm_request = binary_request(f"{name}-warm", as_tensors(inputs))
        self.answer = family.answer()
        network: Any = family.module.model
        network.config.save_pretrained(directory)
        save_file(network.state_dict(), directory / "model.safetensors", metadata={"format": "pt"})
        save_file(inputs, directory / "inputs.safetensors")
        family.deploy(node.client, name, keep_alive_s=0)
        family.deploy(node.client, f"{name}-warm", keep_alive_s=600)
        self.times: Times = {kind: [] for kind in KINDS}

    def ask_ms(self, connection: Connection, request: bytes, start: str) -> float:
        """Milliseconds of one request; RuntimeError when the answer is not what it must be."""
        began = time.perf_counter()
        answer = connection.ask(request)
        took = (time.perf_counter() - began) * 1e3
        if answer.start != start or answer.tensors != self.answer:
            raise RuntimeError(f"{self.name}: a {answer.start} answer in place of {start}, or a wrong one")
        return took

    def warm_ms(self, connection: Connection) -> float:
        """A request to a body that has just worked."""
        self.ask_ms(connection, self.warm_request, "warm")
        return self.ask_ms(connection, self.warm_request, "warm")

    def wake_ms(self, connection: Connection, node: Node, start: str = "host") -> float:
        """A request while no body is alive."""
        node.wait_bodies(self.name, 0)
        return self.ask_ms(connection, self.wake_request, start)

    def fresh_ms(self) -> tuple[float, float]:
        """A new process, from its start and from the end of its imports to its printed answer."""
        command = [sys.executable, "-m", "benchmarks.fresh", self.name, str(self.directory)]
        began = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **QUIET}, text=True) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            took = (time.perf_counter() - began) * 1e3
        loaded_s, *given = json.loads(line or "[0]")
        expected = struct.unpack_from(f"<{len(given)}f", self.answer)
        # Not bit for bit: safetensors maps weights at other alignments, where linear layers sum in another order.
        if not given or not all(map(partial(math.isclose, rel_tol=1e-3, abs_tol=1e-4), given, expected)):
            raise RuntimeError(f"the fresh process of {self.name} gives another answer: {line or 'none'}")
        return took, loaded_s * 1e3


def measure_asleep(node: Node, subjects: list[Subject], runs: int) -> None:
    """Fill in warm, wake and fresh; the first rounds do not count."""
    node.wait_quiet()
    with Connection(node.port) as connection:
        for subject in subjects:
            for _ in range(DISCARDED):
                subject.warm_ms(connection)
                subject.wake_ms(connection, node)
            subject.fresh_ms()
        for run in range(runs):
            for subject in subjects:
                subject.times["warm"].append(subject.warm_ms(connection))
                subject.times["wake"].append(subject.wake_ms(connection, node))
                for kind, took in zip(("fresh", "loaded"), subject.fresh_ms(), strict=True):
                    subject.times[kind].append(took)
            print(f"  asleep: round {run + 1} of {runs}", file=sys.stderr)


def measure_disk(node: Node, subjects: list[Subject], runs: int) -> None:
    """Fill in disk."""
    for run in range(runs):
        node.stop()
        forget_pages(node.data)
        node.start()
        with Connection(node.port) as connection:
            for subject in subjects:
                # The zygote prepares the program of the one before.
                node.wait_quiet()
                subject.times["disk"].append(subject.wake_ms(connection, node, "disk"))
        print(f"  disk: round {run + 1} of {runs}", file=sys.stderr)


def report(subjects: list[Subject], runs: int) -> None:
    """The table, and the line for programs."""
    print(f"milliseconds from request to answer, median (least-largest) of {runs}; batch 1, one thread")
    titles = ("warm", "wake", "disk", "fresh process", "of it after imports")
    print(f"{'model':12}" + "".join(f"{column:>26}" for column in titles), end="")
    print(f"{'wake-warm':>12}{'disk-warm':>12}{'fresh/wake':>12}{'loaded/wake':>13}")
    wake: dict[str, float] = {}
    disk: dict[str, float] = {}
    ratio: dict[str, float] = {}
    control: dict[str, float] = {}
    for subject in subjects:
        name, times = subject.name, {kind: median(values) for kind, values in subject.times.items()}
        wake[name], disk[name] = times["wake"] - times["warm"], times["disk"] - times["warm"]
        ratio[name], control[name] = times["fresh"] / times["wake"], times["loaded"] / times["wake"]
        columns = "".join(f"{told_spread(subject.times[kind]):>26}" for kind in KINDS)
        print(f"{name:12}{columns}{wake[name]:12.1f}{disk[name]:12.1f}{ratio[name]:12.1f}{control[name]:13.1f}")
    print("every answer of the node equals plain PyTorch's bit for bit")
    print_result(
        {
            "wake_over_warm_ms": wake,
            "disk_over_warm_ms": disk,
            "fresh_over_wake": ratio,
            "fresh_after_imports_over_wake": control,
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, metavar="model", help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--runs", type=int, default=5, help="of each kind; default 5")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="overwinter-bench-") as root, running_node() as node:
        subjects = [Subject(name, node, Path(root) / name) for name in options.models]
        measure_asleep(node, subjects, options.runs)
        measure_disk(node, subjects, options.runs)
        report(subjects, options.runs)


if __name__ == "__main__":
    main()

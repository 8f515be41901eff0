"""Compares the throughput of 32 functions of one family with and without shared runs.

`python -m benchmarks.siblings [--seconds S] [model ...]` deploys variants of one model with retrained heads. Each has
one closed-loop client, so that 32 requests are in progress at any time. There are two nodes, each with one worker of
one thread and batches of up to 8: in one, functions share runs; the other has the policy `separate`, in which each run
belongs to one function. One is idle while the other is measured.

For comparison it prints what batches of 8 gain for a single model:

* compute: 8 times the time of a run with one request, divided by the time of a run with 8, in this process, as in a
  profile;
* served: requests per second of one function with `max_batch` 8, divided by those with `max_batch` 1, from the same 32
  clients.

The four kinds of load are measured in turns, round after round. A gain is the median of the rounds' ratios, so that a
moment in which the machine is slower changes little. A turn lasts for at least BATCHES_MIN batches.

Before the measurement, all variants are called at the same time on each node, and each answer is compared with plain
PyTorch's, within the bound of docs/decisions/agreement.md.

With `--pool` the functions run on one virtual device instead of in a worker.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.families import Family, as_tensors
from benchmarks.measure import print_result
from benchmarks.nodes import Node, running_node
from benchmarks.wire import Connection, binary_request
from overwinter.model.closeness import bound_of
from overwinter.model.compile import compile_program

MODELS = ("mlp", "lstm", "minilm", "resnet50")
MEMBERS = 32
BATCH = 8
ROUNDS = 5
RUNS = 15
BATCHES_MIN = 20
"""The fewest batches in each turn, so that one more or less changes little."""
TOKENS = 64
"""The length of texts, if the model takes texts of any length."""
NODES = {"shared": "overwinter", "separate": "separate"}
SETTINGS: dict[str, Any] = {"timeout_s": 60.0, "max_workers": 1, "keep_alive_s": 600}
ON_DEVICE = ("--devices", "1", "--device-memory", "2GiB")
MEMBER = "member-{}".format


class Row(NamedTuple):
    """The figures of one model."""

    rates: Mapping[str, Sequence[float]]
    """The requests per second in each round, by kind of load."""
    compute: float
    difference: float
    """The largest difference of an answer's elements, relative to its largest element."""

    @property
    def over_separate(self) -> float:
        """The gain of sharing runs."""
        return self._gain("shared", "separate")

    @property
    def served(self) -> float:
        """The gain of batches for one function that is served."""
        return self._gain("batches", "alone")

    def _gain(self, kind: str, over: str) -> float:
        return median(rate / other for rate, other in zip(self.rates[kind], self.rates[over], strict=True))


def compute_times(family: Family) -> tuple[float, float]:
    """Return the seconds of a run of one request, and of a run of a batch."""
    run = compile_program(family.program)
    one = list(family.one().values())
    eight = [tensor.repeat(BATCH, *[1] * (tensor.dim() - 1)) for tensor in one]
    times: dict[int, list[float]] = {1: [], BATCH: []}
    with torch.inference_mode():
        for _ in range(RUNS):
            for batch, inputs in ((1, one), (BATCH, eight)):
                began = time.perf_counter()
                run(family.weights, inputs)
                times[batch].append(time.perf_counter() - began)
    return median(times[1]), median(times[BATCH])


def deploy(family: Family, nodes: Sequence[Node], settings: Mapping[str, Any]) -> dict[str, bytes]:
    """Deploy all variants on all nodes, and on the first one also a function that may batch and one that may not;
    return the variants' correct answers.
    """
    right = {}
    for variant in range(MEMBERS):
        family.vary(family.head(), variant + 1)
        right[MEMBER(variant)] = family.answer()
        for node in nodes:
            family.deploy(node.client, MEMBER(variant), max_batch=BATCH, **settings)
    family.vary(family.head(), 0)
    for name, batch in (("batches", BATCH), ("alone", 1)):
        family.deploy(nodes[0].client, name, max_batch=batch, isolation="function", **settings)
    return right


def check(node: Node, family: Family, requests: Mapping[str, bytes], right: Mapping[str, bytes]) -> float:
    """Call all at once, several times; return the largest difference. Raise RuntimeError if one exceeds the bound."""

    def ask(name: str) -> list[bytes]:
        with Connection(node.port) as connection:
            return [connection.ask(requests[name]).tensors for _ in range(4)]

    worst = 0.0
    with ThreadPoolExecutor(len(right)) as pool:
        for name, answers in zip(right, pool.map(ask, right), strict=True):
            wanted = np.frombuffer(right[name], np.float32)
            for answer in answers:
                apart = np.abs(np.frombuffer(answer, np.float32) - wanted).max() / np.abs(wanted).max()
                worst = max(worst, float(apart))
                if not apart <= bound_of(family.program):
                    raise RuntimeError(f"{name} answers wrongly: {apart:.2g} of its magnitude")
    return worst


def load(node: Node, seconds: float, paths: Sequence[Path]) -> float:
    """Return the requests per second."""
    command = [sys.executable, "-m", "benchmarks.load", str(node.port), str(MEMBERS), str(seconds)]
    output = subprocess.run([*command, *map(str, paths)], check=True, stdout=subprocess.PIPE).stdout
    return len(json.loads(output)) / seconds


def measured(model: str, seconds: float, root: Path, on_device: bool = False) -> Row:
    """Measure one row of the table."""
    family = Family(model, tokens=TOKENS)
    inputs, paths = as_tensors(family.one()), {}
    for name in (*map(MEMBER, range(MEMBERS)), "batches", "alone"):
        paths[name] = root / f"{model}-{name}"
        paths[name].write_bytes(binary_request(name, inputs))
    options = ("--workers-max", "1", *(ON_DEVICE if on_device else ()))
    settings = SETTINGS | ({"device": "pool"} if on_device else {})
    with (
        running_node("--policy", NODES["shared"], *options) as shared,
        running_node("--policy", NODES["separate"], *options) as separate,
    ):
        right = deploy(family, (shared, separate), settings)
        requests = {name: path.read_bytes() for name, path in paths.items()}
        difference = max(check(node, family, requests, right) for node in (shared, separate))
        members = [paths[name] for name in right]
        turns = {
            "shared": (shared, members),
            "separate": (separate, members),
            "batches": (shared, [paths["batches"]]),
            "alone": (shared, [paths["alone"]]),
        }
        one_s, batch_s = compute_times(family)
        seconds = max(seconds / ROUNDS, BATCHES_MIN * batch_s)
        rates: dict[str, list[float]] = {kind: [] for kind in turns}
        for _ in range(ROUNDS):
            for kind, (node, paths_of_kind) in turns.items():
                rates[kind].append(load(node, seconds, paths_of_kind))
    return Row(rates, BATCH * one_s / batch_s, difference)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, metavar="model", help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--seconds", type=float, default=10.0, help="fewest seconds of each kind of load; default 10")
    parser.add_argument("--pool", action="store_true", help="run the functions on a virtual device")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"requests a second of {MEMBERS} functions, one client each; one worker, one thread, batches of {BATCH}")
    columns = ("shared", "separate", "over separate", "one: compute", "one: served", "largest difference")
    print(f"{'':12}" + "".join(f"{column:>20}" for column in columns))
    rows = {}
    with tempfile.TemporaryDirectory(prefix="overwinter-bench-") as root:
        for model in options.models:
            row = rows[model] = measured(model, options.seconds, Path(root), options.pool)
            rates = f"{median(row.rates['shared']):20.1f}{median(row.rates['separate']):20.1f}"
            gains = f"{row.over_separate:20.2f}{row.compute:20.2f}{row.served:20.2f}"
            print(f"{model:12}{rates}{gains}{row.difference:20.1g}", flush=True)
    print_result(
        {
            "over_separate": {model: row.over_separate for model, row in rows.items()},
            "one_model_gain": {model: row.compute for model, row in rows.items()},
            "one_model_served": {model: row.served for model, row in rows.items()},
        }
    )


if __name__ == "__main__":
    main()

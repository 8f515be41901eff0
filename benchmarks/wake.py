"""Measures the latency of a request to a function without a worker, for each kind of start.

`python -m benchmarks.wake [--runs N] [model ...]`, batch 1, one thread everywhere. Each model is a family of
functions: the model, and four siblings with retrained heads. They have their own tenant, whose zygote holds no other
program. `minilm-handler` is the demo's MiniLM with the demo's handler, which loads a tokenizer and takes text. A round
measures, one after the other:

* wake: no worker of the family is alive, the weights are in the host store;
* warm: a worker is alive and has just answered (the second of two requests, so that its heap is allocated);
* sibling: the first answer of each sibling, which that worker has not bound yet, each after two warm requests;
* fresh: a new Python process imports PyTorch, loads the same weights from safetensors (in the page cache) and answers
  once;
* loaded: the part of `fresh` after the last import. This is the control, because most of `fresh` is imports.

Then, for as many rounds, the node is restarted:

* disk: with an empty host store, and with the page cache of the repository dropped. TMPDIR chooses the disk;
* cold: with the blocks in the host store, and nothing else of the family in memory: no worker, zygote or program.

What a wake or a sibling takes over a warm answer is the median of the differences to the warm answer next to it,
because a machine's speed changes within minutes; for disk and cold it is the difference of the medians.

`kept` is the memory that the family still uses after its worker has ended, without its blocks: the increase of the
anonymous PSS of all processes of the node except the daemon, without `ahead`. `ahead` is the memory of the tenant's
workers forked ahead: they hold nothing of a function, and any function of the tenant can use them. Times are measured
by the client over one open connection, with requests encoded in advance. Every answer of the node is compared with
plain PyTorch's, bit for bit.
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
from collections.abc import Mapping
from functools import partial
from operator import sub
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from benchmarks import zoo
from benchmarks.families import Family, as_tensors
from benchmarks.measure import MIB, memory, print_result, private_bytes, spread_text
from benchmarks.nodes import Node, forget_pages, is_ahead, running_node
from benchmarks.wire import Connection, binary_request
from examples import minilm, minilm_handler
from overwinter.api.client import Client
from overwinter.core.tensor import BYTES, Tensor, pack_bytes

WITH_HANDLER = "minilm-handler"
MODELS = ("minilm", "resnet50", "resnet152", "bert-base", WITH_HANDLER)
KINDS = ("warm", "sibling", "wake", "cold", "disk", "fresh", "loaded")
SIBLINGS = 4
DISCARDED = 2
KEEP_ALIVE_S = 2.0
"""Long enough for a round, and short enough to wait for its end."""
TEXT = b"Is this function awake?"
QUIET = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
Times = dict[str, list[float]]


class FamilyWithHandler(Family):
    """The demo's MiniLM behind the demo's handler."""

    def __init__(self) -> None:
        super().__init__(WITH_HANDLER, model=zoo.Model(minilm.load(), *minilm.inputs()))
        self._state = minilm_handler.setup(
            {name: minilm_handler.read_asset(name, data) for name, data in minilm.assets().items()}
        )

    def one(self, row: int = 0) -> dict[str, torch.Tensor]:
        """Return what the handler makes of the text."""
        return minilm_handler.preprocess({"text": [TEXT]}, self._state)


class Member(NamedTuple):
    """One function: its name, its request, and its correct answer."""

    name: str
    request: bytes
    answer: bytes


class Subject:
    """A deployed model and its siblings."""

    def __init__(self, name: str, node: Node, directory: Path) -> None:
        """Deploy the model. `directory`: the files that a fresh process loads."""
        self.name = name
        self.directory = directory
        self.times: Times = {kind: [] for kind in KINDS}
        self.beyond: Times = {"wake": [], "sibling": []}
        """The differences to the warm answer next to each."""
        self.kept: list[float] = []
        """The bytes kept after each cold start, without those of workers forked ahead."""
        self.ahead: list[float] = []
        """The bytes of the workers forked ahead for the tenant after each cold start."""
        family = FamilyWithHandler() if name == WITH_HANDLER else Family(name)
        with Client(node.url, tenant=name) as client:
            self.siblings = [self._deployed(client, family, variant) for variant in range(1, SIBLINGS + 1)]
            self.itself = self._deployed(client, family, 0)
        if name != WITH_HANDLER:
            network: Any = family.module.model
            network.config.save_pretrained(directory)
            save_file(network.state_dict(), directory / "model.safetensors", metadata={"format": "pt"})
            save_file(family.one(), directory / "inputs.safetensors")

    def _deployed(self, client: Client, family: Family, variant: int) -> Member:
        name, code, tensors = f"{self.name}-sibling-{variant}" if variant else self.name, None, as_tensors(family.one())
        assets: Mapping[str, bytes] = {}
        if self.name == WITH_HANDLER:
            code, assets = Path(minilm_handler.__file__).read_text(), minilm.assets()
            tensors = [Tensor("text", BYTES, (1,), pack_bytes([TEXT]))]
        family.vary(family.head(), variant)
        family.deploy(client, name, code, assets=assets, tenant=self.name, keep_alive_s=KEEP_ALIVE_S)
        return Member(name, binary_request(name, tensors), family.answer())

    def first_ms(self, connection: Connection, node: Node, start: str = "host") -> float:
        """Measure a request while the family has no worker."""
        for member in (self.itself, *self.siblings):
            node.wait_workers(member.name, 0)
        return self._ask_ms(connection, self.itself, start)

    def warm_ms(self, connection: Connection) -> float:
        """Measure a request to a worker that has just answered."""
        self._ask_ms(connection, self.itself, "warm")
        return self._ask_ms(connection, self.itself, "warm")

    def starts_ms(self, connection: Connection, node: Node) -> Times:
        """Measure the first request without a worker, the first of each sibling, and the warm request next to each."""
        times = {"wake": [self.first_ms(connection, node)], "warm": [self.warm_ms(connection)], "sibling": []}
        for sibling in self.siblings:
            times["warm"].append(self.warm_ms(connection))
            times["sibling"].append(self._ask_ms(connection, sibling, "bound"))
        return times

    def add(self, times: Times) -> None:
        """Record the times of a round: those of `starts_ms`, and of a fresh process if there is one."""
        first, *others = times["warm"]
        self.beyond["wake"].append(times["wake"][0] - first)
        self.beyond["sibling"] += map(sub, times["sibling"], others)
        for kind, taken in times.items():
            self.times[kind] += taken

    def _ask_ms(self, connection: Connection, member: Member, start: str) -> float:
        """Return the milliseconds of one request; raise RuntimeError if the answer is wrong."""
        began = time.perf_counter()
        answer = connection.ask(member.request)
        took = (time.perf_counter() - began) * 1e3
        if answer.start != start or answer.tensors != member.answer:
            raise RuntimeError(f"{member.name}: a {answer.start} answer in place of {start}, or a wrong one")
        return took

    def fresh_ms(self) -> tuple[float, float]:
        """Measure a new process, from its start and from the end of its imports to its printed answer."""
        command = [sys.executable, "-m", "benchmarks.fresh_process", self.name, str(self.directory)]
        began = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **QUIET}, text=True) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            took = (time.perf_counter() - began) * 1e3
        loaded_s, *given = json.loads(line or "[0]")
        expected = struct.unpack_from(f"<{len(given)}f", self.itself.answer)
        # Not bit for bit: safetensors maps weights at other alignments, where linear layers sum in another order.
        if not given or not all(map(partial(math.isclose, rel_tol=1e-3, abs_tol=1e-4), given, expected)):
            raise RuntimeError(f"the fresh process of {self.name} gives another answer: {line or 'none'}")
        return took, loaded_s * 1e3

    def over_warm(self, kind: str) -> float:
        """Return the milliseconds beyond a warm answer."""
        if kind in self.beyond:
            return median(self.beyond[kind])
        return median(self.times[kind]) - median(self.times["warm"])


def measure_starts(node: Node, subjects: list[Subject], runs: int) -> None:
    """Measure wake, warm, sibling and fresh; the first rounds do not count."""
    node.wait_quiet()
    with Connection(node.port) as connection:
        for run in range(-DISCARDED, runs):
            for subject in subjects:
                starts = subject.starts_ms(connection, node)
                if subject.name != WITH_HANDLER and run >= -1:
                    fresh, loaded = subject.fresh_ms()
                    starts |= {"fresh": [fresh], "loaded": [loaded]}
                if run >= 0:
                    subject.add(starts)
            print(f"  without restart: round {run + 1} of {runs}", file=sys.stderr)


def measure_restarted(node: Node, subjects: list[Subject], runs: int, kind: str) -> None:
    """Measure disk; or, if the node keeps the blocks, cold and what is kept after it."""
    for run in range(runs):
        node.stop()
        forget_pages(node.data)
        node.start()
        with Connection(node.port) as connection:
            for subject in subjects:
                # The previous round must not leave a worker or a zygote busy.
                node.wait_quiet()
                before, ahead_before = held_bytes(node), ahead_bytes(node)
                subject.times[kind].append(subject.first_ms(connection, node, "disk" if kind == "disk" else "host"))
                node.wait_workers(subject.name, 0)
                node.wait_quiet()
                if kind == "cold":
                    ahead = ahead_bytes(node) - ahead_before
                    subject.ahead.append(ahead)
                    subject.kept.append(held_bytes(node) - before - ahead)
        print(f"  {kind}: round {run + 1} of {runs}", file=sys.stderr)


def held_bytes(node: Node) -> int:
    """Return the anonymous memory of all processes but the daemon."""
    return memory(node.pids()[1:]).anonymous


def ahead_bytes(node: Node) -> int:
    """Return the memory that only processes forked ahead use."""
    return private_bytes(pid for pid in node.pids() if is_ahead(pid))


def report(subjects: list[Subject], runs: int) -> None:
    """Print the tables and the RESULT line."""
    print(f"milliseconds from request to answer, median (least-largest) of {runs} rounds; batch 1, one thread")
    titles = ("warm", "sibling", "wake", "cold", "disk", "fresh process", "of it after imports")
    print(f"{'model':16}" + "".join(f"{title:>24}" for title in titles))
    for subject in subjects:
        cells = (spread_text(subject.times[kind]) if subject.times[kind] else "-" for kind in KINDS)
        print(f"{subject.name:16}" + "".join(f"{cell:>24}" for cell in cells))
    print(f"\n{'over warm':16}{'sibling':>10}{'wake':>10}{'cold':>10}{'disk':>10}{'kept MiB':>10}{'ahead':>8}", end="")
    print(f"{'fresh/wake':>12}{'loaded/wake':>13}")
    ratios: dict[str, dict[str, float]] = {"fresh": {}, "loaded": {}}
    for subject in subjects:
        beyond = "".join(f"{subject.over_warm(kind):10.1f}" for kind in KINDS[1:5])
        print(f"{subject.name:16}{beyond}{median(subject.kept) / MIB:10.1f}{median(subject.ahead) / MIB:8.1f}", end="")
        for kind, ratio in ratios.items() if subject.name != WITH_HANDLER else ():
            ratio[subject.name] = median(subject.times[kind]) / median(subject.times["wake"])
            print(f"{ratio[subject.name]:12.1f}", end="")
        print()
    print("every answer of the node equals plain PyTorch's bit for bit")
    over = {kind: {each.name: each.over_warm(kind) for each in subjects} for kind in KINDS[1:5]}
    handler_ms = over["wake"].pop(WITH_HANDLER, None)
    print_result(
        {
            "wake_over_warm_ms": over["wake"],
            "sibling_over_warm_ms": over["sibling"],
            "handler_over_warm_ms": handler_ms,
            "cold_over_warm_ms": over["cold"],
            "kept_mib": {each.name: max(0.0, median(each.kept) / MIB) for each in subjects},
            "ahead_mib": {each.name: max(0.0, median(each.ahead) / MIB) for each in subjects},
            "disk_over_warm_ms": over["disk"],
            "fresh_over_wake": ratios["fresh"],
            "fresh_after_imports_over_wake": ratios["loaded"],
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, metavar="model", help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--runs", type=int, default=5, help="rounds; default 5")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="overwinter-bench-") as root, running_node() as node:
        subjects = [Subject(name, node, Path(root) / name) for name in options.models]
        measure_starts(node, subjects, options.runs)
        measure_restarted(node, subjects, options.runs - 1, "disk")
        # The option applies from the next start on; the stop before it still empties the host store.
        node.add_options("--keep-warm")
        measure_restarted(node, subjects, 1, "disk")
        measure_restarted(node, subjects, options.runs, "cold")
        report(subjects, options.runs)


if __name__ == "__main__":
    main()

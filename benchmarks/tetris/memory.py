"""Measures memory against the number of instances and variants of a model: the paper's figures 9a and 11a.

An instance is a worker: of functions with the same blocks, or of functions that differ in their last layer. All are
alive at the same time; each has answered and is idle. The memory of the node (M_ts) is the anonymous PSS of the daemon,
its zygotes and its workers, the pages of the host store once, and the tensor buffers. It is compared with separate
processes: the anonymous PSS of a plain one that has loaded the model and answered, times the instances (I * M).
Libraries are not counted on either side: every process of a machine shares them.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from safetensors.torch import save_file

from benchmarks.density import ask_at_once, idle, node_bytes
from benchmarks.families import Family, as_tensors
from benchmarks.measure import MIB, memory, settled
from benchmarks.nodes import Node, running_node
from benchmarks.plain import PlainProcesses, save
from benchmarks.wire import binary_request
from overwinter.api.deployer import Package
from overwinter.core.ids import FunctionName

SEPARATE = {"keep_alive_s": 600.0, "isolation": "function"}
"""Each function is an instance: functions with one program would otherwise share workers."""
Curve = dict[int, float]
"""The bytes by the number of instances."""


class Sharing(NamedTuple):
    """The memory of one model."""

    plain: float
    """The bytes of a separate process."""
    instances: Curve
    variants: Curve

    def saved(self, kind: str, count: int) -> float:
        """Return the saved share of the memory of this many separate processes."""
        curve: Curve = getattr(self, kind)
        return 1 - curve[count] / (count * self.plain)


def renamed_copy(ready: Package, name: str) -> Package:
    """Return the same function under another name."""
    return Package(msgspec.structs.replace(ready.manifest, name=FunctionName(name)), ready.contents)


def curve(family: Family, counts: Sequence[int], varied: bool) -> Curve:
    """Return what a node holds with this many instances; `varied`: each with a different last layer."""
    found: Curve = {}
    requests: list[bytes] = []
    answers: list[bytes] = []
    with running_node() as node:
        ready = family.packaged("it", **SEPARATE)
        answer = family.answer()
        for count in counts:
            for number in range(len(requests) + 1, count + 1):
                if varied:
                    family.vary(family.head(), number)
                    ready, answer = family.packaged("it", **SEPARATE), family.answer()
                name = f"it-{number}"
                renamed_copy(ready, name).upload(node.client)
                requests.append(binary_request(name, as_tensors(family.one())))
                answers.append(answer)
            found[count] = _measured(node, requests, answers)
    family.vary(family.head(), 0)
    return found


def _measured(node: Node, requests: list[bytes], answers: list[bytes]) -> float:
    """Return the bytes once every instance has answered and is idle."""
    ask_at_once(node, requests, answers)
    row = node_bytes(node)
    if row["workers"] != len(requests):
        raise RuntimeError(f"{row['workers']} workers are alive, not {len(requests)}")
    return row["total"]


def plain_bytes(family: Family, alive: int) -> float:
    """Return the mean memory of a separate process, from a few of them."""
    with tempfile.TemporaryDirectory(prefix="overwinter-bench-") as root:
        place, inputs = Path(root) / "weights", Path(root) / "inputs.safetensors"
        save(family.state(), place)
        save_file(family.one(), inputs)
        with PlainProcesses(family.name, "torch.load", [place] * alive, inputs) as processes:
            settled(lambda: memory(processes.pids).anonymous, idle)
            return memory(processes.pids).anonymous / alive


def report(rows: dict[str, Sharing], counts: Sequence[int]) -> None:
    """Print both tables."""
    for kind, title in (("instances", "of one model"), ("variants", "of one model, each with its own last layer")):
        print(f"\ninstances {title}: MiB of the node, and saved of as many separate processes (I * M)")
        print(f"{'model':16}{'M MiB':>8}" + "".join(f"{count:>16}" for count in counts))
        for name, row in rows.items():
            found: Curve = getattr(row, kind)
            if found:
                cells = (f"{found[count] / MIB:9.0f} {row.saved(kind, count):6.1%}" for count in counts)
                print(f"{name:16}{row.plain / MIB:8.0f}" + "".join(cells), flush=True)

"""Measures the effect of weights in the host store on latency: the paper's figure 14d.

The same program runs on weights mapped from a node's host store and on a private copy of them, and the module runs in
plain PyTorch, all in this process. The node is called over HTTP as often, and no answer may be lost or wrong. All four
take turns.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from benchmarks.families import Family, as_tensors
from benchmarks.measure import quantile
from benchmarks.nodes import Node, running_node
from benchmarks.wire import Connection, binary_request
from overwinter.api.deployer import Package
from overwinter.model.compile import compile_program
from overwinter.worker.weights import MappedBlock, weight_tensors

KINDS = ("store", "copy", "PyTorch", "node")
TITLES = {
    "store": "weights of the store",
    "copy": "weights of its own",
    "PyTorch": "plain PyTorch",
    "node": "the node, over HTTP",
}
SHARES = (0.5, 0.9, 0.99)
WARM_UP = 3


class Latencies(NamedTuple):
    """The seconds of each run."""

    store: list[float]
    copy: list[float]
    plain: list[float]
    node: list[float]


def stored_weights(node: Node, ready: Package, family: Family) -> list[torch.Tensor]:
    """Return the function's weights as its workers have them: mapped from the node's host store."""
    [place] = node.host_store.iterdir()
    blocks = []
    pieces: dict[int, tuple[int, int]] = {}
    for number, block in enumerate(ready.manifest.blocks):
        fd = os.open(place / block.address, os.O_RDONLY)
        blocks.append(MappedBlock(fd, block.nbytes))
        os.close(fd)
        pieces.update({piece.weight: (number, piece.offset) for piece in block.pieces})
    return weight_tensors(family.program.weights, [pieces[weight] for weight in range(len(pieces))], blocks)


def by_turns(calls: Sequence[Callable[[], object]], runs: int) -> list[list[float]]:
    """Return the seconds of each call, in turns."""
    times: list[list[float]] = [[] for _ in calls]
    for run in range(WARM_UP + runs):
        for call, own in zip(calls, times, strict=True):
            began = time.perf_counter()
            call()
            if run >= WARM_UP:
                own.append(time.perf_counter() - began)
    return times


def measure_latency(family: Family, runs: int) -> Latencies:
    """Measure all four kinds."""
    inputs = family.one()
    ordered = [inputs[spec.name] for spec in family.program.inputs]
    run = compile_program(family.program)
    copied = [weight.clone() for weight in family.weights]
    ready, answer = family.packaged("it", keep_alive_s=600), family.answer()
    request = binary_request("it", as_tensors(inputs))
    with running_node() as node, torch.inference_mode():
        ready.upload(node.client)
        weights = stored_weights(node, ready, family)
        with Connection(node.port) as connection:

            def ask() -> None:
                if connection.ask(request).tensors != answer:
                    raise RuntimeError("an answer differs from plain PyTorch's")

            calls = (lambda: run(weights, ordered), lambda: run(copied, ordered), lambda: family.module(**inputs), ask)
            times = by_turns(calls, runs)
    return Latencies(*times)


def report(rows: dict[str, Latencies]) -> None:
    """Print the table."""
    print("\nlatency of a warm run in ms, by turns; every answer of the node is right, none is lost")
    print(f"{'model':16}{'':22}" + "".join(f"{f'p{100 * share:.0f}':>9}" for share in SHARES) + f"{'of copy':>10}")
    for name, row in rows.items():
        base = quantile(row.copy, 0.5)
        for kind, times in zip(KINDS, row, strict=True):
            cells = "".join(f"{1e3 * quantile(times, share):9.2f}" for share in SHARES)
            print(f"{name:16}{TITLES[kind]:22}{cells}{quantile(times, 0.5) / base:10.3f}", flush=True)

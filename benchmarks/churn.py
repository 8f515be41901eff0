"""Measures what a node keeps after many wakes, unloads, deploys and removals, by default 1000 wakes and 100 deploys.

`python -m benchmarks.churn [--wakes N] [--deploys N] [model ...]` deploys each model with and without a handler, with a
keep-alive of 0. It repeats two cycles and compares every answer with plain PyTorch's, bit for bit:

* wake and end: a request to a function without a worker, until its worker has ended. In every fourth pass over the
  functions each is unloaded first, so that its blocks leave the host store and are loaded again.
* deploy and remove: a function is deployed, called and removed. The cycles alternate between a variant with new
  weights, the same with a handler, and a program that the node has never seen. Every tenth also has a deploy that is
  refused because its handler fails.

A warm-up first fills all bounded caches: 256 programs prepared in a zygote, 512 steps in the journal's ring, SQLite's
pages, the daemon's thread pools, PyTorch's primitives and the allocators. Then the benchmark measures anonymous and
shared PSS, descriptors, processes and host-store files of the idle node without connections: after the warm-up, and
after each part of the cycles. At the end the node is stopped, and must leave nothing behind.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator

import msgspec
import torch

from benchmarks.families import Family, as_tensors
from benchmarks.measure import MIB, print_result
from benchmarks.nodes import Node, parents_of_all, running_node
from benchmarks.resources_held import HEADER, ResourcesHeld, at_rest, growth, row
from benchmarks.wire import Connection, binary_request
from overwinter.core.errors import CallerError

MODELS = ("mlp", "textcnn", "mobilenet-v2", "minilm")
PROGRAMS_KEPT = 256
"""The compiled programs that the zygote keeps (`prepared_max`)."""
STEPS = 4096
"""More steps than the journal keeps in memory (`journal_ring` in core/config.py)."""
UNLOADED_EVERY = 4
REFUSED_EVERY = 10
PARTS = 4
"""The number of readings for each kind of cycle."""
PROCESSES = 3
HANDLER = """
def preprocess(inputs, state):
    return dict(inputs)

def postprocess(outputs, inputs, state):
    return dict(outputs)
"""
BROKEN_HANDLER = """
def setup(assets):
    raise ValueError("as it must")
"""


class Subject:
    """A deployed function, its request and its correct answer."""

    def __init__(self, family: Family, name: str, handler: str | None) -> None:
        self.family = family
        self.name = name
        self.handler = handler
        self.request = binary_request(name, as_tensors(family.one()))
        self.answer = family.answer()

    def ask(self, connection: Connection) -> None:
        """Send one request; raise RuntimeError if the answer is wrong."""
        if connection.ask(self.request).tensors != self.answer:
            raise RuntimeError(f"{self.name} does not answer as plain PyTorch does")


class Churn:
    """A node, its permanent functions, and the two kinds of cycles."""

    def __init__(self, node: Node, models: list[str]) -> None:
        self.node = node
        self.families = [Family(name) for name in models]
        self.subjects = [
            Subject(family, f"{family.name}{suffix}", handler)
            for family in self.families
            for suffix, handler in (("", None), ("-handled", HANDLER))
        ]
        self._deploys = 0
        for subject in self.subjects:
            subject.family.deploy(node.client, subject.name, subject.handler, keep_alive_s=0)

    def wake(self, cycle: int, connection: Connection) -> None:
        """Wake a function by a request, and wait until its worker has ended."""
        subject = self.subjects[cycle % len(self.subjects)]
        if cycle // len(self.subjects) % UNLOADED_EVERY == 0:
            self.node.client.unload(subject.name)
            self.node.client.load(subject.name)
        subject.ask(connection)
        self.node.wait_workers(subject.name, 0)

    def deploy(self, cycle: int, connection: Connection) -> None:
        """Deploy a function, call it, and remove it."""
        family = self.families[cycle // 3 % len(self.families)]
        self._deploys += 1
        if cycle % 3 == 2:
            subject = Subject(family, f"{family.name}-own", None)
            self._deploy_own(family, subject.name)
        else:
            family.vary(family.head(), self._deploys)
            subject = Subject(family, f"{family.name}-gone-{self._deploys}", HANDLER if cycle % 3 else None)
            family.deploy(self.node.client, subject.name, subject.handler, keep_alive_s=0)
            family.vary(family.head(), 0)
        subject.ask(connection)
        self.node.client.remove(subject.name)
        if cycle % REFUSED_EVERY == 0:
            self._deploy_refused(family)

    def _deploy_own(self, family: Family, name: str) -> None:
        """Deploy a new program: that of the family with another name of its first output."""
        first, *others = family.program.outputs
        renamed = msgspec.structs.replace(first, name=f"{first.name}_{self._deploys}")
        program = msgspec.structs.replace(family.program, outputs=(renamed, *others))
        family.deploy(self.node.client, name, program=program, keep_alive_s=0)

    def _deploy_refused(self, family: Family) -> None:
        try:
            family.deploy(self.node.client, f"{family.name}-broken", BROKEN_HANDLER)
        except CallerError:
            return
        raise RuntimeError("a handler that fails was not refused")

    def warm_up(self) -> None:
        """Fill everything of bounded size."""
        with Connection(self.node.port) as connection:
            for cycle in range(2 * UNLOADED_EVERY * len(self.subjects)):
                self.wake(cycle, connection)
            for cycle in range(3 * len(self.families)):
                self.deploy(cycle, connection)
            for cycle in range(PROGRAMS_KEPT):
                self.deploy(3 * cycle + 2, connection)
                if (cycle + 1) % 64 == 0:
                    print(f"  warm-up: {cycle + 1} programs of {PROGRAMS_KEPT}", file=sys.stderr)
            # Each cycle has at least eight large steps, which name a function with all its blocks.
            for cycle in range(STEPS // 8 - PROGRAMS_KEPT):
                self.deploy(cycle, connection)

    def held(self) -> ResourcesHeld:
        """Return what the node holds when it is idle and no client is connected."""
        found = at_rest(self.node)
        if found.processes < PROCESSES or self.node.worker_pids():
            raise RuntimeError(f"a node at rest is a daemon, its base zygote and a tenant's, not {found.processes}")
        return found

    def run(self, count: int, cycle: Callable[[int, Connection], None]) -> Iterator[tuple[int, ResourcesHeld, float]]:
        """Run the cycles in parts; after each part, yield the number of cycles, what the node holds, and the
        seconds.
        """
        done = 0
        for part in range(1, PARTS + 1):
            began = time.perf_counter()
            with Connection(self.node.port) as connection:
                while done < math.ceil(count * part / PARTS):
                    cycle(done, connection)
                    done += 1
            took = time.perf_counter() - began
            yield done, self.held(), took


def measure(node: Node, models: list[str], wakes: int, deploys: int) -> dict[str, float]:
    """Print the table; return by how much the last reading exceeds the first."""
    churn = Churn(node, models)
    churn.warm_up()
    start = end = churn.held()
    print(HEADER)
    print(row("after the warm-up", start, None), flush=True)
    for title, count, cycle in (("wakes", wakes, churn.wake), ("deploys", deploys, churn.deploy)):
        before = end
        for done, end, took in churn.run(count, cycle):
            print(row(f"after {done} {title}", end, took), flush=True)
        if count:
            print(f"{title}: {(end.nbytes - before.nbytes) / count / 1024:+.2f} KiB a cycle")
    return {**growth(start, end), "held_mib": start.nbytes / MIB}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="model", help="models of the zoo")
    parser.add_argument("--wakes", type=int, default=1000, help="default 1000")
    parser.add_argument("--deploys", type=int, default=100, help="default 100")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with running_node() as node:
        figures = measure(node, options.models, options.wakes, options.deploys)
        pids = node.pids()
        node.stop()
        left = [str(path) for path in node.host_store.rglob("*")]
        alive = [pid for pid in pids if pid in parents_of_all()]
        if left or alive:
            raise RuntimeError(f"the stopped node left {left} and the processes {alive}")
    print("the stopped node left no process and no file in memory")
    print_result(figures)


if __name__ == "__main__":
    main()

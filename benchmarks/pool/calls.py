"""Sends requests to functions of the pool at planned times, and checks every answer."""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec

from benchmarks.allocation import run_seconds
from benchmarks.families import Family, as_tensors
from benchmarks.fault_injection import Span
from benchmarks.measure import quantile
from benchmarks.openloop import Outcome, Plan, Sender, Target, count_kinds
from benchmarks.pool.readings import Readings, read
from benchmarks.pool.serving import PoolNode
from benchmarks.thousand import deploy_variants
from benchmarks.wire import END, binary_request

PATIENCE_S = 70.0
"""Longer than any function's timeout: a request without an answer by then is lost."""
TOKENS = 16
LEAST_S = 0.002
"""The processor time of a request beside its run: what the node, the executor and the load generator take."""


class Sent(NamedTuple):
    """The outcomes of a plan, and what the devices did meanwhile."""

    outcomes: list[Outcome]
    readings: Readings
    seconds: float

    @property
    def answered_per_s(self) -> float:
        """The answers per second of the plan."""
        return count_kinds(self.outcomes)["answered"] / self.seconds

    def latency_ms(self, share: float) -> float:
        """A quantile of the latencies of answers."""
        times = [each.latency_s for each in self.outcomes if each.kind == "answered"]
        return 1e3 * quantile(times, share) if times else 0.0


def request_seconds(family: Family) -> float:
    """Return the processor time of a request: that of its run, and LEAST_S."""
    return run_seconds(family) + LEAST_S


def payload(family: Family) -> bytes:
    """Return the bytes of a request after its HTTP headers, which are the same for all variants."""
    return binary_request("any", as_tensors(family.one())).partition(END)[2]


def deployed(node: PoolNode, family: Family, count: int, **settings: Any) -> list[Target]:
    """Deploy this many functions that share no block; return how to call each."""
    targets = deploy_variants(node, family, range(count), {"device": "pool"} | settings, family.floats())
    return [targets[number] for number in range(count)]


def poisson(rates: Sequence[float], seconds: float, seed: int) -> list[tuple[float, int]]:
    """Return arrivals: of each function, this many per second."""
    random = Random(f"{seed} arrivals")
    found = []
    for number, rate in enumerate(rates):
        at = random.expovariate(rate)
        while at < seconds:
            found.append((at, number))
            at += random.expovariate(rate)
    return sorted(found)


def send(
    node: PoolNode, targets: Sequence[Target], payloads: Sequence[bytes], arrivals: list[tuple[float, int]]
) -> Sent:
    """Carry out a plan. Raises RuntimeError for a wrong or a lost answer."""
    plan = Plan(list(targets), list(payloads), arrivals, PATIENCE_S)
    with (
        tempfile.TemporaryDirectory(prefix="overwinter-bench-") as root,
        Sender(node.port, plan, Path(root)) as sender,
    ):
        began = sender.began()
        outcomes = sender.outcomes()
    for each in outcomes:
        if each.kind == "lost":
            raise RuntimeError(
                f"a request of function {each.target} is lost: {msgspec.structs.replace(each, tensors=b'')}"
            )
    readings = read(node.journal).within(Span(began, time.monotonic()))
    return Sent(outcomes, readings, arrivals[-1][0] if arrivals else 0.0)

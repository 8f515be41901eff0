"""The recorded hour `torpor-alibaba-fc`, compressed: 200 functions in ten families on four devices.

The devices hold only some of them at a time. With content sharing the variants of a family differ only in their heads,
as fine-tuned models may; without, they have the same sizes and differ in every weight, so that no block is shared. Both
get the same requests, each on a node of its own. `moved_share`: the bytes brought to devices with sharing over those
without.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.families import Family
from benchmarks.measure import occupied_bytes, quantile
from benchmarks.openloop import Target, attainment, count_kinds
from benchmarks.pool.calls import TOKENS, Sent, payload, request_seconds, send
from benchmarks.pool.serving import PoolNode, devices, pool_node, scheduling
from benchmarks.thousand import cores, deploy_variants
from benchmarks.thousand_report import slo_ms
from benchmarks.traffic import HOUR_S, Cost, compressed, hour, kept_share

MODELS = (
    "mlp",
    "textcnn",
    "dssm",
    "lstm",
    "mobilenet-v2",
    "minilm",
    "densenet169",
    "densenet201",
    "inception-v3",
    "resnet50",
)
DEVICES = 4
FUNCTIONS = 200
MEMORY_BYTES = 256 << 20
SMALL_MEMORY_BYTES = 1 << 20
LOAD = 0.3
"""The share of all cores that requests take, including what the devices compute, because they are virtual."""


class Trace:
    """The functions and their requests, the same for every node."""

    def __init__(self, models: Sequence[str], functions: int, seconds: float, traces: Path | None, seed: int) -> None:
        self.count = functions
        small = models is not MODELS
        self.families = [Family(name, tokens=TOKENS, small=small) for name in models]
        self.request_s = [request_seconds(family) for family in self.families]
        self.memory_bytes = SMALL_MEMORY_BYTES if small else MEMORY_BYTES
        arrival_times = hour(functions, traces, seed)
        speed = HOUR_S / seconds
        costs = [Cost(self.request_s[number % len(models)], 0.0) for number in range(functions)]
        rates = [speed * len(times) / HOUR_S for times in arrival_times]
        share = kept_share(rates, costs, float("inf"), LOAD * cores())
        self.arrivals = compressed(arrival_times, speed, share, seed)
        self.slo_s = [slo_ms(models[number % len(models)]) / 1e3 for number in range(functions)]
        total = sum(family.nbytes for family in self.families) * functions / len(models)
        print(
            f"\n{functions} functions in {len(models)} families have {total / 1e9:.1f} GB, {DEVICES} devices ", end=""
        )
        print(f"{DEVICES * self.memory_bytes / 1e9:.1f} GB; {len(self.arrivals)} requests in {seconds:.0f} s")
        print(f"{'blocks':10}{'in SLO':>8}{'refused':>9}{'p50 ms':>8}{'p98 ms':>8}{'runs':>7}{'swaps':>7}", end="")
        print(f"{'evicted':>9}{'unplaced':>10}{'moved MB':>10}{'host MB':>9}", flush=True)

    def serve(self, shared: bool) -> Sent:
        """Deploy all functions on a node, and send the requests."""
        pool = devices(DEVICES, self.memory_bytes)
        with pool_node(scheduling(pool)) as node:
            targets = self._deploy(node, shared)
            sent = send(node, targets, [payload(family) for family in self.families], self.arrivals)
            self._row("shared" if shared else "separate", sent, occupied_bytes(node.host_store))
        return sent

    def _deploy(self, node: PoolNode, shared: bool) -> list[Target]:
        targets: dict[int, Target] = {}
        for number, family in enumerate(self.families):
            indices: Sequence[int] = range(number, self.count, len(self.families))
            tensors = family.head() if shared else family.floats()
            made = deploy_variants(node, family, indices, {"device": "pool"}, tensors)
            family.vary(tensors, 0)
            targets |= {index: Target(each.head, number, each.digest, keep=False) for index, each in made.items()}
        return [targets[number] for number in range(self.count)]

    def _row(self, title: str, sent: Sent, host_bytes: int) -> None:
        counts, readings = count_kinds(sent.outcomes), sent.readings
        times = [1e3 * each.latency_s for each in sent.outcomes if each.kind == "answered"] or [0.0]
        print(
            f"{title:10}{attainment(sent.outcomes, self.slo_s):8.1%}{counts['refused']:9}{median(times):8.1f}", end=""
        )
        print(f"{quantile(times, 0.98):8.1f}{len(readings.runs):7}{readings.swaps:7}", end="")
        done = readings.counts
        print(f"{done['functions evicted from devices']:9}{done['runs whose blocks were not placed']:10}", end="")
        print(f"{readings.moved_bytes / 1e6:10.0f}{host_bytes / 1e6:9.0f}", flush=True)


def measure(
    seconds: float, traces: Path | None, seed: int, *, functions: int = FUNCTIONS, models: Sequence[str] = MODELS
) -> dict[str, Any]:
    """Print the table; return the figures. Other models than the usual ones are small."""
    trace = Trace(models, functions, seconds, traces, seed)
    shared, separate = trace.serve(shared=True), trace.serve(shared=False)
    return {
        "requests": len(shared.outcomes),
        "attainment": attainment(shared.outcomes, trace.slo_s),
        "attainment_separate": attainment(separate.outcomes, trace.slo_s),
        "swaps": shared.readings.swaps,
        "swaps_separate": separate.readings.swaps,
        "moved_mb": shared.readings.moved_bytes / 1e6,
        "moved_mb_separate": separate.readings.moved_bytes / 1e6,
        "moved_share": shared.readings.moved_bytes / max(1, separate.readings.moved_bytes),
    }

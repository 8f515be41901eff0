"""The live part: the savings of sharing on this machine, with real nodes and processes."""

import sys
from collections.abc import Mapping
from typing import NamedTuple

from benchmarks.families import Family
from benchmarks.tetris import latency, memory, startup
from benchmarks.tetris.latency import Latencies, measure_latency
from benchmarks.tetris.memory import Sharing, curve, plain_bytes
from benchmarks.tetris.startup import Contention, Start, measure_contention, measure_start

TOKENS = 16
"""The tokens of a text in a request."""


class Plan(NamedTuple):
    """The models, and how each is measured."""

    instances: tuple[str, ...]
    """The models measured as many instances: functions with the same blocks, each with its own worker."""
    variants: tuple[str, ...]
    """The models with many variants made by transfer learning."""
    latency: tuple[str, ...]
    contention: str
    counts: tuple[int, ...]
    at_once: tuple[int, ...]
    plain: int
    """The plain processes that run at the same time, from which more are extrapolated."""
    runs: int
    """The measurements of each start with Overwinter. Each start of a plain process is measured once."""
    answers: int
    """The answers in a distribution of latencies."""


FULL = Plan(
    instances=("bert-base", "resnet152", "textcnn"),
    variants=("inception-v3", "resnet152"),
    latency=("bert-base", "textcnn"),
    contention="resnet152",
    counts=(2, 8, 32),
    at_once=(1, 4, 16),
    plain=2,
    runs=2,
    answers=40,
)
USUAL = Plan(
    instances=("bert-base", "resnet152"),
    variants=("inception-v3",),
    latency=("bert-base",),
    contention="inception-v3",
    counts=(2, 32),
    at_once=(1, 8),
    plain=1,
    runs=2,
    answers=40,
)
QUICK = Plan(
    instances=("lstm", "textcnn"),
    variants=("inception-v3",),
    latency=("textcnn",),
    contention="inception-v3",
    counts=(2, 4),
    at_once=(1, 2),
    plain=1,
    runs=1,
    answers=10,
)


def live(plan: Plan) -> Mapping[str, object]:
    """Measure, print the tables, and return `live_saved` and `live_startup_saved` by model."""
    sharing: dict[str, Sharing] = {}
    starts: dict[str, Start] = {}
    latencies: dict[str, Latencies] = {}
    contention: dict[int, Contention] = {}
    for name in dict.fromkeys((*plan.instances, *plan.variants)):
        family = Family(name, tokens=TOKENS)
        sharing[name] = Sharing(
            plain_bytes(family, plan.plain),
            curve(family, plan.counts, varied=False) if name in plan.instances else {},
            curve(family, plan.counts, varied=True) if name in plan.variants else {},
        )
        starts[name] = measure_start(family, plan.runs)
        if name in plan.latency:
            latencies[name] = measure_latency(family, plan.answers)
        if name == plan.contention:
            contention = measure_contention(family, plan.at_once)
        print(f"  measured: {name}", file=sys.stderr)
    memory.report(sharing, plan.counts)
    startup.report(starts)
    startup.report_contention(plan.contention, contention)
    latency.report(latencies)
    most = plan.counts[-1]
    saved = {name: row.saved("instances" if row.instances else "variants", most) for name, row in sharing.items()}
    start_saved = {
        name: {"with_imports": row.saved, "of_loading": row.saved_of_loading} for name, row in starts.items()
    }
    return {"live_saved": saved, "live_startup_saved": start_saved}

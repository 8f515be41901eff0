"""Formats the results of `benchmarks.thousand`."""

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.measure import MIB, quantile
from benchmarks.openloop import Outcome, Target, attainment, count_kinds
from benchmarks.traffic import Cost

SLO_MS = {
    "mlp": 100,
    "textcnn": 100,
    "dssm": 100,
    "lstm": 300,
    "mobilenet-v2": 200,
    "minilm": 200,
    "distilbert": 300,
    "bert-base": 400,
    "densenet169": 400,
    "resnet50": 400,
}
"""The base models, and the SLO of their variants."""
OTHER_SLO_MS = 500


class Base(NamedTuple):
    """A base model, its costs, and its deployed variants by the numbers of the functions."""

    name: str
    cost: Cost
    loaded: int
    """The memory of a plain process with the model."""
    weights: int
    """The bytes of its weights alone."""
    payload: bytes
    targets: dict[int, Target]


class MemorySample(NamedTuple):
    """A sample of the node's memory in bytes, and the number of its workers."""

    total: int = 0
    anonymous: int = 0
    files: int = 0
    store: int = 0
    buffers: int = 0
    workers: int = 0


class LoadResult(NamedTuple):
    """The results of one load."""

    load: float
    outcomes: list[Outcome]
    peak: MemorySample

    @property
    def wakes(self) -> int:
        """The answers for which a worker was forked."""
        return self._started("host", "disk")

    @property
    def binds(self) -> int:
        """The answers for which a function was bound in an existing worker."""
        return self._started("bound")

    @property
    def wake_share(self) -> float:
        """The wakes as a share of all answers."""
        return self.wakes / max(1, count_kinds(self.outcomes)["answered"])

    def _started(self, *starts: str) -> int:
        return sum(each.kind == "answered" and each.start in starts for each in self.outcomes)


def slo_ms(base: str) -> int:
    """Return the SLO of the variants of a base model."""
    return SLO_MS.get(base, OTHER_SLO_MS)


def owners(bases: Sequence[Base]) -> list[int]:
    """Return the index of each function's base model."""
    owner = {number: index for index, base in enumerate(bases) for number in base.targets}
    return [owner[number] for number in range(len(owner))]


def report_models(bases: Sequence[Base], outcomes: Sequence[Outcome], slo_s: Sequence[float]) -> None:
    """Print a line for each base model, and the messages of refusals."""
    print(f"\n{'base model':14}{'functions':>10}{'SLO ms':>8}{'run ms':>8}{'wake ms':>8}{'requests':>10}", end="")
    print(f"{'refused':>9}{'lost':>6}{'woken':>7}{'bound':>7}{'p50 ms':>9}{'p99 ms':>9}{'in SLO':>8}")
    for base in bases:
        own = [each for each in outcomes if each.target in base.targets]
        counts = count_kinds(own)
        times = [1e3 * each.latency_s for each in own if each.kind == "answered"] or [0.0]
        part = LoadResult(0.0, own, MemorySample())
        print(f"{base.name:14}{len(base.targets):10}{slo_ms(base.name):8}{1e3 * base.cost.run:8.1f}", end="")
        print(f"{1e3 * base.cost.wake:8.1f}{len(own):10}{counts['refused']:9}{counts['lost']:6}", end="")
        print(f"{part.wakes:7}{part.binds:7}", end="")
        print(f"{statistics.median(times):9.1f}{quantile(times, 0.99):9.1f}{attainment(own, slo_s):8.1%}")
    for kind in ("refused", "lost"):
        refusals = Counter(
            "a wrong answer" if each.status == 200 else each.start for each in outcomes if each.kind == kind
        )
        for said, times_ in refusals.most_common(5):
            print(f"  {kind} {times_} times: {said}")


def report(bases: Sequence[Base], done: LoadResult, slo_s: Sequence[float]) -> None:
    """Print the tables of one load."""
    outcomes, peak = done.outcomes, done.peak
    report_models(bases, outcomes, slo_s)
    delay_s = quantile([each.delay_s for each in outcomes] or [0.0], 0.99)
    loaded, weights = loaded_models(bases)
    parts = ", ".join(f"{name} {getattr(peak, name) / MIB:.0f}" for name in ("anonymous", "files", "store", "buffers"))
    functions = [[each for each in outcomes if each.target == number] for number in range(len(slo_s))]
    kept = sum(attainment(own, slo_s) >= 0.98 for own in functions)
    print(f"{attainment(outcomes, slo_s):.1%} within the SLO; delay of the generator {1e3 * delay_s:.1f} ms (p99)")
    message = f"{done.wakes} needed a wake ({done.wake_share:.1%}), {done.binds} a bind"
    print(f"of {count_kinds(outcomes)['answered']} answers {message}")
    print(f"{kept} of {len(functions)} functions kept their SLO in 98 % of their requests")
    print(f"memory at its peak {peak.total / MIB:.0f} MiB ({parts} MiB) with {peak.workers} workers; loaded models")
    print(f"would hold {loaded / MIB:.0f} MiB: {loaded / peak.total:.1f} times as much; their weights alone are")
    print(f"{weights / MIB:.0f} MiB: {weights / peak.total:.1f} times as much", flush=True)


def loaded_models(bases: Sequence[Base]) -> tuple[int, int]:
    """Return the bytes of a process per function, and of all weights."""
    return (
        sum(base.loaded * len(base.targets) for base in bases),
        sum(base.weights * len(base.targets) for base in bases),
    )


def figures(bases: Sequence[Base], by_load: Sequence[LoadResult], slo_s: Sequence[float]) -> dict[str, Any]:
    """Return the figures for RESULT: of the first load, and of the others under names that end in their load; the peak
    is that of all loads.
    """
    first, *others = by_load
    loaded, weights = loaded_models(bases)
    found = {
        "requests": len(first.outcomes),
        **count_kinds(first.outcomes),
        "attainment": attainment(first.outcomes, slo_s),
        "wakes": first.wakes,
        "binds": first.binds,
        "wake_share": first.wake_share,
        "peak_mib": max(each.peak.total for each in by_load) / MIB,
        "loaded_mib": loaded / MIB,
        "weights_mib": weights / MIB,
    }
    for each in others:
        load = f"_{100 * each.load:.0f}"
        found["attainment" + load] = attainment(each.outcomes, slo_s)
        found["wake_share" + load] = each.wake_share
        found["lost" + load] = count_kinds(each.outcomes)["lost"]
    return found

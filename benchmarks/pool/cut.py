"""Compares a program in slices with the same program on a device that holds all of it.

Requests come one after another or, in the rows `often`, before the earlier ones are answered. With a device for each
slice nothing is brought again, so the difference is the time to pass tensors from slice to slice; with one device less,
some slices are brought for each request.
"""

from collections.abc import Mapping
from math import ceil

from benchmarks.families import Family
from benchmarks.pool.calls import TOKENS, deployed, payload, send
from benchmarks.pool.serving import devices, pool_node, scheduling

MODEL = "bert-base"
EVERY_S = 0.5
OFTEN_FACTOR = 8
"""Requests that do not wait for earlier ones come this many times as often."""
SLICES = 3
STEP_BYTES = 4 << 20
"""The memory of the small devices is a multiple of this; they use whole partitions of it."""


def measure(
    rounds: int = 30, model: str = MODEL, slices: int = SLICES, every_s: float = EVERY_S
) -> Mapping[str, Mapping[str, float]]:
    """Print the latency of requests and the bytes moved for each; return the figures."""
    family = Family(model, tokens=TOKENS)
    memory_bytes = 1 << int(1.1 * family.nbytes).bit_length()
    # More than an equal part each, because slices end where few bytes are live.
    small = ceil(1.4 * family.nbytes / slices / STEP_BYTES) * STEP_BYTES
    pools = {
        "whole": (devices(1, memory_bytes), every_s),
        "whole, often": (devices(1, memory_bytes), every_s / OFTEN_FACTOR),
        "cut": (devices(slices, small), every_s),
        "cut, often": (devices(slices, small), every_s / OFTEN_FACTOR),
        "one device less": (devices(slices - 1, small), every_s),
    }
    found: dict[str, dict[str, float]] = {}
    print(f"{family.nbytes >> 20} MiB of {model}, {small >> 20} MiB on each of the small devices")
    print(f"{'':16}{'runs each':>10}{'MiB moved each':>16}{'median ms':>11}{'over whole':>12}")
    for name, (pool, interval_s) in pools.items():
        with pool_node(scheduling(pool)) as node:
            targets = deployed(node, family, 1)
            # The first requests start the executors and compile.
            send(node, targets, [payload(family)], [(every_s * number, 0) for number in range(6)])
            sent = send(node, targets, [payload(family)], [(interval_s * number, 0) for number in range(rounds)])
        runs = sent.readings.runs
        figures = {
            "runs": len(runs) / rounds,
            "moved_bytes": sum(run.moved_bytes for run in runs) / rounds,
            "ms": sent.latency_ms(0.5),
        }
        figures["over_whole"] = figures["ms"] / found["whole"]["ms"] if found else 1.0
        found[name] = figures
        moved = figures["moved_bytes"] / (1 << 20)
        print(f"{name:16}{figures['runs']:10.1f}{moved:16.1f}{figures['ms']:11.2f}{figures['over_whole']:12.3f}")
    return found

"""Measures how long a full device takes to place a function's blocks, compared with its run (Torpor, figure 13).

`python -m benchmarks.allocation [model ...]` lets functions of these models share an arena that holds a part of them.
For each request the blocks of its function are placed, after the least recently used functions are evicted until they
fit. The time of that, including moves of other blocks and clearing, is compared with the time of a run. Both allocators
get the same requests by turns: the arena's partitions, and the baseline that keeps freed blocks by size (Torpor-Block).

A real device takes time for each native allocation and each native free, which the baseline cannot do without; on a
virtual device they take no time. They are counted, and `--native-us` says what one of them is assumed to take.
"""

import argparse
import gc
import json
import time
from collections.abc import Sequence
from random import Random
from statistics import median, quantiles
from typing import NamedTuple

import torch

from benchmarks.families import Family
from overwinter.core.ids import Address, TenantId
from overwinter.device.allocation import Allocator
from overwinter.device.cached import CachedAllocator
from overwinter.device.partitioned import PARTITION_BYTES, PartitionedAllocator
from overwinter.device.virtual import VirtualDevice
from overwinter.model.compile import compile_program

MODELS = ("resnet50", "resnet152", "densenet201", "inception-v3", "mobilenet-v2", "bert-base", "minilm", "gpt2")
COPIES = 6
ARENA_SHARE = 0.2
REQUESTS = 600
WARM_UP = 100
NATIVE_US = 300.0
TENANT = TenantId("benchmark")
RUNS = 5


class SizedModel(NamedTuple):
    """A model as an allocator sees it, and the time of one of its runs."""

    name: str
    blocks: dict[Address, int]
    run_s: float


class Cost(NamedTuple):
    """What one request cost."""

    model: SizedModel
    seconds: float
    native_calls: int


class Residents:
    """The functions on one device, the least recently used first."""

    def __init__(self, name: str, allocator: Allocator) -> None:
        self._allocator = allocator
        self._device = VirtualDevice(name, allocator)
        self._used: dict[str, None] = {}

    def request(self, function: str, model: SizedModel) -> Cost:
        """Place the function's blocks."""
        blocks = {Address(f"{function} {address}"): nbytes for address, nbytes in model.blocks.items()}
        calls = self._calls()
        began = time.perf_counter()
        while self._device.hold(function, TENANT, blocks) is None:
            first = next(iter(self._used))
            del self._used[first]
            self._device.evict(first)
        seconds = time.perf_counter() - began
        self._used.pop(function, None)
        self._used[function] = None
        return Cost(model, seconds, self._calls() - calls)

    def _calls(self) -> int:
        return self._allocator.native_calls if isinstance(self._allocator, CachedAllocator) else 0

    def close(self) -> None:
        self._device.close()


def measured(name: str) -> SizedModel:
    """Export a model and time its run."""
    family = Family(name)
    blocks = family.packaged(name).manifest.blocks
    return SizedModel(name, {block.address: block.nbytes for block in blocks}, run_seconds(family))


def run_seconds(family: Family) -> float:
    """Return the processor time of a run of the program in this thread: its time on an idle machine."""
    one = family.one()
    inputs = [one[spec.name] for spec in family.program.inputs]
    run, taken = compile_program(family.program), []
    with torch.inference_mode():
        for _ in range(RUNS + 1):
            began = time.thread_time()
            run(family.weights, inputs)
            taken.append(time.thread_time() - began)
    return median(taken[1:])


def compare(models: Sequence[SizedModel], copies: int, requests: int, seed: int) -> dict[str, list[Cost]]:
    """Send the same requests to both allocators, by turns."""
    functions = [(f"{model.name}-{copy}", model) for model in models for copy in range(copies)]
    total = sum(sum(model.blocks.values()) for _, model in functions)
    nbytes = -(-int(total * ARENA_SHARE) // PARTITION_BYTES) * PARTITION_BYTES
    print(f"{len(functions)} functions of {total / 1e9:.1f} GB share an arena of {nbytes / 1e9:.1f} GB")
    devices = {
        "partitions": Residents("partitions", PartitionedAllocator(nbytes)),
        "cached": Residents("cached", CachedAllocator(nbytes)),
    }
    costs: dict[str, list[Cost]] = {name: [] for name in devices}
    random = Random(seed)
    gc.disable()
    for number in range(WARM_UP + requests):
        function, model = random.choice(functions)
        for name, device in devices.items():
            cost = device.request(function, model)
            if number >= WARM_UP:
                costs[name].append(cost)
    gc.enable()
    for device in devices.values():
        device.close()
    return costs


def shares(costs: Sequence[Cost], native_s: float) -> list[float]:
    """Return the time to place each request's blocks, divided by the time of its run."""
    return [(cost.seconds + cost.native_calls * native_s) / cost.model.run_s for cost in costs]


def measure(
    models: Sequence[str], requests: int, *, copies: int = COPIES, native_us: float = NATIVE_US, seed: int = 0
) -> dict[str, dict[str, float]]:
    """Print the tables; return the figures."""
    costs = compare([measured(name) for name in models], copies, requests, seed)
    rows = {
        "partitions": shares(costs["partitions"], 0.0),
        "cached, native calls free": shares(costs["cached"], 0.0),
        f"cached, native calls of {native_us:g} us": shares(costs["cached"], native_us / 1e6),
    }
    print(
        f"\ntime to place blocks over that of a run\n{'allocator':36}{'median':>10}{'p90':>10}{'p99':>10}{'most':>10}"
    )
    for name, row in rows.items():
        cuts = quantiles(row, n=100)
        print(f"{name:36}{median(row):10.3f}{cuts[89]:10.3f}{cuts[98]:10.3f}{max(row):10.3f}")
    calls = [cost.native_calls for cost in costs["cached"]]
    print(f"\nnative calls of a request to the cached allocator: {sum(calls) / len(calls):.1f}, at most {max(calls)}")
    names = ("partitions", "cached", "cached_native")
    return {
        "allocation_over_run": {
            name: round(quantiles(row, n=100)[98], 4) for name, row in zip(names, rows.values(), strict=True)
        }
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="model", default=MODELS)
    parser.add_argument("--copies", type=int, default=COPIES, help="functions of each model, which share no blocks")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="requests that are measured")
    parser.add_argument("--native-us", type=float, default=NATIVE_US, help="microseconds of a native call")
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests")
    options = parser.parse_args()
    torch.set_num_threads(1)
    made = {"copies": options.copies, "native_us": options.native_us, "seed": options.seed}
    print("RESULT " + json.dumps(measure(options.models, options.requests, **made)))


if __name__ == "__main__":
    main()

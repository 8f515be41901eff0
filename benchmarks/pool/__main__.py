"""Measures the pool of devices, on real nodes over HTTP and on virtual devices.

`python -m benchmarks.pool [--only PART] [--traces DIR] [--soak SECONDS] [--quick]` has nine parts: the time that an
executor adds to a run (`dispatch`), the start of an executor until its first answer (`executor-start`), throughput
over early binding as rates fall (`throughput`), the load of several devices under skewed rates (`balance`), the time to
give places to blocks (`allocation`), swaps that share a switch or come from another device (`links`), a program in
slices compared with the whole program (`cut`), a recorded hour with and without content sharing (`trace`), and the
simulator compared with null devices (`simulated`). `--soak` instead runs functions of the pool under faults and changes
for this long.

The devices compute on the CPU, so their number does not add computing power, and the loads are chosen for two cores.
Every answer over HTTP is compared with plain PyTorch's, bit for bit, except those of null devices; `dispatch` and
`executor-start` compare the outputs of their own runs with each other.
"""

import argparse
import gc
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks import allocation
from benchmarks.measure import print_result
from benchmarks.pool import balance, cut, dispatch, executor_start, links, simulated, throughput, trace
from benchmarks.pool.soak import soak
from overwinter.core.devices import DeviceIsolation
from overwinter.device.partitioned import PARTITION_BYTES

PARTS = ("dispatch", "executor-start", "throughput", "balance", "allocation", "links", "cut", "trace", "simulated")
SMALL_MODELS = ("mlp", "lstm")


def run_part(part: str, options: argparse.Namespace) -> Mapping[str, Any]:
    """Measure one part; return its figures."""
    quick, seed = options.quick, options.seed
    seconds = options.seconds if options.seconds is not None else 3.0 if quick else 30.0
    if part == "dispatch":
        return dispatch.measure(100 if quick else options.rounds)
    if part == "executor-start":
        small = {"rounds": 1, "models": SMALL_MODELS, "small": True} if quick else {}
        return {"executor_start": executor_start.measure(**small)}
    if part == "throughput":
        small = {"model": "mlp", "memory_bytes": PARTITION_BYTES, "most": 12} if quick else {}
        return {"throughput_over_native": throughput.measure(seconds, seed, **small)}
    if part == "balance":
        small = {"model": "mlp", "functions": 6, "count": 2} if quick else {}
        variances = balance.measure(seconds, seed, **small)
        return {"load_variance": variances["missing-bytes"], "load_variances": variances}
    if part == "allocation":
        names = SMALL_MODELS if quick else allocation.MODELS
        return allocation.measure(names, 100 if quick else allocation.REQUESTS, seed=seed)
    if part == "links":
        small = {"model": "mlp", "burst": 16, "every_s": 0.4} if quick else {}
        return {"swap_over_alone": links.measure(2 if quick else 12, **small)}
    if part == "simulated":
        small = {"model": "mlp", "functions": 6, "memory_bytes": PARTITION_BYTES} if quick else {}
        return {"live_over_simulated": simulated.measure(seconds, seed, **small)}
    if part == "cut":
        return {"cut": cut.measure(**({"rounds": 3, "model": "mlp", "slices": 2, "every_s": 0.1} if quick else {}))}
    small = {"functions": 6, "models": SMALL_MODELS} if quick else {}
    return {"trace": trace.measure(seconds if quick else 4 * seconds, options.traces, seed, **small)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", choices=PARTS, action="append", help="measure only this part; repeatable; default all"
    )
    parser.add_argument(
        "--traces", type=Path, help="the directory that contains torpor-alibaba-fc; by default requests are generated"
    )
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="run the soak for this long instead")
    parser.add_argument(
        "--isolation", choices=get_args(DeviceIsolation), default="tenant", help="isolation of devices in the soak"
    )
    parser.add_argument("--functions", type=int, default=64, help="number of functions in the soak; default 64")
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second in the soak; default 10")
    parser.add_argument(
        "--seconds", type=float, help="seconds of each row of a table; of the trace four times as many; default 30"
    )
    parser.add_argument("--rounds", type=int, default=dispatch.ROUNDS, help="runs of the part dispatch")
    parser.add_argument("--quick", action="store_true", help="small models and few requests")
    parser.add_argument("--seed", type=int, default=1, help="seed of the requests and faults; default 1")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # Exit as an interrupt does, so that nodes are stopped and directories removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if options.soak is not None:
        kind: dict[str, Any] = {"small": options.quick, "isolation": options.isolation, "seed": options.seed}
        print_result(soak(options.soak, functions=options.functions, rate=options.rate, **kind))
        return
    gc.freeze()
    figures: dict[str, Any] = {}
    for part in options.only or PARTS:
        print(f"== {part}", flush=True)
        figures |= run_part(part, options)
    print_result(figures)


if __name__ == "__main__":
    main()

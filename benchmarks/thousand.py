"""Serves a thousand functions on one node, and measures latency, SLO attainment and memory.

`python -m benchmarks.thousand [--functions N] [--minutes M] [--traces DIR] [--load SHARE] [--memory-gib G] [MODEL ...]`
deploys variants of a few base models of the zoo at full size, each with its own head and an SLO, and otherwise default
settings. The node is restarted after the deploys, so that no function has a worker.

The requests of one hour, recorded (`torpor-alibaba-fc` in DIR) or generated, are compressed into minutes. The benchmark
first measures the cost of a run and of a wake of each model, and keeps as many requests as give the wanted load of the
cores by their runs. Wakes count towards the load only if `--keep-alive` sets the same keep-alive for all functions;
binds never do. Requests are sent open-loop over HTTP, and each answer is compared with plain PyTorch's, bit for bit.

The control is a second node that gets the same requests with `isolation = "function"`, where no two functions share a
worker. Idle workers stay while there is memory for them, so memory is part of the result: the node gives workers half
of G GiB, as it would on a machine with that much available.

Memory is sampled: anonymous and file PSS of daemon, zygotes and workers, the pages of the host store, and the tensor
buffers. For comparison: the anonymous PSS of one plain process with `torch.load` per function, measured once for each
base model and multiplied, without libraries; and, as a control, only the weights of all functions, as in a single
process that has loaded every model.
"""

import argparse
import hashlib
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from benchmarks.families import Family, as_tensors
from benchmarks.measure import (
    cpu_seconds,
    machine_seconds,
    memory,
    memory_file_bytes,
    occupied_bytes,
    print_result,
)
from benchmarks.nodes import Node, running_node
from benchmarks.openloop import Outcome, Plan, Sender, Target
from benchmarks.plain import PlainProcesses, save
from benchmarks.thousand_report import SLO_MS, Base, LoadResult, MemorySample, figures, owners, report, slo_ms
from benchmarks.traffic import HOUR_S, Cost, busy_cores, compressed, hour, kept_share
from benchmarks.wire import END, Connection, binary_request
from overwinter.node.limits import MEMORY_SHARE

TOKENS = 16
"""The tokens of a text in a request."""
PROBE_S = 1.0
PROBES_MIN = 10
"""The runs and wakes of each model from which their costs are computed: at least this many, for at least this long."""
SAMPLED_EVERY_S = 30.0
"""Reading the PSS of all workers takes a core for seconds."""
PATIENCE_S = 70.0
"""Longer than any function's timeout: a request without an answer by then is lost."""
GIB = 1 << 30
ISOLATIONS = ("family", "function")
LOADS = (0.55, 0.75)


def sample(node: Node) -> MemorySample:
    """Return what the node holds now."""
    pids = node.pids()
    held = memory(pids)
    store, buffers = occupied_bytes(node.host_store), memory_file_bytes(pids[0])
    total = held.anonymous + held.files + store + buffers
    return MemorySample(total, held.anonymous, held.files, store, buffers, len(node.worker_pids()))


def probe(node: Node, family: Family) -> Cost:
    """Return the core-seconds of a run and of a wake, of the node and its client."""
    request = binary_request("probe", as_tensors(family.one()))
    spent = {}
    for kind, keep_alive_s in (("wake", 0.0), ("run", 600.0)):
        family.deploy(node.client, "probe", keep_alive_s=keep_alive_s)
        with Connection(node.port) as connection:
            connection.ask(request)
        node.wait_prepared()
        # Use a new connection: the node may have closed idle ones by now.
        with Connection(node.port) as connection:
            before, until = _spent(node), time.perf_counter() + PROBE_S
            count = 0
            while count < PROBES_MIN or time.perf_counter() < until:
                connection.ask(request)
                count += 1
                if not keep_alive_s:
                    node.wait_workers("probe", 0)
            spent[kind] = (_spent(node) - before) / count
        node.client.remove("probe")
    return Cost(spent["run"], max(0.0, spent["wake"] - spent["run"]))


def _spent(node: Node) -> float:
    return cpu_seconds(node.pids()) + time.process_time()


def loaded_bytes(family: Family, root: Path) -> int:
    """Return the anonymous PSS of a plain process that has loaded the model and answered."""
    path, inputs = root / family.name, root / f"{family.name}-inputs.safetensors"
    save(family.state(), path)
    save_file(family.one(), inputs)
    with PlainProcesses(family.name, "torch.load", [path], inputs) as processes:
        held = memory(processes.pids).anonymous
    for file in root.glob(f"{family.name}*"):
        file.unlink()
    return held


def deploy_variants(
    node: Node,
    family: Family,
    indices: Sequence[int],
    settings: Mapping[str, Any],
    tensors: Sequence[str] | None = None,
) -> dict[int, Target]:
    """Deploy the variants of one model, in which these tensors differ, by default the head; return how to call each,
    and print the times.
    """
    targets = {}
    spent: Counter[str] = Counter()
    for variant, index in enumerate(indices, 1):
        name = f"{family.name}-{index:04}"
        marks = [time.perf_counter()]
        family.vary(family.head() if tensors is None else tensors, variant)
        marks.append(time.perf_counter())
        package = family.packaged(name, slo_ms=slo_ms(family.name), **settings)
        marks.append(time.perf_counter())
        package.upload(node.client)
        marks.append(time.perf_counter())
        answer = family.answer()
        marks.append(time.perf_counter())
        for part, begin, end in zip(("vary", "pack", "send and try", "check"), marks, marks[1:], strict=False):
            spent[part] += end - begin
        head = binary_request(name, as_tensors(family.one())).partition(END)[0] + END
        targets[index] = Target(head, 0, hashlib.sha256(answer).digest())
    message = ", ".join(f"{part} {1e3 * seconds / len(indices):.0f}" for part, seconds in spent.items())
    print(f"  {family.name}: {len(indices)} deployed, ms each: {message}", file=sys.stderr)
    return targets


def deploy_all(
    node: Node, models: Sequence[str], count: int, settings: Mapping[str, Any], measured: Sequence[Base]
) -> list[Base]:
    """Deploy one base model after the other, and measure each unless that was done before. Function n is a variant of
    model n modulo the number of models.
    """
    bases = []
    for number, name in enumerate(models):
        family = Family(name, tokens=TOKENS)
        if measured:
            base = measured[number]
        else:
            payload = binary_request(name, as_tensors(family.one())).partition(END)[2]
            with tempfile.TemporaryDirectory(prefix="overwinter-bench-") as root:
                loaded = loaded_bytes(family, Path(root))
            base = Base(name, probe(node, family), loaded, family.nbytes, payload, {})
        targets = deploy_variants(node, family, range(number, count, len(models)), settings)
        bases.append(base._replace(targets=targets))
    return bases


def send(node: Node, plan: Plan) -> tuple[list[Outcome], MemorySample]:
    """Carry out the plan; return the outcomes and the peak, and print how busy the cores were."""
    peak = sample(node)
    with tempfile.TemporaryDirectory(prefix="overwinter-bench-") as root:
        began, spent, machine = time.perf_counter(), cpu_seconds(node.pids()), machine_seconds()
        with Sender(node.port, plan, Path(root)) as sender:
            while sender.process.poll() is None:
                try:
                    sender.process.wait(SAMPLED_EVERY_S)
                except subprocess.TimeoutExpired:
                    peak = max(peak, sample(node))
            peak = max(peak, sample(node))
            outcomes = sender.outcomes()
        core_seconds = (time.perf_counter() - began) * cores()
        used = cpu_seconds(node.pids()) - spent
        rest = machine_seconds() - machine - used
        print(f"of {cores()} cores the node used {used / core_seconds:.0%}, other processes {rest / core_seconds:.0%}")
        return outcomes, peak


def cores() -> int:
    """Return the cores that this process, and so the node, may use."""
    return len(os.sched_getaffinity(0))


class RequestPlans:
    """The requests of each load, the same for every node."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._arrival_times = hour(options.functions, options.traces, options.seed)

    def plan(self, bases: Sequence[Base], load: float) -> Plan:
        """Return the requests that keep the cores busy for this share of the time, or all if they need less."""
        options, arrival_times = self._options, self._arrival_times
        owner = owners(bases)
        speed = HOUR_S / (60 * options.minutes)
        rates = [speed * len(times) / HOUR_S for times in arrival_times]
        costs = [bases[index].cost for index in owner]
        keep_alive_s = math.inf if options.keep_alive is None else options.keep_alive
        share = kept_share(rates, costs, keep_alive_s, load * cores())
        kept = compressed(arrival_times, speed, share, options.seed)
        total = sum(map(len, arrival_times))
        print(f"\nan hour has {total} requests; {speed:.0f} times faster, 1 of {1 / share:.1f} kept, {len(kept)} sent,")
        print(f"{len(kept) / options.minutes / 60:.1f}/s, {share * speed:.2f} of the hour's own rate: these need")
        needed = busy_cores([share * rate for rate in rates], costs, keep_alive_s) / cores()
        print(f"{needed:.0%} of {cores()} cores", flush=True)
        targets = [
            msgspec.structs.replace(bases[index].targets[number], payload=index) for number, index in enumerate(owner)
        ]
        return Plan(targets, [base.payload for base in bases], kept, PATIENCE_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(SLO_MS), metavar="model", help="models of the zoo")
    parser.add_argument("--functions", type=int, default=1000, help="number of functions; default 1000")
    parser.add_argument(
        "--minutes", type=float, default=2.0, help="minutes into which the hour is compressed; default 2"
    )
    parser.add_argument(
        "--traces", type=Path, help="the directory that contains torpor-alibaba-fc; by default requests are generated"
    )
    parser.add_argument(
        "--load",
        type=float,
        action="append",
        help="share of all cores that the requests need; repeatable; default 0.55, then 0.75",
    )
    parser.add_argument("--memory-gib", type=float, default=8.0, help="memory available to the node; default 8")
    parser.add_argument(
        "--keep-alive", type=float, help="keep-alive of every function in seconds; by default that of the settings"
    )
    parser.add_argument(
        "--isolation",
        nargs="+",
        choices=ISOLATIONS,
        default=ISOLATIONS,
        help="isolation of every function; by default a node with each",
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the requests; default 1")
    options = parser.parse_args()
    torch.set_num_threads(1)
    traffic = RequestPlans(options)
    bases: list[Base] = []
    results = {}
    for isolation in options.isolation or ISOLATIONS:
        print(f'\n== isolation = "{isolation}"')
        settings = {"isolation": isolation} | (
            {} if options.keep_alive is None else {"keep_alive_s": options.keep_alive}
        )
        with running_node("--keep-warm", "--memory-bytes", str(int(MEMORY_SHARE * options.memory_gib * GIB))) as node:
            began = time.perf_counter()
            bases = deploy_all(node, options.models, options.functions, settings, bases)
            print(f"{options.functions} functions measured and deployed in {time.perf_counter() - began:.0f} s")
            # Restart the node: otherwise the workers of the trials would answer first.
            node.stop()
            node.start()
            slo_s = [slo_ms(bases[index].name) / 1e3 for index in owners(bases)]
            by_load = []
            for load in options.load or LOADS:
                by_load.append(LoadResult(load, *send(node, traffic.plan(bases, load))))
                report(bases, by_load[-1], slo_s)
        results[isolation] = figures(bases, by_load, slo_s)
    first, *others = results
    print_result(results[first] | {f"isolation_{each}": results[each] for each in others})


if __name__ == "__main__":
    main()

"""Can one node serve a thousand functions, and with how much memory?

`python -m benchmarks.thousand [--functions N] [--minutes M] [--traces DIR] [--load SHARE] [model ...]`:
functions are variants of a few base models of the zoo, full size, each with a head of its own and an SLO. An hour of
requests, recorded (`torpor-alibaba-fc` in DIR) or made, is pressed into minutes. The machine's cores bound what it can
do: what a run and a wake of each model cost is measured first, and of the requests so many are kept that the cores are
busy for the wished share of the time. They are sent over HTTP whether or not earlier ones are answered, and each answer
is compared with plain PyTorch's, bit for bit.

Memory is sampled: anonymous and file PSS of daemon, zygotes and bodies, the pages of the host store, and the memory
files through which tensors pass. Beside it stands what as many loaded models would hold: the anonymous PSS of a plain
process with `torch.load` for each, one measured for each base model and multiplied, libraries left out; and, the
control, the weights of all functions alone, as one process would hold them that has loaded every model.
"""

import argparse
import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from safetensors.torch import save_file

from benchmarks.families import Family, as_tensors
from benchmarks.measure import (
    MIB,
    cpu_seconds,
    machine_seconds,
    memory,
    memory_file_bytes,
    occupied_bytes,
    print_result,
    quantile,
)
from benchmarks.nodes import Node, running_node
from benchmarks.openloop import Outcome, Plan, Sender, Target, attainment, fates
from benchmarks.plain import Crowd, save
from benchmarks.traffic import HOUR_S, Cost, compressed, hour, kept_share
from benchmarks.wire import END, Connection, binary_request

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
"""The base models, and the latency promised for their variants."""
OTHER_SLO_MS = 500
TOKENS = 16
"""Of a text in a request."""
PROBE_S = 1.0
PROBES_MIN = 10
"""Runs and wakes of each model from which their costs are taken: so many at least, for so long."""
SAMPLED_EVERY_S = 30.0
"""To ask the kernel for the PSS of all bodies takes a core for seconds."""
PATIENCE_S = 70.0
"""Longer than any function may take: whoever has no answer then never gets one."""


class Base(NamedTuple):
    """A base model, what it costs, and its deployed variants by the numbers of the functions."""

    name: str
    cost: Cost
    loaded: int
    """Bytes of a plain process that holds it."""
    weights: int
    """Bytes of its weights alone."""
    payload: bytes
    targets: dict[int, Target]


class Peak(NamedTuple):
    """The sample with the most memory, in bytes."""

    total: int = 0
    anonymous: int = 0
    files: int = 0
    store: int = 0
    trays: int = 0
    bodies: int = 0


def slo_ms(base: str) -> int:
    """The latency promised for the variants of a base model."""
    return SLO_MS.get(base, OTHER_SLO_MS)


def sample(node: Node) -> Peak:
    """What the node holds now."""
    pids = node.pids()
    held = memory(pids)
    store, trays = occupied_bytes(node.host_store), memory_file_bytes(pids[0])
    total = held.anonymous + held.files + store + trays
    return Peak(total, held.anonymous, held.files, store, trays, max(0, len(pids) - 3))


def probe(node: Node, family: Family) -> Cost:
    """What a run and a wake cost the node and who asks it, in core-seconds."""
    request = binary_request("probe", as_tensors(family.one()))
    spent = {}
    for kind, keep_alive_s in (("wake", 0.0), ("run", 600.0)):
        family.deploy(node.client, "probe", keep_alive_s=keep_alive_s)
        with Connection(node.port) as connection:
            connection.ask(request)
            node.wait_quiet()
            before, until = _spent(node), time.perf_counter() + PROBE_S
            count = 0
            while count < PROBES_MIN or time.perf_counter() < until:
                connection.ask(request)
                count += 1
                if not keep_alive_s:
                    node.wait_bodies("probe", 0)
            spent[kind] = (_spent(node) - before) / count
        node.client.remove("probe")
    return Cost(spent["run"], max(0.0, spent["wake"] - spent["run"]))


def _spent(node: Node) -> float:
    return cpu_seconds(node.pids()) + time.process_time()


def loaded_bytes(family: Family, root: Path) -> int:
    """Anonymous PSS of a plain process that has loaded the model and answered."""
    place, inputs = root / family.name, root / f"{family.name}-inputs.safetensors"
    save(family.state(), place)
    save_file(family.one(), inputs)
    with Crowd(family.name, "torch.load", [place], inputs) as crowd:
        held = memory(crowd.pids).anonymous
    for file in root.glob(f"{family.name}*"):
        file.unlink()
    return held


def deploy_variants(node: Node, family: Family, indices: Sequence[int], keep_alive_s: float) -> dict[int, Target]:
    """Deploy the variants of one model, and say how to ask each; prints where the time went."""
    targets = {}
    spent: Counter[str] = Counter()
    for variant, index in enumerate(indices, 1):
        name = f"{family.name}-{index:04}"
        marks = [time.perf_counter()]
        family.vary(family.head(), variant)
        marks.append(time.perf_counter())
        package = family.packaged(name, slo_ms=slo_ms(family.name), keep_alive_s=keep_alive_s)
        marks.append(time.perf_counter())
        package.upload(node.client)
        marks.append(time.perf_counter())
        answer = family.answer()
        marks.append(time.perf_counter())
        for part, begin, end in zip(("vary", "pack", "send and try", "check"), marks, marks[1:], strict=False):
            spent[part] += end - begin
        head = binary_request(name, as_tensors(family.one())).partition(END)[0] + END
        targets[index] = Target(head, 0, hashlib.sha256(answer).digest())
    told = ", ".join(f"{part} {1e3 * seconds / len(indices):.0f}" for part, seconds in spent.items())
    print(f"  {family.name}: {len(indices)} deployed, ms each: {told}", file=sys.stderr)
    return targets


def deploy_all(node: Node, models: Sequence[str], count: int, keep_alive_s: float) -> list[Base]:
    """Measure and deploy, one base model after the other; the function with number n is of the model n modulo all."""
    bases = []
    for number, name in enumerate(models):
        family = Family(name, tokens=TOKENS)
        payload = binary_request(name, as_tensors(family.one())).partition(END)[2]
        with tempfile.TemporaryDirectory(prefix="overwinter-bench-") as root:
            loaded = loaded_bytes(family, Path(root))
        cost = probe(node, family)
        targets = deploy_variants(node, family, range(number, count, len(models)), keep_alive_s)
        bases.append(Base(name, cost, loaded, family.nbytes, payload, targets))
    return bases


def send(node: Node, plan: Plan) -> tuple[list[Outcome], Peak]:
    """Carry out the plan; what became of the requests, and the peak. Prints how busy the cores were."""
    peak = sample(node)
    with tempfile.TemporaryDirectory(prefix="overwinter-bench-") as root:
        began, spent, machine = time.perf_counter(), cpu_seconds(node.pids()), machine_seconds()
        with Sender(node.port, plan, Path(root)) as sender:
            while sender.process.poll() is None:
                try:
                    sender.process.wait(SAMPLED_EVERY_S)
                except subprocess.TimeoutExpired:
                    peak = max(peak, sample(node))
            outcomes = sender.outcomes()
        core_seconds = (time.perf_counter() - began) * cores()
        used = cpu_seconds(node.pids()) - spent
        rest = machine_seconds() - machine - used
        print(f"of {cores()} cores the node used {used / core_seconds:.0%}, all others {rest / core_seconds:.0%}")
        return outcomes, peak


def cores() -> int:
    """Cores that this process, and so the node, may use."""
    return len(os.sched_getaffinity(0))


def report_models(bases: Sequence[Base], outcomes: Sequence[Outcome], slo_s: Sequence[float]) -> None:
    """A line for each base model, and what was said in refusals."""
    print(f"\n{'base model':14}{'functions':>10}{'SLO ms':>8}{'run ms':>8}{'wake ms':>8}{'requests':>10}", end="")
    print(f"{'refused':>9}{'lost':>6}{'woken':>7}{'p50 ms':>9}{'p99 ms':>9}{'in SLO':>8}")
    for base in bases:
        own = [each for each in outcomes if each.target in base.targets]
        counts = fates(own)
        times = [1e3 * each.latency_s for each in own if each.fate == "answered"] or [0.0]
        woken = sum(each.fate == "answered" and each.start != "warm" for each in own)
        print(f"{base.name:14}{len(base.targets):10}{slo_ms(base.name):8}{1e3 * base.cost.run:8.1f}", end="")
        print(f"{1e3 * base.cost.wake:8.1f}{len(own):10}{counts['refused']:9}{counts['lost']:6}{woken:7}", end="")
        print(f"{statistics.median(times):9.1f}{quantile(times, 0.99):9.1f}{attainment(own, slo_s):8.1%}")
    for said, times_ in Counter(each.start for each in outcomes if each.fate == "refused").most_common(5):
        print(f"  refused {times_} times: {said}")


def report(bases: Sequence[Base], outcomes: Sequence[Outcome], peak: Peak, slo_s: Sequence[float]) -> None:
    """The tables, and the line for programs."""
    report_models(bases, outcomes, slo_s)
    counts = fates(outcomes)
    woken = sum(each.fate == "answered" and each.start != "warm" for each in outcomes)
    late = quantile([each.late_s for each in outcomes] or [0.0], 0.99)
    loaded = sum(base.loaded * len(base.targets) for base in bases)
    parts = ", ".join(f"{name} {getattr(peak, name) / MIB:.0f}" for name in ("anonymous", "files", "store", "trays"))
    functions = [[each for each in outcomes if each.target == number] for number in range(len(slo_s))]
    kept = sum(attainment(own, slo_s) >= 0.98 for own in functions)
    print(f"{woken} of {counts['answered']} answers needed a wake; the generator was late by {1e3 * late:.1f} ms (p99)")
    print(f"{kept} of {len(functions)} functions kept their SLO in 98 % of their requests")
    print(f"memory at its peak {peak.total / MIB:.0f} MiB ({parts} MiB) with {peak.bodies} bodies; loaded models")
    weights = sum(base.weights * len(base.targets) for base in bases)
    print(f"would hold {loaded / MIB:.0f} MiB: {loaded / peak.total:.1f} times as much; their weights alone are")
    print(f"{weights / MIB:.0f} MiB: {weights / peak.total:.1f} times as much")
    print_result(
        {
            "requests": len(outcomes),
            **counts,
            "attainment": attainment(outcomes, slo_s),
            "wakes": woken,
            "peak_mib": peak.total / MIB,
            "loaded_mib": loaded / MIB,
            "weights_mib": weights / MIB,
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(SLO_MS), metavar="model", help="models of the zoo")
    parser.add_argument("--functions", type=int, default=1000, help="default 1000")
    parser.add_argument("--minutes", type=float, default=2.0, help="into which the hour is pressed; default 2")
    parser.add_argument("--traces", type=Path, help="the directory in which torpor-alibaba-fc lies; else made requests")
    parser.add_argument("--load", type=float, default=0.55, help="share of all cores to ask for; default 0.55")
    parser.add_argument("--keep-alive", type=float, default=10.0, help="of every function, in seconds; default 10")
    parser.add_argument("--seed", type=int, default=1, help="of requests; default 1")
    options = parser.parse_args()
    torch.set_num_threads(1)
    hours = hour(options.functions, options.traces, options.seed)
    with running_node() as node:
        began = time.perf_counter()
        bases = deploy_all(node, options.models, options.functions, options.keep_alive)
        print(f"{options.functions} functions measured and deployed in {time.perf_counter() - began:.0f} s")
        owner = {number: place for place, base in enumerate(bases) for number in base.targets}
        speed = HOUR_S / (60 * options.minutes)
        rates = [speed * len(times) / HOUR_S for times in hours]
        costs = [bases[owner[number]].cost for number in range(options.functions)]
        share = kept_share(rates, costs, options.keep_alive, options.load * cores())
        targets = [
            msgspec.structs.replace(bases[owner[number]].targets[number], payload=owner[number])
            for number in range(options.functions)
        ]
        kept = compressed(hours, speed, share, options.seed)
        total = sum(map(len, hours))
        print(
            f"an hour has {total} requests; {speed:.0f} times faster and 1 of {1 / share:.1f} kept, {len(kept)} come,"
        )
        print(f"{len(kept) / options.minutes / 60:.1f}/s, {share * speed:.2f} of the hour's own rate: so many ask for")
        print(f"{options.load:.0%} of {cores()} cores", flush=True)
        plan = Plan(targets, [base.payload for base in bases], kept, PATIENCE_S)
        outcomes, peak = send(node, plan)
    report(bases, outcomes, peak, [slo_ms(bases[owner[number]].name) / 1e3 for number in range(options.functions)])


if __name__ == "__main__":
    main()

"""Measures the memory of many workers, and the bytes that a fine-tuned variant adds.

`python -m benchmarks.density [--workers N] [--variants N] [--plain N] [model ...]` compares three systems. All workers
are alive at the same time; each has answered a request and is idle.

* Overwinter: anonymous PSS of the daemon, its zygotes and its workers, the pages of the host store once, and the shared
  memory of the tensor buffers.
* Plain processes: anonymous PSS, plus the bytes of each distinct weights file that they map (`mmap=True`), once. Only a
  few run at the same time; their memory is multiplied.
* Forked processes (the control): plain processes that are all forked from one process, as in a pre-forking server. The
  parent has imported PyTorch and, if all have the same weights, loaded the model. The difference between this and
  Overwinter is what sharing blocks saves beyond fork.

Pages of shared libraries are not counted, because every process on the machine shares them. The 32 variants have
different retrained heads: as plain processes with one weights file each, and as 32 functions of one node with one
worker each. A node starts a further worker of a function only while a core is free. So the node with all workers of one
function is configured with as many cores as workers.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.families import Family, as_tensors
from benchmarks.measure import MIB, buffer_bytes, cpu_ticks, memory, occupied_bytes, print_result, settled
from benchmarks.nodes import Node, running_node
from benchmarks.plain import ForkedProcesses, PlainProcesses, save
from benchmarks.variants import measure_variants
from benchmarks.wire import Connection, binary_request
from overwinter.worker.inbox import IDLE_MS

MODELS = ("bert-base", "vgg19")
VARIANTS_OF = "resnet50"
IDLE_S = IDLE_MS / 1000 + 1.0
ROUNDS_MAX = 10
"""The most rounds of requests until every worker exists and has answered."""
COMPARED = ("torch.load one", "mmap one", "forked one", "mmap variants", "forked variants")
"""The rows that RESULT compares with Overwinter's; those of forked processes are the controls."""
Row = dict[str, float]


def idle() -> None:
    """Wait until a worker returns its heap to the system."""
    time.sleep(IDLE_S)


def node_bytes(node: Node) -> Row:
    """Return what the node holds when it is idle."""
    settled(lambda: memory(node.pids()).anonymous, idle)
    pids = node.pids()
    parts = {
        "anonymous": memory(pids).anonymous,
        "weights": occupied_bytes(node.host_store),
        "buffers": buffer_bytes(pids),
    }
    return {**parts, "total": sum(parts.values()), "workers": len(node.worker_pids())}


def ask_at_once(node: Node, requests: list[bytes], answers: list[bytes]) -> None:
    """Send all requests at the same time over separate connections; raise RuntimeError if an answer is wrong."""

    def ask(request: bytes) -> bytes:
        with Connection(node.port) as connection:
            return connection.ask(request).tensors

    with ThreadPoolExecutor(len(requests)) as threads:
        given = list(threads.map(ask, requests))
    if given != answers:
        raise RuntimeError("an answer differs from plain PyTorch's")


def fill_node(node: Node, name: str, request: bytes, answer: bytes, workers: int) -> None:
    """Let a function get this many workers, each of which has answered."""
    for _ in range(ROUNDS_MAX):
        if len(node.worker_pids()) == workers:
            break
        ask_at_once(node, [request] * 2 * workers, [answer] * 2 * workers)
    node.wait_workers(name, workers)
    before = {pid: cpu_ticks(pid) for pid in node.worker_pids()}
    for _ in range(ROUNDS_MAX):
        ask_at_once(node, [request] * workers, [answer] * workers)
        if all(cpu_ticks(pid) > ticks for pid, ticks in before.items()):
            return
    raise RuntimeError(f"not every worker of {name} has answered")


def one_function(family: Family, workers: int) -> dict[str, Row]:
    """Measure a node with 1 and with `workers` workers of one function."""
    request, answer = binary_request("it", as_tensors(family.one())), family.answer()
    with running_node("--cores", str(workers)) as node:
        family.deploy(node.client, "it", keep_alive_s=600, max_workers=workers)
        ask_at_once(node, [request], [answer])
        node.wait_workers("it", 1)
        node.wait_quiet()
        first = node_bytes(node)
        fill_node(node, "it", request, answer, workers)
        return {"one": first, "many": node_bytes(node)}


def many_functions(family: Family, count: int) -> Row:
    """Measure a node with `count` variants of one model and a worker of each."""
    with running_node() as node:
        requests, answers = [], []
        for variant in range(1, count + 1):
            family.vary(family.head(), variant)
            family.deploy(node.client, f"v{variant}", keep_alive_s=600, isolation="function")
            requests.append(binary_request(f"v{variant}", as_tensors(family.one())))
            answers.append(family.answer())
        ask_at_once(node, requests, answers)
        row = node_bytes(node)
    if row["workers"] != count:
        raise RuntimeError(f"{row['workers']} workers are alive, not {count}")
    return row


def plain_bytes(family: Family, loader: str, weights: list[Path], inputs: Path) -> Row:
    """Measure plain processes, one for each of `weights`, which may repeat a file; return the mean anonymous
    memory of a process, and the mean bytes of a file that is mapped.
    """
    with PlainProcesses(family.name, loader, weights, inputs) as processes:
        settled(lambda: memory(processes.pids).anonymous, idle)
        anonymous = memory(processes.pids).anonymous
        if len(set(processes.digests)) != len(set(weights)):
            raise RuntimeError(f"plain processes of {family.name} answer wrongly: {processes.digests}")
    files = 0 if loader == "torch.load" else sum(place.with_suffix(".pt").stat().st_size for place in set(weights))
    return {"anonymous": anonymous / len(weights), "weights": files / len(set(weights))}


def forked_bytes(family: Family, weights: list[Path], inputs: Path) -> Row:
    """Measure processes forked from one, one for each of `weights`."""
    with ForkedProcesses(family.name, weights, inputs) as forks:
        settled(lambda: memory(forks.pids).anonymous, idle)
        if len(set(forks.digests)) != len(set(weights)):
            raise RuntimeError(f"forked processes of {family.name} answer wrongly: {forks.digests}")
        anonymous = memory(forks.pids).anonymous
    return {"anonymous": anonymous, "weights": 0, "total": anonymous}


def plain_rows(family: Family, alive: int, workers: int, root: Path) -> Iterator[tuple[str, Row]]:
    """Measure plain processes with each loader, then forked ones: with one weights file for all, then with a file each.
    Figures of `alive` processes are extrapolated to `workers`, except for forked ones with one file, which all run.
    """
    inputs = root / "inputs.safetensors"
    save_file(family.one(), inputs)
    places = []
    for variant in range(alive + 1):
        family.vary(family.head(), variant)
        places.append(root / f"weights-{variant}")
        save(family.state(), places[-1])
    family.vary(family.head(), 0)
    for loader in ("torch.load", "mmap"):
        for kind, weights, files in (("one", places[:1] * alive, 1), ("variants", places[1:], workers)):
            row = plain_bytes(family, loader, weights, inputs)
            anonymous, mapped = row["anonymous"] * workers, row["weights"] * files
            yield f"{loader} {kind}", {"anonymous": anonymous, "weights": mapped, "total": anonymous + mapped}
            print(f"  {family.name}: plain, {loader}, {kind}", file=sys.stderr)
    yield "forked one", forked_bytes(family, places[:1] * workers, inputs)
    first, few = (forked_bytes(family, places[1 : 1 + count], inputs)["total"] for count in (1, alive))
    many = first + (few - first) / (alive - 1) * (workers - 1)
    yield "forked variants", {"anonymous": many, "weights": 0, "total": many, "first": first}
    print(f"  {family.name}: forked", file=sys.stderr)


def measure_model(name: str, workers: int, alive: int) -> dict[str, Row]:
    """Measure all rows of one model."""
    family = Family(name)
    rows = {f"overwinter {key}": row for key, row in one_function(family, workers).items()}
    print(f"  {name}: {workers} workers of one function", file=sys.stderr)
    rows["overwinter variants"] = many_functions(family, workers)
    print(f"  {name}: {workers} functions", file=sys.stderr)
    family.vary(family.head(), 0)
    with tempfile.TemporaryDirectory(prefix="overwinter-bench-") as root:
        rows.update(plain_rows(family, alive, workers, Path(root)))
    return rows


def report_model(name: str, rows: dict[str, Row], workers: int, alive: int) -> dict[str, float]:
    """Print the table of one model; return its figures for RESULT."""
    print(f"\n{name}, MiB: {workers} workers or processes (plain ones: {alive} measured, multiplied)")
    print(f"{'':42}{'anonymous':>12}{'weights':>12}{'buffers':>8}{'total':>12}{'saved by overwinter':>22}")
    labels = {
        "overwinter one": "overwinter, 1 worker",
        "overwinter many": f"overwinter, {workers} workers of one function",
        "overwinter variants": f"overwinter, {workers} variants, a worker each",
        "forked one": "forked from one with the model",
        "forked variants": "forked from one with PyTorch",
    }
    saved = {}
    for key, row in rows.items():
        ours = rows["overwinter variants" if key.endswith("variants") else "overwinter many"]
        saved[key] = 1 - ours["total"] / row["total"]
        sizes = f"{row['anonymous'] / MIB:12.0f}{row['weights'] / MIB:12.0f}{row.get('buffers', 0) / MIB:8.1f}"
        share = "" if key.startswith("overwinter") else f"{saved[key]:22.1%}"
        print(f"{labels.get(key, 'plain, ' + key):42}{sizes}{row['total'] / MIB:12.0f}{share}")
    first, many = rows["overwinter one"], rows["overwinter many"]
    added = many["workers"] - first["workers"]
    worker = (many["anonymous"] - first["anonymous"]) / added / MIB
    buffers = (many["buffers"] - first["buffers"]) / added / MIB
    forked = (rows["forked one"]["total"] - rows["forked variants"]["first"]) / (workers - 1) / MIB
    print(f"each further idle worker: {worker:.1f} MiB, and {buffers:.2f} MiB for the tensors of a request;")
    print(f"each further process forked from one with the model: {forked:.1f} MiB")
    figures = {f"saved_vs_{'_'.join(key.replace('.', '_').split())}": saved[key] for key in COMPARED}
    return {**figures, "worker_mib": worker, "forked_mib": forked}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, metavar="model", help="models of the zoo")
    parser.add_argument("--workers", type=int, default=32, help="workers, and functions of one worker each; default 32")
    parser.add_argument("--plain", type=int, default=2, help="plain processes alive at once, 2 at least; default 2")
    parser.add_argument(
        "--variants",
        type=int,
        default=50,
        help=f"variants of {VARIANTS_OF} of each kind, whose added bytes are measured; default 50",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = {}
    for name in options.models:
        rows = measure_model(name, options.workers, options.plain)
        figures[name] = report_model(name, rows, options.workers, options.plain)
    share = measure_variants(VARIANTS_OF, options.variants)
    result = {key: {name: row[key] for name, row in figures.items()} for key in next(iter(figures.values()))}
    print_result({**result, "variant_share": share})


if __name__ == "__main__":
    main()

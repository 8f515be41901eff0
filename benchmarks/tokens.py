"""What does a token cost a request?

`python -m benchmarks.tokens [--seconds S] [--other SRC]`: nodes with the same small model, one warm worker each, take
turns in the same run: one without tokens, one that asks for them (with a quota of requests, which is never reached),
and with `--other` one that runs the source of another version, whose `src` is in SRC. Load comes from a process of its
own over connections that stay open, with 1 and with 16 clients. Before that, what the daemon computes for a request.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.bare import Bare
from benchmarks.families import as_tensors
from benchmarks.measure import print_result, quantile
from benchmarks.nodes import Node, running_node
from benchmarks.overhead import load
from benchmarks.wire import Connection, binary_request
from overwinter.api.client import Client
from overwinter.node import clock
from overwinter.store.tokens import Quota, TokenFile

MODEL = "mlp"
CLIENTS = (1, 16)
ROUNDS = 8
COUNTED_ROUNDS = 30
COUNTED = 100
PATH = "PYTHONPATH"


@contextmanager
def source_of(other: Path | None) -> Iterator[None]:
    """Start processes with another version's source within."""
    before = os.environ.get(PATH)
    if other is not None:
        os.environ[PATH] = str(other)
    try:
        yield
    finally:
        os.environ.pop(PATH, None)
        if before is not None:
            os.environ[PATH] = before


def prepared(node: Node, model: Bare, file: Path, *, closed: bool) -> None:
    """Deploy the model, wake it, and write a request for it to `file`."""
    token = None
    if closed:
        tokens = TokenFile(node.data)
        tokens.limit("bench", Quota(requests_per_s=1e6))
        _, token = tokens.create("bench", ("infer", "deploy"), "", time.time())
    with Client(node.url, token=token) as client:
        model.deploy(client, MODEL, keep_alive_s=600, max_workers=1)
    request = binary_request(MODEL, as_tensors(model.one()))
    if token is not None:
        line, rest = request.split(b"\r\n", 1)
        request = b"%s\r\nauthorization: Bearer %s\r\n%s" % (line, token.encode(), rest)
    file.write_bytes(request)
    with Connection(node.port) as connection:
        if connection.ask(request).tensors != model.answer():
            raise RuntimeError("the node's answer is not plain PyTorch's")


def measured(
    nodes: Mapping[str, Node], requests: Mapping[str, Path], seconds: float
) -> dict[tuple[str, int], list[float]]:
    """Latencies of each node with each number of clients, by turns."""
    taken: dict[tuple[str, int], list[float]] = {(name, clients): [] for name in nodes for clients in CLIENTS}
    for number in range(ROUNDS):
        # Who comes after whom changes: the one before may leave the machine warm or busy.
        order: Sequence[str] = list(nodes) if number % 2 else list(nodes)[::-1]
        for clients in CLIENTS:
            for name in order:
                taken[name, clients] += load(nodes[name], clients, seconds / ROUNDS, requests[name])
    return taken


def daemon_us(nodes: Mapping[str, Node], requests: Mapping[str, Path]) -> dict[str, float]:
    """What the daemon computes for a request of one client, by turns. Other work changes it less than latency."""
    taken: dict[str, list[float]] = {name: [] for name in nodes}
    with ExitStack() as stack:
        connections = {name: stack.enter_context(Connection(node.port)) for name, node in nodes.items()}
        for number in range(COUNTED_ROUNDS):
            for name, node in list(nodes.items())[:: 1 if number % 2 else -1]:
                assert node.process is not None
                request, before = requests[name].read_bytes(), clock.computed_s(node.process.pid)
                for _ in range(COUNTED):
                    connections[name].ask(request)
                after = clock.computed_s(node.process.pid)
                assert before is not None
                assert after is not None
                taken[name].append((after - before) / COUNTED * 1e6)
    return {name: quantile(values, 0.5) for name, values in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each node with each number of clients")
    parser.add_argument("--other", type=Path, metavar="SRC", help="the source of another version")
    options = parser.parse_args()
    names = ["open", "tokens"] + (["other"] if options.other else [])
    model = Bare(MODEL)
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="overwinter-bench-")))
        nodes, requests = {}, {name: root / name for name in names}
        for name in names:
            with source_of(options.other if name == "other" else None):
                nodes[name] = stack.enter_context(running_node("--workers-ahead", "0"))
            prepared(nodes[name], model, requests[name], closed=name == "tokens")
        counted = daemon_us(nodes, requests)
        taken = measured(nodes, requests, options.seconds)
    told: dict[str, float] = {f"{name}_daemon_us": us for name, us in counted.items()}
    print("the daemon computes for a request:", ", ".join(f"{name} {us:.0f} µs" for name, us in counted.items()))
    print(f"{'':10}{'clients':>8}{'p50 ms':>10}{'p99 ms':>10}{'answers/s':>12}")
    for (name, clients), values in taken.items():
        p50, p99, rate = quantile(values, 0.5) / 1e3, quantile(values, 0.99) / 1e3, len(values) / options.seconds
        print(f"{name:10}{clients:8}{p50:10.3f}{p99:10.3f}{rate:12.0f}")
        told |= {f"{name}_{clients}_p50_ms": p50, f"{name}_{clients}_per_s": rate}
    base = "other" if options.other else "open"
    ratios = {
        "p50_ratio": told["tokens_1_p50_ms"] / told[f"{base}_1_p50_ms"],
        "rate_ratio": told["tokens_16_per_s"] / told[f"{base}_16_per_s"],
    }
    print(f"with tokens, beside {base}: {ratios['p50_ratio']:.3f} times the p50 of 1 client, "
          f"{ratios['rate_ratio']:.3f} times the answers of 16")  # fmt: skip
    print_result({**told, **ratios})


if __name__ == "__main__":
    main()

"""Measures how much time the check of an access token adds to each request.

`python -m benchmarks.tokens [--seconds S] [--other CHECKOUT]` compares nodes with the same small model and one warm
worker each, in turns in the same run: one without tokens, one that requires them (with a request quota that is never
reached), and with `--other` one of another version, whose environment is in CHECKOUT/.venv. The same model in a bare
PyTorch loop is measured in turns with them: the difference is the node's overhead. The load comes from a separate
process over open connections, with 1 and with 16 clients. Before that, the CPU time of the daemon per request is
measured.
"""

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.measure import print_result, quantile
from benchmarks.nodes import Node, running_node
from benchmarks.overhead import BareLoop, deployed, load, python_of
from benchmarks.wire import Connection
from overwinter.node import clock

MODEL = "mlp"
CLIENTS = (1, 16)
ROUNDS = 8
COUNTED_ROUNDS = 30
COUNTED = 100


@contextmanager
def prepared(directory: Path, *, with_tokens: bool, other: Path | None) -> Iterator[tuple[Node, BareLoop]]:
    """A node with the model; with `with_tokens` it requires tokens. The encoded requests are in the directory."""
    with running_node("--workers-ahead", "0", python=python_of(other)) as node:
        token = node.require_tokens() if with_tokens else None
        with deployed(node, directory, MODEL, token, other) as loop:
            node.wait_quiet()
            yield node, loop


def measured(
    nodes: Mapping[str, Node], requests: Mapping[str, Path], bare_loop: BareLoop, seconds: float
) -> tuple[dict[tuple[str, int], list[float]], list[float]]:
    """Return the latencies of each node with each number of clients, and of the model alone, measured in turns, in
    microseconds.
    """
    taken: dict[tuple[str, int], list[float]] = {(name, clients): [] for name in nodes for clients in CLIENTS}
    bare: list[float] = []
    for number in range(ROUNDS):
        bare += bare_loop.run(seconds / ROUNDS)
        # The order alternates, because each measurement may leave the machine warm or busy for the next.
        order: Sequence[str] = list(nodes) if number % 2 else list(nodes)[::-1]
        for clients in CLIENTS:
            for name in order:
                taken[name, clients] += load(nodes[name], clients, seconds / ROUNDS, requests[name])
    return taken, bare


def daemon_us(nodes: Mapping[str, Node], requests: Mapping[str, Path]) -> dict[str, float]:
    """Return the CPU time of the daemon for a request of one client, measured in turns. Other load affects it less than
    latency.
    """
    taken: dict[str, list[float]] = {name: [] for name in nodes}
    with ExitStack() as stack:
        connections = {name: stack.enter_context(Connection(node.port)) for name, node in nodes.items()}
        for number in range(COUNTED_ROUNDS):
            for name, node in list(nodes.items())[:: 1 if number % 2 else -1]:
                assert node.process is not None
                request, before = requests[name].read_bytes(), clock.cpu_time_s(node.process.pid)
                for _ in range(COUNTED):
                    connections[name].ask(request)
                after = clock.cpu_time_s(node.process.pid)
                assert before is not None
                assert after is not None
                taken[name].append((after - before) / COUNTED * 1e6)
    return {name: quantile(values, 0.5) for name, values in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="seconds for each node and number of clients; default 5"
    )
    parser.add_argument(
        "--other",
        type=Path,
        metavar="CHECKOUT",
        help="checkout of another version with its environment, to compare with",
    )
    options = parser.parse_args()
    names = ["open", "tokens"] + (["other"] if options.other else [])
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="overwinter-bench-")))
        nodes, requests = {}, {name: root / name / f"{MODEL}.binary" for name in names}
        for name in names:
            (root / name).mkdir()
            other = options.other if name == "other" else None
            nodes[name], loop = stack.enter_context(prepared(root / name, with_tokens=name == "tokens", other=other))
        counted = daemon_us(nodes, requests)
        taken, bare = measured(nodes, requests, loop, options.seconds)
    bare_ms = quantile(bare, 0.5) / 1e3
    results: dict[str, float] = {f"{name}_daemon_us": us for name, us in counted.items()}
    print("the daemon computes for a request:", ", ".join(f"{name} {us:.0f} µs" for name, us in counted.items()))
    print(f"{'':10}{'clients':>8}{'p50 ms':>10}{'p99 ms':>10}{'added p50 ms':>14}{'answers/s':>12}")
    print(f"{'bare loop':18}{bare_ms:10.3f}{quantile(bare, 0.99) / 1e3:10.3f}")
    for (name, clients), values in taken.items():
        p50, p99, rate = quantile(values, 0.5) / 1e3, quantile(values, 0.99) / 1e3, len(values) / options.seconds
        print(f"{name:10}{clients:8}{p50:10.3f}{p99:10.3f}{p50 - bare_ms:14.3f}{rate:12.0f}")
        results |= {f"{name}_{clients}_added_ms": p50 - bare_ms, f"{name}_{clients}_per_s": rate}
    base = "other" if options.other else "open"
    for name in names:
        added = results[f"{name}_1_added_ms"] / results[f"{base}_1_added_ms"]
        rate = results[f"{name}_16_per_s"] / results[f"{base}_16_per_s"]
        print(
            f"{name}: {added:.3f} times the added p50 of {base} with 1 client, {rate:.3f} times its answers per second "
            "with 16"
        )
        results |= {f"{name}_added_ratio": added, f"{name}_rate_ratio": rate}
    print_result(results)


if __name__ == "__main__":
    main()

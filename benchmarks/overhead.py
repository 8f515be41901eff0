"""Measures the node's overhead per request, compared with the same model in a bare PyTorch loop.

`python -m benchmarks.overhead [--seconds S] [--tokens] [model ...]`: one warm function, no batching (under 16 clients
the node may add workers), requests encoded in advance, load from a separate process over open connections. The bare
loop, one client, 16 clients and JSON are measured in turns in the same run. Then a node with only the last model is
measured: the seconds until it is ready with that function in its repository, and the PSS of all its processes with the
function awake. With `--tokens` the nodes require tokens; `benchmarks.tokens` compares nodes with and without them.

This process does not import PyTorch: it would share the libraries' pages, and make the node appear smaller.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import MIB, Memory, memory, print_result, quantile, users_of
from benchmarks.nodes import Node, running_node
from benchmarks.wire import Connection
from overwinter.worker.inbox import IDLE_MS

MODELS = ("minilm", "mlp")
ROUNDS = 4
STARTS = 5
IDLE_S = IDLE_MS / 1000 + 1.0
KINDS = {"bare": (0, ""), "1": (1, "binary"), "16": (16, "binary"), "json": (1, "json")}
TITLES = {"bare": "bare PyTorch loop", "1": "1 client", "16": "16 clients", "json": "1 client, JSON"}
OTHER_SERVERS = """Other servers, measured earlier on two cores with an MLP whose bare loop took 0.15 ms, JSON:
LitServe 1.44 ms p50 with 1 client, 1117/s with 16, 436 MB, ready in 4.1 s; BentoML 1.56 ms, 512/s, 367 MB, 3.4 s;
MLServer 1.67 ms, 1176/s, 439 MB, 4.4 s; Ray Serve 6.71 ms, 270/s, 947 MB, 6.7 s."""


class Series:
    """Latencies in microseconds, and the seconds in which they were measured."""

    def __init__(self) -> None:
        self.latencies: list[float] = []
        self.seconds = 0.0

    def ms(self, share: float) -> float:
        """Return a quantile in milliseconds."""
        return quantile(self.latencies, share) / 1e3

    @property
    def rate(self) -> float:
        """The answers per second."""
        return len(self.latencies) / self.seconds


class BareLoop:
    """The process of `benchmarks.bare`, which has deployed its model."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._input, self._output = process.stdin, process.stdout
        if self._output.readline().strip() != "deployed":
            raise RuntimeError("the model was not deployed; see above")

    def run(self, seconds: float) -> list[float]:
        """Call the model for this long."""
        self._input.write(f"{seconds}\n")
        self._input.flush()
        values: list[float] = json.loads(self._output.readline())
        return values


def python_of(checkout: Path | None) -> str:
    """The interpreter of a checkout's environment; None: this one."""
    return sys.executable if checkout is None else str(checkout / ".venv" / "bin" / "python")


@contextmanager
def deployed(
    node: Node, directory: Path, model: str, token: str | None = None, checkout: Path | None = None
) -> Iterator[BareLoop]:
    """Deploy a model on the node, with the code of a checkout if one is given; yield its bare loop."""
    command = [python_of(checkout), "-m", "benchmarks.bare", node.url, str(directory), model]
    command += [] if token is None else [token]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=checkout) as process:
        yield BareLoop(process)


def load(node: Node, clients: int, seconds: float, request: Path) -> list[float]:
    """Return the latencies that the load generator measured."""
    command = [sys.executable, "-m", "benchmarks.load", str(node.port), str(clients), str(seconds), str(request)]
    values: list[float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return values


def measure_model(node: Node, model: str, seconds: float, directory: Path, token: str | None) -> dict[str, Series]:
    """Measure all kinds in turns."""
    series = {kind: Series() for kind in KINDS}
    with deployed(node, directory, model, token) as loop:
        node.wait_quiet()
        for _ in range(ROUNDS):
            for kind, (clients, form) in KINDS.items():
                spent = seconds / ROUNDS
                request = directory / f"{model}.{form}"
                series[kind].latencies += load(node, clients, spent, request) if clients else loop.run(spent)
                series[kind].seconds += spent
    return series


def report_model(model: str, series: dict[str, Series]) -> None:
    """Print the table of one model."""
    bare = series["bare"].ms(0.5)
    print(f"\n{model}{'':{28 - len(model)}}{'p50 ms':>10}{'p99 ms':>10}{'added p50 ms':>14}{'answers/s':>12}")
    for kind, one in series.items():
        added = "" if kind == "bare" else f"{one.ms(0.5) - bare:.3f}"
        print(f"  {TITLES[kind]:26}{one.ms(0.5):10.3f}{one.ms(0.99):10.3f}{added:>14}{one.rate:12.0f}", flush=True)


def measure_node(model: str, directory: Path, *, tokens: bool) -> tuple[float, Memory]:
    """Return the median seconds until the node is ready, and its memory while it holds only this function, awake."""
    with running_node() as node:
        with deployed(node, directory, model, node.require_tokens() if tokens else None):
            pass
        starts = []
        for _ in range(STARTS):
            node.stop()
            starts.append(node.start())
        with Connection(node.port) as connection:
            connection.ask((directory / f"{model}.binary").read_bytes())
        node.wait_quiet()
        time.sleep(IDLE_S)
        held = memory(node.pids())
        others = users_of("libtorch_cpu.so", node.pids())
    seconds = [f"{took:.2f}" for took in sorted(starts)]
    print(f"\na node with {model} alone: ready after {median(starts):.2f} s ({', '.join(seconds)})")
    parts = ", ".join(f"{name} {value / MIB:.0f}" for name, value in held._asdict().items())
    print(f"its PSS with the function awake: {held.total / MIB:.0f} MiB = {held.total / 1e6:.0f} MB ({parts} MiB)")
    if others:
        print(f"  too small: {len(others)} other processes map PyTorch's libraries now and share their pages")
    return median(starts), held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "models",
        nargs="*",
        default=MODELS,
        metavar="model",
        help="models of the zoo; RESULT has the figures of the last one",
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of each kind of load; default 5")
    parser.add_argument("--tokens", action="store_true", help="let the nodes require tokens")
    options = parser.parse_args()
    results: dict[str, dict[str, Series]] = {}
    with tempfile.TemporaryDirectory(prefix="overwinter-bench-") as root:
        with running_node() as node:
            token = node.require_tokens() if options.tokens else None
            for model in options.models:
                results[model] = measure_model(node, model, options.seconds, Path(root), token)
                report_model(model, results[model])
        ready_s, held = measure_node(options.models[-1], Path(root), tokens=options.tokens)
    print(f"\n{OTHER_SERVERS}")
    series = results[options.models[-1]]
    bare = series["bare"]
    figures: dict[str, Any] = {
        "added_ms_p50": {kind: series[kind].ms(0.5) - bare.ms(0.5) for kind in ("1", "16")},
        "p99_ms": {kind: series[kind].ms(0.99) for kind in ("1", "16")},
        "rps": {kind: series[kind].rate for kind in ("1", "16")},
        "bare_ms_p50": bare.ms(0.5),
        "bare_rps": bare.rate,
        "rps_over_bare": series["16"].rate / bare.rate,
        "node_mib": held.total / MIB,
        "ready_s": ready_s,
    }
    print_result(figures)


if __name__ == "__main__":
    main()

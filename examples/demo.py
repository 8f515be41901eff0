"""Shows Overwinter's Python API: real models sleep as shared blocks, and requests wake them.

    python -m examples.demo            run a node for a minute: deploy, call, compare with plain PyTorch, stop
    python -m examples.demo --serve    leave a node with the same models running

The exit code is 0 if every answer agrees with plain PyTorch. All started processes are stopped, even after an error.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

from examples import demo_models, demo_pool
from examples.demo_comparison import ask
from examples.demo_models import Model, Siblings
from examples.demo_node import Node, NodeError, file_bytes, own_bytes, running_node
from examples.demo_progress import Steps
from examples.demo_report import Asleep, show_functions, show_pool, show_totals
from examples.plain_process import measure_plain_process
from examples.variants import Classifier
from examples.weights import INSTALL, MissingWeightsError, weights_missing
from overwinter import Client
from overwinter.api.deployer import DEFAULT_URL, Uploaded
from overwinter.core.errors import OverwinterError

KEEP_ALIVE_S = 1.0
"""Short, so that all functions sleep soon after their deploy."""
SERVED_KEEP_ALIVE_S = 15.0
POLL_S = 0.05
MEMORY = "/dev/shm"
DATA = "~/.local/share/overwinter-demo"
INTERRUPTED = 130
EXPECTED_ERRORS = (OverwinterError, NodeError, MissingWeightsError, subprocess.SubprocessError, OSError)


class Deployed(NamedTuple):
    """A model, and the cost of its deploy."""

    model: Model
    upload: Uploaded


def run_demo(steps: Steps) -> bool:
    """Deploy and call everything on a new node; return whether all answers agree with plain PyTorch."""
    require_weights()
    siblings = Siblings()
    with (
        tempfile.TemporaryDirectory(prefix="overwinter-demo-") as data,
        # A separate directory, so that nothing stays in memory even if the node is killed.
        tempfile.TemporaryDirectory(prefix="overwinter-demo-", dir=MEMORY) as blocks,
        running_node(Path(data), "--port", "0", "--host-store", blocks, *demo_pool.OPTIONS, say=steps.say) as node,
    ):
        with steps.working("starting a node"):
            url = node.ready()
        with Client(url) as client:
            deployed = list(deploy_all(steps, client, url, siblings, keep_alive_s=KEEP_ALIVE_S))
            wait_until_asleep(steps, client)
            plain = demo_models.plain({each.model.name: each.model for each in deployed})
            questions = demo_models.questions()
            titles = [" ".join(question.functions) for question in questions]
            rows = [ask(question, client, plain) for question in steps.counting("calling", questions, titles)]
            wait_until_asleep(steps, client)
            asleep = measure(node, Path(blocks))
            # Afterwards: executors hold the memory of the devices, which a node without devices does not need.
            pool = demo_pool.try_pool(steps, client, demo_pool.pooled(each.model for each in deployed), siblings)
    family = [each.model.module for each in deployed if isinstance(each.model.module, Classifier)]
    with steps.working("measuring one plain PyTorch process"):
        separate = measure_plain_process(family[0], "Is this function awake?")
    verdicts = [verdict for row in rows for verdict in row]
    uploads = {each.model.name: each.upload for each in deployed}
    show_functions(verdicts, uploads)
    # MiniLM itself is as large as its variants.
    show_totals(verdicts, uploads, 1 + len(family), asleep, separate)
    show_pool(pool)
    return pool.agrees and all(verdict.agrees for verdict in verdicts)


def serve(steps: Steps, port: int, data: Path) -> NoReturn:
    """Run a node with the demo's models until this process is interrupted; raise NodeError if the node ends before."""
    with running_node(data, "--port", str(port), say=steps.say) as node:
        with steps.working("starting a node"):
            url = node.ready()
        with Client(url) as client:
            present = {function["name"] for function in client.functions()}
            for _ in deploy_all(steps, client, url, Siblings(), present, keep_alive_s=SERVED_KEEP_ALIVE_S):
                pass
        say_what_to_try(url)
        print(f"\nCtrl-C stops the node; its functions stay in {data}", flush=True)
        node.wait()


def deploy_all(
    steps: Steps, client: Client, url: str, siblings: Siblings, present: Collection[str] = (), **settings: float
) -> Iterator[Deployed]:
    """Deploy the demo's models that are not in `present`, one for each item that is taken from the iterator."""
    names = demo_models.names()
    if set(names) <= set(present):
        return
    require_weights()
    for model in steps.counting("deploying", demo_models.models(), names):
        if model.name in present:
            continue
        if isinstance(model.module, Classifier):
            yield Deployed(model, siblings.deploy(model, client, **settings))
        else:
            yield Deployed(model, demo_models.deploy(model, url, **settings))


def require_weights() -> None:
    """Raise MissingWeightsError unless all trained weights are installed."""
    missing = weights_missing()
    if missing:
        raise MissingWeightsError(f"packages with trained weights are not installed: {', '.join(missing)}: {INSTALL}")


def wait_until_asleep(steps: Steps, client: Client) -> None:
    """Wait until no function has a worker."""
    with steps.working("waiting until all functions sleep"):
        while any(function["workers"] for function in client.functions()):
            time.sleep(POLL_S)


def measure(node: Node, blocks: Path) -> Asleep:
    """Measure the memory of a node whose functions all sleep."""
    pids = node.processes()
    return Asleep(len(pids), sum(map(own_bytes, pids)), file_bytes(blocks))


def say_what_to_try(url: str) -> None:
    """Print three commands that list or call the deployed functions."""
    command = Path(sys.executable).with_name("overwinter")
    program = os.path.relpath(command) if command.is_relative_to(Path.cwd()) else str(command)
    elsewhere = "" if url == DEFAULT_URL else f" --url {url}"
    request = '{"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["I lost my credit card"]}]}'
    print(f"{len(demo_models.names())} functions are deployed at {url}. Each wakes when it is called.")
    print("Try, in another terminal:\n")
    print(f"  {program} ps{elsewhere}")
    print(f"  {program} infer minilm-sentiment{elsewhere} --input {shlex.quote('text=What a wonderful film')}")
    print(f"  curl {url}/v2/models/minilm-support/infer -d {shlex.quote(request)}")


def main() -> int:
    """Run the demo as the command line says; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__.partition("\n")[0])
    parser.add_argument("--serve", action="store_true", help="leave a node running instead, until Ctrl-C")
    parser.add_argument("--port", type=int, default=8000, help="with --serve: where to listen (default: %(default)s)")
    parser.add_argument("--data", default=DATA, help="with --serve: directory of its functions (default: %(default)s)")
    options = parser.parse_args()
    for ending in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) is not signal.SIG_IGN:
            # Raise an exception, so that every `with` block ends cleanly, as on Ctrl-C.
            signal.signal(ending, lambda number, _: sys.exit(128 + number))
    # Workers use one thread, and the order of additions depends on the number of threads.
    torch.set_num_threads(1)
    try:
        if options.serve:
            serve(Steps(), options.port, Path(options.data).expanduser().absolute())
        if run_demo(Steps()):
            return 0
        print("error: not all answers agree with plain PyTorch's", file=sys.stderr)
    except EXPECTED_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 0 if options.serve else INTERRUPTED
    return 1


if __name__ == "__main__":
    sys.exit(main())

"""Real models asleep as shared blocks, woken by requests: a tour of Overwinter's Python API.

    python -m examples.demo            a node of its own for a minute: deploy, ask, compare with plain PyTorch, stop
    python -m examples.demo --serve    leave a node running with the same models

Exit code 0 if every answer agrees with plain PyTorch's. Everything that was started is stopped, whatever happens.
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

from examples import demo_models
from examples.demo_models import Model, Siblings
from examples.demo_node import Node, NodeError, file_bytes, own_bytes, running_node
from examples.demo_report import Asleep, show_functions, show_totals
from examples.demo_stage import Stage
from examples.demo_trial import ask
from examples.plain_process import measure_plain_process
from examples.variants import Classifier
from examples.weights import INSTALL, MissingWeightsError, weights_missing
from overwinter import Client
from overwinter.api.deployer import DEFAULT_URL, Uploaded
from overwinter.core.errors import OverwinterError

KEEP_ALIVE_S = 1.0
"""Short, so that all functions sleep again soon after they were deployed."""
SERVED_KEEP_ALIVE_S = 15.0
POLL_S = 0.05
MEMORY = "/dev/shm"
DATA = "~/.local/share/overwinter-demo"
INTERRUPTED = 130
FORESEEN = (OverwinterError, NodeError, MissingWeightsError, subprocess.SubprocessError, OSError)


class Deployed(NamedTuple):
    """A model, and what its deploy cost."""

    model: Model
    upload: Uploaded


def tour(stage: Stage) -> bool:
    """Deploy everything to a node of our own and ask everything; whether all answers agree with plain PyTorch's."""
    require_weights()
    with (
        tempfile.TemporaryDirectory(prefix="overwinter-demo-") as data,
        # Of our own, so that nothing stays in memory even if the node were killed.
        tempfile.TemporaryDirectory(prefix="overwinter-demo-", dir=MEMORY) as blocks,
        running_node(Path(data), "--port", "0", "--host-store", blocks, say=stage.say) as node,
    ):
        with stage.working("starting a node"):
            url = node.ready()
        with Client(url) as client:
            deployed = list(deploy_all(stage, client, url, keep_alive_s=KEEP_ALIVE_S))
            wait_until_asleep(stage, client)
            plain = demo_models.plain({each.model.name: each.model for each in deployed})
            questions = demo_models.questions()
            titles = [" ".join(question.functions) for question in questions]
            rows = [ask(question, client, plain) for question in stage.counting("asking", questions, titles)]
            wait_until_asleep(stage, client)
            asleep = measure(node, Path(blocks))
    family = [each.model.module for each in deployed if isinstance(each.model.module, Classifier)]
    with stage.working("measuring one plain PyTorch process"):
        separate = measure_plain_process(family[0], "Is anybody awake?")
    verdicts = [verdict for row in rows for verdict in row]
    uploads = {each.model.name: each.upload for each in deployed}
    show_functions(verdicts, uploads)
    # MiniLM itself is as large as its variants.
    show_totals(verdicts, uploads, 1 + len(family), asleep, separate)
    return all(verdict.agrees for verdict in verdicts)


def serve(stage: Stage, port: int, data: Path) -> NoReturn:
    """Leave a node running with the demo's models until this process is interrupted; NodeError if it ends before."""
    with running_node(data, "--port", str(port), say=stage.say) as node:
        with stage.working("starting a node"):
            url = node.ready()
        with Client(url) as client:
            present = {function["name"] for function in client.functions()}
            for _ in deploy_all(stage, client, url, present, keep_alive_s=SERVED_KEEP_ALIVE_S):
                pass
        say_what_to_try(url)
        print(f"\nCtrl-C stops the node; what it serves stays in {data}", flush=True)
        node.wait()


def deploy_all(
    stage: Stage, client: Client, url: str, present: Collection[str] = (), **settings: float
) -> Iterator[Deployed]:
    """Deploy the demo's models one after the other, but those that are present."""
    names = demo_models.names()
    if set(names) <= set(present):
        return
    require_weights()
    siblings = Siblings()
    for model in stage.counting("deploying", demo_models.models(), names):
        if model.name in present:
            continue
        if isinstance(model.module, Classifier):
            yield Deployed(model, siblings.deploy(model, client, **settings))
        else:
            yield Deployed(model, demo_models.deploy(model, url, **settings))


def require_weights() -> None:
    """MissingWeightsError unless all trained weights can be found."""
    missing = weights_missing()
    if missing:
        raise MissingWeightsError(f"packages with trained weights are not installed: {', '.join(missing)}: {INSTALL}")


def wait_until_asleep(stage: Stage, client: Client) -> None:
    """Wait until no function has a process."""
    with stage.working("waiting until all sleep"):
        while any(function["workers"] for function in client.functions()):
            time.sleep(POLL_S)


def measure(node: Node, blocks: Path) -> Asleep:
    """What a node holds whose functions all sleep."""
    pids = node.processes()
    return Asleep(len(pids), sum(map(own_bytes, pids)), file_bytes(blocks))


def say_what_to_try(url: str) -> None:
    """Three commands for the same functions, as a user would write them."""
    command = Path(sys.executable).with_name("overwinter")
    program = os.path.relpath(command) if command.is_relative_to(Path.cwd()) else str(command)
    elsewhere = "" if url == DEFAULT_URL else f" --url {url}"
    request = '{"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["I lost my credit card"]}]}'
    print(f"{len(demo_models.names())} functions are behind {url}, each asleep until it is asked.")
    print("Try, in another terminal:\n")
    print(f"  {program} ps{elsewhere}")
    print(f"  {program} infer minilm-sentiment{elsewhere} --input {shlex.quote('text=What a wonderful film')}")
    print(f"  curl {url}/v2/models/minilm-support/infer -d {shlex.quote(request)}")


def main() -> int:
    """Read the command line and do what it asks; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__.partition("\n")[0])
    parser.add_argument("--serve", action="store_true", help="leave a node running instead, until Ctrl-C")
    parser.add_argument("--port", type=int, default=8000, help="with --serve: where to listen (default: %(default)s)")
    parser.add_argument("--data", default=DATA, help="with --serve: where its functions stay (default: %(default)s)")
    options = parser.parse_args()
    for ending in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) is not signal.SIG_IGN:
            # As an exception it leaves every `with` in order, as Ctrl-C does.
            signal.signal(ending, lambda number, _: sys.exit(128 + number))
    # Workers compute with one thread, and the order of additions depends on how many there are.
    torch.set_num_threads(1)
    try:
        if options.serve:
            serve(Stage(), options.port, Path(options.data).expanduser().absolute())
        if tour(Stage()):
            return 0
        print("error: not all answers agree with plain PyTorch's", file=sys.stderr)
    except FORESEEN as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 0 if options.serve else INTERRUPTED
    return 1


if __name__ == "__main__":
    sys.exit(main())

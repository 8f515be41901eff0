"""Draws docs/top.svg: what `overwinter top` shows, drawn by its own code from what a real node reported (top.json).

python -m docs.pictures.top             draw again what was recorded
python -m docs.pictures.top --record    record again: send requests to a node with the demo's models for 40 seconds
"""

import argparse
import io
import random
import re
import tempfile
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console

from overwinter.cli.telemetry_tables import activity_table, rows_for

if TYPE_CHECKING:
    from overwinter import Client

FILE = Path(__file__).parents[1] / "top.svg"
RECORDED = Path(__file__).with_suffix(".json")

COLUMNS, LINES = 130, 22
"""Of the terminal in the picture."""

FETCHED = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)
"""The fonts that rich would have a browser fetch."""

SEED = 7
SECONDS = 40.0
RATE = 20.0
"""Requests per second of all functions together. The first gets the most, and the n-th gets 1/n of that."""
SLO_MS = 250.0
KEEP_ALIVE_S = 15.0
CALLERS = 8
IN_PROGRESS_S = 0.005


def draw(activity: dict[str, Any]) -> str:
    """The picture of an answer of the node, as text."""
    console = Console(
        width=COLUMNS, height=LINES, record=True, file=io.StringIO(), markup=False, highlight=False, emoji=False
    )
    console.print(activity_table(activity, rows_for(activity, console)))
    # Without a network it looks the same.
    return FETCHED.sub("", console.export_svg(title="overwinter top", unique_id="top"))


def recorded() -> dict[str, Any]:
    """What the node reported when it was recorded."""
    return msgspec.json.decode(RECORDED.read_bytes(), type=dict[str, Any])


def record() -> dict[str, Any]:
    """What a node with the demo's models reports at the end of 40 seconds of requests."""
    from examples import demo
    from examples.demo_models import Siblings
    from examples.demo_node import running_node
    from examples.demo_progress import Steps
    from overwinter import Client

    steps = Steps()
    with (
        tempfile.TemporaryDirectory() as data,
        tempfile.TemporaryDirectory(dir=demo.MEMORY) as blocks,
        running_node(Path(data), "--port", "0", "--host-store", blocks, say=steps.say) as node,
    ):
        url = node.ready()
        with Client(url) as client:
            for _ in demo.deploy_all(steps, client, url, Siblings(), slo_ms=SLO_MS, keep_alive_s=KEEP_ALIVE_S):
                pass
            with steps.working("asking"), ThreadPoolExecutor(CALLERS) as callers:
                ask(client, callers)
                # The last ones are in progress.
                time.sleep(IN_PROGRESS_S)
                return client.activity()


def ask(client: "Client", callers: Executor) -> None:
    """Call the functions that need no other one with the demo's inputs, at random times, some much more often."""
    from examples.demo_models import questions

    chance = random.Random(SEED)
    asked = [question for question in questions() if len(question.functions) == 1]
    chance.shuffle(asked)
    weights = [1 / rank for rank in range(1, len(asked) + 1)]
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        time.sleep(chance.expovariate(RATE))
        [question] = chance.choices(asked, weights)
        callers.submit(question.ask, client.infer)


def main() -> None:
    """Read the command line and do what it asks."""
    parser = argparse.ArgumentParser(prog="python -m docs.pictures.top", description=__doc__.partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="send requests to a node again, and write top.json")
    if parser.parse_args().record:
        RECORDED.write_bytes(msgspec.json.format(msgspec.json.encode(record()), indent=1) + b"\n")
    FILE.write_text(draw(recorded()))


if __name__ == "__main__":
    main()

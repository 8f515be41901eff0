"""The output of a function's code is shown to its tenant only."""

import json
import time
from pathlib import Path

import pytest

from tests.cli.conftest import Run

PRINTS = """
print("loaded")

def preprocess(inputs, state):
    print("called", *inputs["x"].shape)
    return inputs
"""
NO_OUTPUT = "has printed nothing"
WAIT_S = 20.0


@pytest.fixture
def talking(run: Run, deployer_dir: Path) -> str:
    """Deploy a function that prints without flushing, and return its name."""
    (deployer_dir / "prints.py").write_text(PRINTS)
    run("deploy", "cli_scale:model", "--name", "talking", "--handler", "prints.py")
    return "talking"


def printed(run: Run, name: str, words: str) -> list[dict]:
    """Return the lines as soon as one of them contains these words."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        lines: list[dict] = json.loads(run("logs", name, "--json").stdout)
        if any(words in line["text"] for line in lines):
            return lines
        time.sleep(0.02)
    raise AssertionError(f"{name} did not print {words!r}")


def test_what_the_code_of_a_function_prints_is_shown(run: Run, talking: str) -> None:
    before = time.time()
    printed(run, talking, "loaded")
    run("infer", talking, "-i", "x=[[1, 2], [3, 4], [5, 6]]")
    last = printed(run, talking, "called 3 2")[-1]
    assert before - 1 < last["at"] < time.time() + 1
    line = run("logs", f"{talking}@1").stdout.splitlines()[-1]
    assert line.endswith(f"worker {last['worker']}: called 3 2")


def test_the_output_of_a_function_is_not_shown_to_another_tenant(run: Run, talking: str) -> None:
    assert "does not belong to tenant" in run("logs", talking, "--tenant", "other", exit_code=1).stderr
    assert "no function 'nothing'" in run("logs", "nothing", exit_code=1).stderr


def test_logs_says_so_when_a_function_has_printed_nothing(run: Run, scale: str) -> None:
    silent = run("logs", scale)
    assert silent.stdout == ""
    assert NO_OUTPUT in silent.stderr
    assert json.loads(run("logs", scale, "--json").stdout) == []

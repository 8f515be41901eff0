"""The blocks of the README work when they are pasted one after the other into a shell.

Blocks of shell and of Python run in the order of the README, in one shell, in a fresh directory that has what the
repository has for users, with the environment of the tests activated. Two kinds are treated otherwise:

* a block with a line that begins with `make`, `pip` or `python3 -m venv` sets up an environment and is left out;
* a block that begins with `overwinter serve` runs in a terminal of its own; the next one waits until it is ready.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from examples.weights import INSTALL, weights_missing

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
FOR_USERS = ("examples", "scenarios")
URL = "http://127.0.0.1:8000"
"""The address in the README; another node on this machine may use it."""
SETS_UP = re.compile(r"^(?:make|pip|python3 -m venv)\b", re.MULTILINE)
SERVES = "overwinter serve"
PASTED_S = 100


class Block(NamedTuple):
    """A code block of a text."""

    language: str
    code: str

    @property
    def sets_up(self) -> bool:
        """Whether it creates an environment."""
        return self.language == "sh" and SETS_UP.search(self.code) is not None

    @property
    def serves(self) -> bool:
        """Whether it runs until it is interrupted."""
        return self.language == "sh" and self.code.startswith(SERVES)


def blocks_of(text: str) -> list[Block]:
    """Return the blocks of shell and of Python, in order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [Block(language, code) for language, code in found if language in ("sh", "python")]


BLOCKS = blocks_of(README)


def script_of(blocks: list[Block], url: str) -> str:
    """Return the input of one shell: all blocks, each block of Python as standard input of `python`."""
    typed = ["set -eu"]
    for number, (language, code) in enumerate(blocks):
        own = code.replace(URL, url)
        typed += [f": block {number}", own if language == "sh" else f"python - <<'PASTED'\n{own}PASTED"]
    return "\n".join(typed)


def environment(home: Path, memory: Path) -> dict[str, str]:
    """Return the variables of a user's shell with the environment activated."""
    place = Path(sys.executable).parent
    return {
        "PATH": f"{place}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(place.parent),
        "HOME": str(home),
        # Another node may run on this machine, and the host store of this node is checked.
        "OVERWINTER_PORT": "0",
        "OVERWINTER_HOST_STORE": str(memory),
    }


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Create a directory with the parts of the repository that the blocks need."""
    place = tmp_path / "overwinter"
    for name in FOR_USERS:
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    return place


@pytest.fixture
def memory() -> Iterator[Path]:
    """Yield a directory for the host store, which must be empty at the end."""
    place = Path(tempfile.mkdtemp(prefix="overwinter-readme-", dir="/dev/shm"))
    yield place
    place.rmdir()


def url_of(server: subprocess.Popen[str]) -> str:
    """Return the address of the node, as soon as the node has printed it."""
    assert server.stdout is not None
    said = []
    for line in server.stdout:
        said.append(line)
        if found := re.search(r"ready at (http://\S+)", line):
            return found[1]
    raise AssertionError(f"the node ended: {said}")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.skipif(bool(weights_missing()), reason=f"weights are not installed: {weights_missing()}: {INSTALL}")
def test_every_block_runs_as_pasted(directory: Path, memory: Path, tmp_path: Path) -> None:
    server_block, *pasted = [block for block in BLOCKS if not block.sets_up]
    assert server_block.serves
    assert not any(block.serves for block in pasted)
    variables = environment(tmp_path, memory)
    server = subprocess.Popen(
        ["bash", "-c", server_block.code],
        cwd=directory,
        env=variables,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        url = url_of(server)
        done = subprocess.run(
            ["bash", "-xc", script_of(pasted, url)],
            stdin=subprocess.DEVNULL,
            cwd=directory,
            env={**variables, "OVERWINTER_URL": url},
            capture_output=True,
            text=True,
            timeout=PASTED_S,
        )
    finally:
        # Ctrl-C.
        os.killpg(server.pid, signal.SIGINT)
        server.communicate(timeout=30)
    assert done.returncode == 0, done.stderr
    assert server.returncode == 0
    [answer] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"model_name"')]
    assert answer["outputs"][0]["shape"] == [1, 384]
    [pitches] = re.findall(r"^\[\[([\d.\s]+)\]\]$", done.stdout, re.MULTILINE)
    assert [float(hertz) for hertz in pitches.split()] == pytest.approx([440.0] * 8, rel=5e-3)


def test_blocks_that_are_left_out_only_set_up_an_environment() -> None:
    left_out = [block.code for block in BLOCKS if block.sets_up]
    assert left_out
    assert [code for code in left_out if re.search(r"^(?:overwinter|curl)\b", code, re.MULTILINE)] == []


def test_each_target_of_make_that_the_readme_names_exists() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"^make (\w+)", README, re.MULTILINE))
    assert named
    assert named <= targets


def test_kinds_of_blocks_are_distinguished() -> None:
    text = "```sh\nmake demo\n```\n\n```sh\noverwinter serve\n```\n\n```python\nprint()\n```\n\n```text\nno code\n```\n"
    made, served, printed = blocks_of(text)
    assert (made.sets_up, served.sets_up, printed.sets_up) == (True, False, False)
    assert (made.serves, served.serves, printed.serves) == (False, True, False)

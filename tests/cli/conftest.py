"""Fixtures: one real node, started by the command itself, which most tests of the command line share."""

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from overwinter.cli.main import main

Run = Callable[..., Result]

SOURCE = """
import torch

class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([[2.0, 0.0], [0.0, 10.0]]))

    def forward(self, x):
        return x @ self.weight

def model():
    return Scale(), (torch.zeros(2, 2),)

class Centred(torch.nn.Module):
    def forward(self, x):
        return x - x.mean(0)

def centred():
    return Centred(), (torch.zeros(2, 2),)

class Paired(torch.nn.Module):
    def forward(self, x):
        return x if x.shape[0] > 1 else -x

def paired():
    return Paired(), (torch.zeros(2, 2),)

def fixed():
    return Scale(), {"x": torch.zeros(1, 2)}, {}

def failing():
    raise ValueError("no weights\\nin this place")

def waiting():
    import threading

    print("waiting here", flush=True)
    threading.Event().wait()

def wrong():
    return Scale()

answer = 42
"""
HANDLER = """
import torch

INPUTS = [{"name": "text", "datatype": "BYTES", "shape": ["batch"]}]
OUTPUTS = [{"name": "label", "datatype": "BYTES", "shape": ["batch"]}]

def setup(assets):
    return assets["words"].split()

def preprocess(inputs, state):
    return {"x": torch.tensor([[float(len(text)), 1.0] for text in inputs["text"]])}

def postprocess(outputs, inputs, state):
    (scaled,) = outputs.values()
    return {"label": [state[index] for index in scaled.argmax(1).tolist()]}
"""


class Serving(msgspec.Struct):
    """A node in a separate process."""

    url: str
    port: int
    data: str
    process: subprocess.Popen[str]


@contextmanager
def serving(root: Path, *options: str) -> Iterator[Serving]:
    """Run `overwinter serve` until the context ends; it must then exit successfully and leave nothing in memory."""
    memory = Path(tempfile.mkdtemp(prefix="overwinter-cli-tests-", dir="/dev/shm"))
    where = ("--port", "0", "--data", str(root), "--host-store", str(memory))
    command = [sys.executable, "-m", "overwinter", "serve", "--json", "--no-profile-on-deploy", *where, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            results = json.loads(process.stdout.readline())
            assert results["pid"] == process.pid
            yield Serving(results["url"], results["port"], results["data"], process)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
    assert process.returncode == 0
    # This fails if the directory is not empty.
    memory.rmdir()


@pytest.fixture(scope="session")
def deployer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a deployer's files."""
    root = tmp_path_factory.mktemp("deployer")
    (root / "cli_scale.py").write_text(SOURCE)
    (root / "handler.py").write_text(HANDLER)
    (root / "words.txt").write_text("long short")
    return root


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Yield the node that the tests share, which starts without functions."""
    with serving(tmp_path_factory.mktemp("node") / "data") as node:
        yield node


@pytest.fixture
def run(node: Serving, deployer_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs a command in the deployer's directory against the node and checks its `exit_code`."""
    monkeypatch.setenv("OVERWINTER_URL", node.url)
    return local_run(deployer_dir, monkeypatch)


@pytest.fixture
def local(deployer_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs a command in the deployer's directory, without a node."""
    monkeypatch.delenv("OVERWINTER_URL", raising=False)
    return local_run(deployer_dir, monkeypatch)


def local_run(deployer_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(deployer_dir)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*arguments: str, exit_code: int = 0, text: str | None = None) -> Result:
        result = CliRunner().invoke(main, arguments, input=text, prog_name="overwinter")
        assert result.exit_code == exit_code, (result.output, result.exception)
        return result

    return run


@pytest.fixture
def scale(run: Run) -> str:
    """Deploy a function that scales by 2 and 10, and return its name."""
    run("deploy", "cli_scale:model", "--name", "scale", "--slo", "80ms", "--set", "max_workers=2")
    return "scale"

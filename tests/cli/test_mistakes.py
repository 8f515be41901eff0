"""Common mistakes of new users get one line with the error and the remedy."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run, Serving

SOURCE = """
import torch
from torch.export import Dim

class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, pixels):
        return self.linear(pixels)

class Halves(torch.nn.Module):
    def forward(self, pixels):
        return pixels.reshape(pixels.shape[0] // 2, 2, 2).sum(1)

X = torch.zeros(2, 2)

def bare():
    return Scale(), X

def listed():
    return Scale(), [X]

def ill_shaped():
    return Scale(), (torch.zeros(2, 3),)

def dynamic_by_number():
    return Scale(), (X,), {0: Dim("b")}

def dynamic_list():
    return Scale(), (X,), {"pixels": [0]}

def dynamic_none():
    return Scale(), (X,), {"pixels": None}

def dynamic_tuple():
    return Scale(), (X,), ({0: Dim("b")},)

def dynamic_text():
    return Scale(), (X,), {"0": "batch"}

def dynamic_text_within():
    return Scale(), (X,), {"pixels": {"0": "batch"}}

def even():
    return Halves(), (torch.zeros(4, 2),), {"pixels": {0: 2 * Dim("half")}}

def even_named():
    return Halves(), (torch.zeros(4, 2),), {"pixels": {0: "rows"}}
"""


@pytest.fixture
def mistakes(deployer_dir: Path) -> str:
    """Write a module with invalid models."""
    (deployer_dir / "cli_mistakes.py").write_text(SOURCE)
    return "cli_mistakes"


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ("bare", ["Tensor", "(tensor,)", "{'pixels': tensor}"]),
        ("listed", ["list", "(tensor,)", "{'pixels': tensor}"]),
        ("dynamic_by_number", ["names 0", "{'pixels': {0: 'batch'}}"]),
        ("dynamic_list", ["[0]", "'pixels'", "{'pixels': {0: 'batch'}}"]),
        ("dynamic_none", ["None", "'pixels'", "leave the input out"]),
        ("dynamic_tuple", ["tuple", "{'pixels': {0: 'batch'}}"]),
        ("dynamic_text", ["names '0'", "{'pixels': {0: 'batch'}}"]),
        ("dynamic_text_within", ["'0'", "'pixels'", "{'pixels': {0: 'batch'}}"]),
        ("even", ["2*half", "'pixels'", "write a name"]),
    ],
)
def test_a_model_that_is_given_wrongly_is_refused_in_one_line_with_the_remedy(
    run: Run, mistakes: str, made: str, words: list[str]
) -> None:
    result = run("deploy", f"{mistakes}:{made}", "--name", "never", exit_code=1).stderr
    assert result.startswith("error: ")
    assert len(result.splitlines()) == 1
    assert [word for word in words if word not in result] == []


def test_a_name_written_in_place_of_an_even_size_works(run: Run, mistakes: str) -> None:
    run("deploy", f"{mistakes}:even_named", "--name", "even")
    assert "rows" in run("infer", "even", "-i", f"pixels={[[1, 1]] * 5}", exit_code=1).stderr
    assert "[[2, 2], [2, 2], [2, 2]]" in run("infer", "even", "-i", f"pixels={[[1, 1]] * 6}").stdout


def overwinter(*arguments: str, at: Path) -> subprocess.CompletedProcess[str]:
    """Run the command in a separate process without a terminal."""
    command = [sys.executable, "-m", "overwinter", *arguments]
    return subprocess.run(command, cwd=at, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


def test_an_example_of_the_wrong_shape_is_reported_with_the_line_of_the_model(
    node: Serving, deployer_dir: Path, mistakes: str
) -> None:
    made = overwinter("deploy", f"{mistakes}:ill_shaped", "--name", "never", "--url", node.url, at=deployer_dir)
    assert made.returncode == 1
    assert len(made.stderr.splitlines()) == 1
    assert "pixels [batch, 3]" in made.stderr
    assert "cli_mistakes.py:11" in made.stderr


def test_a_removal_without_a_terminal_needs_the_option_yes(node: Serving, deployer_dir: Path, scale: str) -> None:
    made = overwinter("rm", scale, "--url", node.url, at=deployer_dir)
    assert made.returncode == 2
    assert scale in made.stderr
    assert "--yes" in made.stderr
    assert overwinter("show", scale, "--url", node.url, at=deployer_dir).returncode == 0


@pytest.mark.parametrize("arguments", [("cli_scale:model", "--name", "f", "--handler", "bad.py"), ("bad.toml",)])
def test_a_file_that_is_not_text_is_refused(
    node: Serving, local: Run, deployer_dir: Path, arguments: tuple[str, ...]
) -> None:
    for name in ("bad.py", "bad.toml"):
        (deployer_dir / name).write_bytes(b"\xff\xfe")
    result = local("deploy", *arguments, "--url", node.url, exit_code=1).stderr
    assert result.startswith("error: bad.")
    assert "UTF-8" in result


def test_a_bandwidth_of_zero_is_refused(local: Run, tmp_path: Path) -> None:
    assert (
        "--device-bandwidth" in local("elbow", "--data", str(tmp_path), "--device-bandwidth", "0", exit_code=2).stderr
    )


def test_a_measurement_without_a_node_fails_with_the_remedy(local: Run) -> None:
    for more in ([], ["--known"]):
        result = local("profile", "f", *more, "--url", "http://127.0.0.1:1", exit_code=1).stderr
        assert result.startswith("error: no node answers at http://127.0.0.1:1")
        assert "overwinter serve" in result
        assert len(result.splitlines()) == 1


@pytest.mark.parametrize(("kind", "file"), [("minute-counts", "a.npy"), ("timestamps", "a.csv")])
def test_a_simulation_without_its_traces_fails_with_the_remedy(
    local: Run, tmp_path: Path, kind: str, file: str
) -> None:
    workload = f'workload = {{ kind = "{kind}", path = "recorded/{file}" }}'
    (tmp_path / "s.toml").write_text(
        'duration_s = 5\n[[functions]]\nname = "f"\nblocks = [{ mib = 1 }]\nlatency_ms = { 1 = 20 }\n'
        f"settings = {{ slo_ms = 100 }}\n{workload}\n"
    )
    for more in ([], ["--capacity", "0.9"]):
        result = local("simulate", f"{tmp_path}/s.toml", "--no-figures", *more, exit_code=1).stderr
        assert f"{tmp_path}/recorded/{file}" in result
        assert "--traces" in result
        assert len(result.splitlines()) == 1

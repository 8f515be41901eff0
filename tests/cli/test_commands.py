"""Commands that deploy, call, show and remove functions, against a real node."""

import json
import os
import pickle
import pty
import signal
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch

from overwinter.api.client import GRACE_S, Client
from overwinter.api.deployer import DEPLOY_TIMEOUT_S
from overwinter.core.errors import NotFoundError
from tests.cli.conftest import Run, Serving


@pytest.fixture
def labels(run: Run) -> str:
    """Deploy a function with a handler for which texts of 5 letters and more are long, and return its name."""
    files = ("--handler", "handler.py", "--asset", "words=words.txt")
    run("deploy", "cli_scale:model", "--name", "labels", *files)
    return "labels"


def test_deploy_reports_the_bytes_that_it_sent(run: Run) -> None:
    first = json.loads(run("deploy", "cli_scale:model", "--name", "twins", "--json").stdout)
    second = run("deploy", "cli_scale:model", "--name", "twins")
    assert (first["name"], first["version"]) == ("twins", 1)
    assert first["nbytes"] >= first["added_bytes"]
    assert second.stdout.startswith("twins@2: ")
    assert "0 B sent" in second.stdout
    # Standard error is not a terminal here.
    assert second.stderr == ""
    assert run("infer", "twins@1", "-i", "x=[1, 1]").stdout.splitlines()[-1].startswith("twins@1, ")


def test_a_batch_that_would_mix_callers_is_refused_and_one_request_per_run_is_explained(run: Run) -> None:
    refused = run("deploy", "cli_scale:centred", "--name", "centred", "--set", "max_batch=4", exit_code=1)
    assert "max_batch is 4" in refused.stderr
    assert "'output'" in refused.stderr
    run("deploy", "cli_scale:centred", "--name", "centred")
    assert "one request per run: " in run("show", "centred").stdout


def test_a_size_that_cannot_be_one_is_reported_and_a_request_of_one_is_refused_with_the_range(run: Run) -> None:
    result = run("deploy", "cli_scale:paired", "--name", "paired")
    assert "batch is at least 2" in result.stderr
    assert "batch is at least 2" in run("show", "paired").stdout
    assert "2 to 1024" in run("infer", "paired", "-i", "x=[[1, 1]]", exit_code=1).stderr
    assert "[[1, 1], [3, 1]]" in run("infer", "paired", "-i", "x=[[1, 1], [3, 1]]").stdout


NUMBERS = """
import torch

INPUTS = [{"name": "row", "datatype": "BYTES", "shape": [1]}]
OUTPUTS = [{"name": "y", "datatype": "FP32", "shape": [1, 2]}]

def preprocess(inputs, state):
    return {"x": torch.tensor([[float(item) for item in inputs["row"][0].split()]])}

def postprocess(outputs, inputs, state):
    return {"y": list(outputs.values())[0]}
"""


def test_a_missing_sample_is_reported_before_the_module_is_imported(run: Run, deployer_dir: Path) -> None:
    result = run("deploy", "nowhere:model", "--name", "none", "--sample", "x=@none.npy", exit_code=1)
    assert "none.npy" in result.stderr


def test_a_file_that_is_more_than_data_needs_trust(run: Run, deployer_dir: Path) -> None:
    model = torch.export.export(torch.nn.Linear(2, 2).eval(), (torch.ones(1, 2),))
    torch.export.save(model, deployer_dir / "plain.pt2")
    run("deploy", "plain.pt2", "--name", "plain")
    with zipfile.ZipFile(deployer_dir / "plain.pt2") as plain, zipfile.ZipFile(deployer_dir / "evil.pt2", "w") as evil:
        for name in plain.namelist():
            evil.writestr(name, pickle.dumps(Path("ran")) if "sample_inputs" in name else plain.read(name))
    result = run("deploy", "evil.pt2", "--name", "evil", exit_code=1).stderr
    assert "evil.pt2" in result
    assert "--trust" in result
    refused = run("deploy", "cli_scale:model", "--name", "x", "--trust", exit_code=2).stderr
    assert "--trust is for files and directories only" in refused


def test_a_handler_is_tried_on_a_sample_or_the_deploy_warns(run: Run, deployer_dir: Path) -> None:
    (deployer_dir / "rows.py").write_text(NUMBERS)
    words = ("deploy", "cli_scale:model", "--name", "numbers", "--handler", "rows.py")
    doubted = run(*words)
    assert doubted.stderr.startswith("warning: ")
    assert "--sample" in doubted.stderr
    assert "could not convert" in json.loads(run(*words, "--json").stdout)["warning"]
    sure = run(*words, "--sample", "row=1 2")
    assert sure.stdout.startswith("numbers@3: ")
    assert sure.stderr == ""
    assert "sample 1" in run(*words, "--sample", "row=1 two", exit_code=1).stderr
    assert "unknown input 'x'" in run(*words, "--sample", "x=1", exit_code=1).stderr
    assert "[[10, 60]]" in run("infer", "numbers", "-i", "row=5 6").stdout


def test_a_function_is_listed_shown_called_unloaded_loaded_and_removed(
    run: Run, scale: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = [each for each in json.loads(run("ps", "--json").stdout) if each["name"] == scale]
    described = json.loads(run("show", scale, "--json").stdout)
    assert described["version"] == listed[-1]["version"]
    assert described["settings"]["max_workers"] == 2
    lines = run("ps").stdout.splitlines()
    assert [line for line in lines if line.split()[:3] == [scale, str(described["version"]), "READY"]]
    shown = run("show", f"{scale}@{described['version']}").stdout
    assert "FP32 [batch, 2]" in shown
    assert "max_workers" in shown
    assert "equal bit for bit, at 3 sizes" in shown
    assert "requests may share a run" in shown
    assert described["agreement"]["outputs"]["output"] == {"exact": True, "difference": 0}

    with monkeypatch.context() as patch:
        asked, infer = [], Client.infer
        patch.setattr(Client, "infer", lambda client, *given: asked.append(given) or infer(client, *given))
        run("infer", scale, "-i", "x=[1, 1]")
        run("infer", scale, "-i", "x=[1, 1]", "--timeout", "3s")
    limit_s = described["settings"]["timeout_s"]
    assert [given[-2:] for given in asked] == [(None, limit_s + GRACE_S), (3.0, 3.0 + GRACE_S)]

    assert run("unload", f"{scale}@{described['version']}").stdout == f"unloaded scale@{described['version']}\n"
    with monkeypatch.context() as patch:
        waits, load = [], Client.load
        patch.setattr(Client, "load", lambda client, *given: waits.append(client._timeout_s) or load(client, *given))
        assert json.loads(run("load", scale, "--json").stdout) == {"loaded": scale}
    assert waits == [DEPLOY_TIMEOUT_S]
    assert run("unload", scale).stdout == "unloaded scale\n"
    refused = run("infer", scale, "-i", "x=[1, 1]", exit_code=1)
    assert refused.stderr.startswith("error: ")
    assert "unloaded" in refused.stderr
    assert json.loads(run("load", scale, "--json").stdout) == {"loaded": scale}
    assert "[[2, 10]]" in run("infer", scale, "-i", "x=[1, 1]").stdout

    assert run("rm", scale, text="n\n").stdout == ""
    assert "--yes" in run("rm", scale, exit_code=2, text="").stderr
    assert json.loads(run("rm", f"{scale}@{described['version']}", "--yes", "--json").stdout) == {
        "removed": scale,
        "version": described["version"],
    }
    gone = run("show", f"{scale}@{described['version']}", exit_code=1)
    assert gone.stderr.startswith("error: no function 'scale@")


def test_one_command_removes_all_versions_after_the_user_confirms(run: Run) -> None:
    run("deploy", "cli_scale:model", "--name", "leaving")
    for command in (("rm", "leaving", "--yes"), ("load", "leaving"), ("unload", "leaving"), ("profile", "leaving")):
        assert "does not belong to tenant" in run(*command, "--tenant", "other", exit_code=1).stderr
    assert "leaving" in run("ps").stdout
    assert "leaving" not in run("ps", "--tenant", "other").stdout
    assert run("rm", "leaving", text="y\n").stdout == "removed all versions of leaving\n"
    run("rm", "leaving", "--yes", exit_code=1)


def test_infer_prints_json_for_programs(run: Run, scale: str, deployer_dir: Path) -> None:
    numpy.save(deployer_dir / "x.npy", numpy.array([[1, 2], [3, 4]], dtype="float32"))
    version = json.loads(run("show", scale, "--json").stdout)["version"]
    results = json.loads(run("infer", f"{scale}@{version}", "-i", "x=@x.npy", "--json").stdout)
    assert (results["name"], results["version"]) == (scale, version)
    assert results["start"] in ("warm", "host", "disk")
    assert results["milliseconds"] > 0
    (output,) = results["outputs"]
    assert (output["datatype"], output["shape"], output["data"]) == ("FP32", [2, 2], [[2, 20], [6, 40]])


def test_numbers_that_json_has_no_word_for_go_in_and_come_out(run: Run, scale: str) -> None:
    result = run("infer", scale, "-i", 'x=[["Infinity", 1], ["NaN", 1], [NaN, -1], [1, -Infinity]]', "--json").stdout
    (output,) = json.loads(result, parse_constant=pytest.fail)["outputs"]
    # Each row is multiplied by [[2, 0], [0, 10]], and infinity times 0 is NaN.
    assert output["data"] == [["Infinity", "NaN"], ["NaN", "NaN"], ["NaN", "NaN"], ["NaN", "-Infinity"]]


def test_infer_prints_outputs_and_the_latency_for_people(run: Run, scale: str) -> None:
    printed = run("infer", scale, "--from", "-", "--timeout", "20s", text='{"x": [1, 2]}').stdout
    assert "[[2, 20]]" in printed
    assert printed.splitlines()[-1].startswith("scale@")
    assert printed.splitlines()[-1].endswith(" ms")


def test_infer_accepts_a_request_of_the_open_inference_protocol(run: Run, scale: str, deployer_dir: Path) -> None:
    request = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [5, 6]}]}
    (deployer_dir / "request.json").write_text(json.dumps(request))
    assert "[[10, 60]]" in run("infer", scale, "--from", "request.json").stdout


def test_text_goes_in_and_out(run: Run, labels: str) -> None:
    assert '["long"]' in run("infer", labels, "-i", "text=a long line of words").stdout
    results = json.loads(run("infer", labels, "-i", 'text=["a long line of words", ""]', "--json").stdout)
    assert results["outputs"] == [{"name": "label", "datatype": "BYTES", "shape": [2], "data": ["long", "short"]}]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-i", "z=1"], "unknown input 'z'"),
        (["-i", "x=[1, 2, 3]"], "input 'x' has shape [1, 3]"),
        (["-i", "x=@missing.npy"], "missing.npy: No such file or directory"),
        (["-i", "x=[1, 2]", "--timeout", "soon"], "'soon' is not a duration"),
        (["-i", "x=[1, 2]", "--timeout", "0s"], "--timeout 0s"),
        ([], "input 'x' is missing"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_in_one_line(run: Run, scale: str, arguments: list[str], words: str) -> None:
    failed = run("infer", scale, *arguments, exit_code=1)
    assert failed.stderr.startswith("error: ")
    assert words in failed.stderr
    assert len(failed.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["cli_scale:model", "--set", "max_workers=0"], "max_workers must be from 1 to 4,096"),
        (["cli_scale:model", "--set", "color=red"], "color"),
        (["cli_scale:model", "--slo", "fast"], "'fast' is not a duration"),
        (["cli_scale:failing"], "no weights"),
        (["nothing"], "neither module:callable"),
        (["cli_scale:model", "--asset", "words=none.txt", "--handler", "handler.py"], "none.txt: No such file"),
    ],
)
def test_a_deploy_that_fails_reports_the_reason_and_registers_no_function(
    run: Run, arguments: list[str], words: str
) -> None:
    failed = run("deploy", "--name", "never", *arguments, exit_code=1)
    assert failed.stderr.startswith("error: ")
    assert words in failed.stderr
    run("show", "never", exit_code=1)


def test_a_deploy_shows_what_it_does_and_can_be_interrupted(node: Serving, deployer_dir: Path) -> None:
    screen, terminal = pty.openpty()
    command = [sys.executable, "-m", "overwinter", "deploy", "cli_scale:waiting", "--name", "never", "--url", node.url]
    # A shell that runs the tests in the background ignores interrupts, and its children inherit this.
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=terminal, text=True, cwd=deployer_dir, preexec_fn=heeds
    ) as process:
        os.close(terminal)
        shown = read_until(screen, "waiting here")
        process.send_signal(signal.SIGINT)
        shown += read_until(screen, "interrupted")
        assert process.wait(30) == 130
        assert process.stdout is not None
        assert process.stdout.read() == ""
    os.close(screen)
    assert "loading cli_scale:waiting" in shown
    assert "Traceback" not in shown


def read_until(screen: int, words: str) -> str:
    """Return the output of a terminal up to `words`; raise OSError if its program ends before."""
    shown = b""
    while words.encode() not in shown:
        shown += os.read(screen, 4096)
    return shown.decode()


def test_rm_removes_a_function_whose_only_version_is_on_trial(local: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[tuple[str, int | None]] = []

    def function(client: Client, name: str, version: int | None = None) -> dict[str, object]:
        raise NotFoundError(f"no function {name!r} here")

    monkeypatch.setattr(Client, "function", function)
    monkeypatch.setattr(Client, "functions", lambda client: [{"name": "tried", "version": 1}])
    monkeypatch.setattr(Client, "remove", lambda client, *which: removed.append(which))
    local("rm", "tried", "--yes")
    assert "no function 'absent'" in local("rm", "absent", "--yes", exit_code=1).output
    assert removed == [("tried", None)]

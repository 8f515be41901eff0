"""A pipeline from the command line: deployed, listed, shown, called and removed like a function."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run

TOML = """
name = "twice"
inputs = ["x"]
slo_ms = 5000

[stages.once]
function = "scale"
inputs = { x = "input:x" }

[stages.again]
function = "scale"
inputs = { x = "once:OUTPUT" }

[outputs]
y = "again:OUTPUT"
"""


@pytest.fixture
def twice(run: Run, scale: str, deployer_dir: Path) -> str:
    output = json.loads(run("show", scale, "--json").stdout)["outputs"][0]["name"]
    (deployer_dir / "twice.toml").write_text(TOML.replace("OUTPUT", output))
    return "twice.toml"


def test_a_pipeline_is_deployed_called_listed_shown_and_removed(run: Run, twice: str) -> None:
    said = run("deploy", twice).stdout
    version = said.partition(":")[0].partition("@")[2]
    assert said == f"twice@{version}: a pipeline of 2 stages\n"
    assert "[[4, 100]]" in run("infer", "twice", "-i", "x=[1, 1]").stdout
    lines = run("ps").stdout.splitlines()
    assert [line.split()[:5] for line in lines if line.startswith("twice ")] == [["twice", version, "READY", "0", "1"]]
    assert [each["name"] for each in json.loads(run("ps", "--json").stdout)][-1] == "twice"
    shown = run("show", "twice").stdout
    assert "scale, inputs: x from input:x" in shown
    assert "FP32 [once.batch, 2]" in shown
    assert json.loads(run("show", "twice", "--json").stdout)["stages"]["once"]["function"] == "scale"

    refused = run("rm", "scale", "--yes", exit_code=1)
    assert "remove pipeline 'twice' first" in refused.stderr
    assert run("rm", "twice", text="y\n").stdout == "removed twice\n"
    run("show", "twice", exit_code=1)
    run("rm", "scale", "--yes")


def test_a_pipeline_that_cannot_be_deployed_is_refused_with_the_reason(
    run: Run, twice: str, deployer_dir: Path
) -> None:
    failed = run("deploy", twice, "--name", "other", exit_code=2)
    assert "leave out the options for functions" in failed.stderr
    assert "Missing option '--name'" in run("deploy", "cli_scale:model", exit_code=2).stderr
    (deployer_dir / "wrong.toml").write_text((deployer_dir / twice).read_text().replace("[outputs]", "[output]"))
    failed = run("deploy", "wrong.toml", exit_code=1)
    assert failed.stderr.startswith("error: the pipeline is not valid: ")
    assert "missing.toml: No such file" in run("deploy", "missing.toml", exit_code=1).stderr

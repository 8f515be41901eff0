"""The systemd unit and the Dockerfile match the node, and the unit's permissions suffice for the sandbox."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

from overwinter.api.app import CLOSE_WAIT_S
from overwinter.cli.main import main
from overwinter.cli.serve import serve

from .nodes import NodeProcess, ask, deploy, wait_until

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "packaging" / "overwinter.service"
DOCKERFILE = ROOT / "packaging" / "Dockerfile"
HANDLER = """
import os

def postprocess(outputs, inputs, state):
    print("user", os.getuid(), flush=True)
    return outputs
"""
GROUPS = ("threads are not bounded together", "cores are not shared among tenants")
"""Reports that are allowed where the machine's control groups differ from the unit's."""


@pytest.fixture
def unit() -> dict[str, str]:
    """Return the section Service."""
    parser = ConfigParser(delimiters=("=",), comment_prefixes=("#",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(UNIT)
    return dict(parser["Service"])


def options_of(command: list[str]) -> dict[str, object]:
    """Parse the arguments of `overwinter serve`; the test fails at an unknown one."""
    assert command[0] == "serve"
    with main.make_context("overwinter", command, resilient_parsing=True) as whole:
        return serve.make_context("serve", command[1:], parent=whole).params


def test_the_unit_starts_a_node_with_valid_options(unit):
    command = shlex.split(unit["ExecStart"])
    options = options_of(command[1:])
    assert options["data"] == f"/var/lib/{unit['StateDirectory']}"
    # After the timeout everything is killed, so it must come after the drain.
    assert int(unit["TimeoutStopSec"]) > options["drain_s"] + 10
    # systemd ends the node, and the node its workers, each within its limit.
    assert (unit["KillMode"], unit["Delegate"]) == ("mixed", "yes")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_verifies_the_unit(tmp_path):
    installed = UNIT.read_text().replace("/opt/overwinter/bin/overwinter", sys.executable)
    for text, found in ((installed, False), (installed.replace("KillMode=", "KilMode="), True)):
        place = tmp_path / UNIT.name
        place.write_text(text)
        result = subprocess.run(["systemd-analyze", "verify", place], capture_output=True, text=True)
        assert (UNIT.name in result.stdout + result.stderr) == found, result.stderr


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and util-linux")
def test_the_units_permissions_suffice_to_sandbox_and_end_workers(unit, make_node, monkeypatch):
    capabilities = [f"+{name.removeprefix('CAP_').lower()}" for name in unit["CapabilityBoundingSet"].split()]
    limited = ["setpriv", f"--bounding-set={','.join(['-all', *capabilities])}", "--inh-caps=-all", "--no-new-privs"]
    run = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: run([*limited, *command], **options))
    node: NodeProcess = make_node()
    monkeypatch.undo()
    deploy(node, "f", handler=HANDLER)
    assert ask(node, "f") == [3.0] * 4
    wait_until(lambda: any("user" in line for line in node.said))
    [user] = {line.split()[-1] for line in node.said if "user" in line}
    assert int(user) > 0
    lacking = [line for line in node.said if "not fully contained" in line]
    assert [line for line in lacking if not any(each in line for each in GROUPS)] == []
    node.client.remove("f")
    node.stop()
    assert node.process.returncode == 0


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile with their arguments, continued lines joined."""
    text = re.sub(r"(?m)^#.*\n", "", DOCKERFILE.read_text())
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(words[0], words[2]) for line in lines if line.strip() and (words := line.partition(" "))]


def test_the_dockerfile_copies_existing_files_and_runs_as_an_ordinary_user():
    found = instructions()
    known = "FROM ARG WORKDIR RUN COPY ENV VOLUME EXPOSE USER HEALTHCHECK STOPSIGNAL ENTRYPOINT CMD"
    assert {name for name, _ in found} <= set(known.split())
    copied = [word for name, rest in found if name == "COPY" and "--from" not in rest for word in rest.split()[:-1]]
    assert copied
    assert [name for name in copied if not (ROOT / name).exists()] == []
    kept = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().split()
    assert {f"!{name}" for name in copied} <= set(kept)
    assert all(":" in rest.split()[0] for name, rest in found if name == "FROM")
    [user] = [rest for name, rest in found if name == "USER"]
    assert user not in ("root", "0")


def test_the_container_has_the_pinned_pytorch_of_the_given_index():
    installs = [rest for name, rest in instructions() if name == "RUN" and "pip install" in rest]
    assert all("-c constraints.txt" in rest for rest in installs)
    assert installs[0].endswith(" torch")
    assert "--index-url" in installs[0]
    assert any(name == "ARG" and rest.startswith("TORCH_INDEX") for name, rest in instructions())
    assert re.search(r"^torch==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


def test_the_container_starts_a_node_with_valid_options(monkeypatch):
    found = dict(instructions())
    assert json.loads(found["ENTRYPOINT"]) == ["overwinter"]
    own = [pair.split("=", 1) for pair in found["ENV"].split() if pair.startswith("OVERWINTER_")]
    for name, value in own:
        monkeypatch.setenv(name, value)
    options = options_of(json.loads(found["CMD"]))
    assert {name.removeprefix("OVERWINTER_").lower() for name, _ in own} <= options.keys()
    assert (options["host"], options["data"], options["log_format"]) == ("0.0.0.0", found["VOLUME"], "json")
    assert str(options["port"]) == found["EXPOSE"]
    # Docker kills after ten seconds; the answers are sent by then, and time is left to end the workers.
    assert found["STOPSIGNAL"] == "SIGTERM"
    assert options["drain_s"] + CLOSE_WAIT_S + 2 <= 10


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_wheel_has_all_files_of_the_package(tmp_path):
    copy, source = tmp_path / "copy", ROOT / "src"
    # A build in the checkout would keep its files there, and put deleted modules into later wheels.
    shutil.copytree(source, copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(copy)]
    subprocess.run(command, check=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("overwinter/")}
    files = [path for path in (source / "overwinter").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert packed == {str(path.relative_to(source)) for path in files}


def can_build() -> bool:
    docker = shutil.which("docker")
    return docker is not None and subprocess.run([docker, "info"], capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not can_build(), reason="needs a Docker daemon")
def test_the_container_is_built_and_has_a_tested_pytorch(tmp_path):
    """With PIP_EXTRA_INDEX_URL, the index of CPU builds, as in the README; otherwise with pip's default build."""
    image, index = tmp_path / "image", os.environ.get("PIP_EXTRA_INDEX_URL", "").partition(" ")[0]
    build = ["docker", "build", "--iidfile", str(image), "--build-arg", f"TORCH_INDEX={index}", "-f", str(DOCKERFILE)]
    subprocess.run([*build, str(ROOT)], check=True)
    run = ["docker", "run", "--rm", image.read_text(), "doctor", "--json"]
    results = json.loads(subprocess.run(run, capture_output=True, text=True).stdout)
    [pytorch] = [each for each in results if each["what"] == "PyTorch"]
    assert "is not tested" not in pytorch["found"]
    assert pytorch["level"] in (["ok"] if index else ["ok", "warning"])

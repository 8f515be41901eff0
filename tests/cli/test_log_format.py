"""The node's log as JSON: one object per line with time, level, logger and message, and the function if any."""

import json
import logging
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from datetime import datetime
from pathlib import Path

import click
import pytest

from overwinter.cli.log_format import JsonFormatter, log, logging_to_stderr
from tests.cli.conftest import Run

PRINTS = """
def preprocess(inputs, state):
    print("called\\twith \\"quotes\\"", flush=True)
    return inputs
"""


def test_every_log_line_of_a_node_is_a_json_object(local: Run, deployer_dir: Path, tmp_path: Path) -> None:
    (deployer_dir / "speaks.py").write_text(PRINTS)
    memory = Path(tempfile.mkdtemp(prefix="overwinter-cli-tests-", dir="/dev/shm"))
    where = ["--port", "0", "--data", str(tmp_path / "data"), "--host-store", str(memory), "--no-profile-on-deploy"]
    command = [sys.executable, "-m", "overwinter", "serve", "--log-format", "json", *where]
    lines: list[dict[str, str]] = []
    heard = threading.Condition()

    def listen() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            with heard:
                lines.append(json.loads(line))
                heard.notify()

    def line_with(words: str) -> dict[str, str]:
        with heard:
            assert heard.wait_for(lambda: any(words in line["message"] for line in lines), 60)
        return next(line for line in lines if words in line["message"])

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        listening = threading.Thread(target=listen)
        listening.start()
        try:
            ready = line_with("overwinter is ready at http://")
            url = ready["message"].split()[-1]
            local("deploy", "cli_scale:model", "--name", "speaks", "--handler", "speaks.py", "--url", url)
            local("infer", "speaks", "-i", "x=[[1, 2], [3, 4]]", "--url", url)
            printed = line_with("called")
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.stdout is not None
            said = process.stdout.read()
            listening.join()
    memory.rmdir()
    assert (process.returncode, said) == (0, "")
    assert (ready["level"], ready["logger"]) == ("info", "overwinter.node")
    assert (printed["level"], printed["function"]) == ("info", "speaks@1")
    assert 'with "quotes"' in printed["message"]
    for line in lines:
        assert {"time", "level", "logger", "message"} <= line.keys()
        assert datetime.fromisoformat(line["time"]).tzinfo is not None


@pytest.mark.parametrize(
    ("options", "code", "levels", "said"),
    [
        ((), 1, ["error"], "--port"),
        (("--host", "0.0.0.0"), 2, ["error"], "--insecure"),
        (("--host", "0.0.0.0", "--insecure"), 1, ["warning", "error"], "--port"),
    ],
    ids=["a port that is taken", "wrong usage", "after a warning"],
)
def test_why_a_node_does_not_start_is_a_line_of_the_log(
    local: Run, tmp_path: Path, options: tuple[str, ...], code: int, levels: list[str], said: str
) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        where = ("--port", str(taken.getsockname()[1]), "--data", str(tmp_path), "--log-format", "json")
        failed = local("serve", *where, *options, exit_code=code)
    lines = [json.loads(line) for line in failed.stderr.splitlines()]
    assert [line["level"] for line in lines] == levels
    assert said in lines[-1]["message"]


def test_why_a_node_fails_is_a_line_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(click.exceptions.Exit) as ended, logging_to_stderr("json"):
        raise ExceptionGroup("tasks", [ZeroDivisionError("so")])
    assert ended.value.exit_code == 1
    [line] = map(json.loads, capsys.readouterr().err.splitlines())
    assert line["exception"].rstrip().endswith("ZeroDivisionError: so\n    +------------------------------------")


def test_the_line_of_an_error_has_its_traceback_function_and_request(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("overwinter.tests")
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        logger.error("it failed: %s", "so", exc_info=error, extra={"function": "f", "request": "a\nb"})
    line = JsonFormatter().format(caplog.records[0])
    assert "\n" not in line
    results = json.loads(line)
    assert (results["message"], results["level"], results["logger"]) == ("it failed: so", "error", "overwinter.tests")
    assert (results["function"], results["request"]) == ("f", "a\nb")
    assert results["exception"].endswith("ValueError: two\nlines")


def test_a_line_of_text_stays_one_line_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_to_stderr("text"):
        log("function b@1 failed: \x1b[31mevil\r\nfunction a@1 was removed\x9b\u2028\x00")
    assert capsys.readouterr().err == "function b@1 failed: \ufffd[31mevil function a@1 was removed\ufffd \ufffd\n"

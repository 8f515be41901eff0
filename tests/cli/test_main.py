"""Common properties of all commands: help, exit codes, and few imports."""

import errno
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from overwinter.cli.main import Commands, main
from overwinter.cli.token import token
from overwinter.core.errors import HandlerError, NotFoundError, StoreError
from tests.cli.conftest import Run, Serving

COMMANDS = [
    "deploy", "devices", "doctor", "elbow", "explain", "infer", "load", "logs", "profile", "promote", "ps", "rm",
    "serve", "show", "simulate", "split", "token", "top", "unload", "usage",
]  # fmt: skip
TOKEN_COMMANDS = ["create", "limit", "list", "revoke"]


def test_every_command_has_help_and_json(local: Run) -> None:
    assert sorted(main.commands) == COMMANDS
    assert sorted(token.commands) == TOKEN_COMMANDS
    for name in [*([name] for name in COMMANDS if name != "token"), *(["token", name] for name in TOKEN_COMMANDS)]:
        text = local(*name, "-h").stdout
        assert "--json" in text
        assert text == local(*name, "--help").stdout


def test_the_version_is_printed(local: Run) -> None:
    assert local("--version").stdout.startswith("overwinter ")


def test_help_imports_no_heavy_library() -> None:
    code = (
        "import sys\n"
        "from overwinter.cli.main import main\n"
        "try:\n"
        "    main(['ps', '--help'])\n"
        "except SystemExit as end:\n"
        "    heavy = ('torch', 'numpy', 'httpx', 'rich', 'uvicorn')\n"
        "    print(end.code, [name for name in heavy if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


def test_asking_a_node_imports_neither_array_libraries_nor_a_server(node: Serving) -> None:
    code = (
        "import sys\n"
        "from overwinter.cli.main import main\n"
        f"main(['ps', '--url', '{node.url}'], standalone_mode=False)\n"
        "print([name for name in ('torch', 'numpy', 'uvicorn') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_command_without_a_node_fails_with_one_line(local: Run) -> None:
    failed = local("ps", "--url", "http://127.0.0.1:1", exit_code=1)
    assert failed.stderr.startswith("error: ")
    assert "127.0.0.1:1" in failed.stderr
    assert len(failed.stderr.splitlines()) == 1
    assert failed.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["nap"],
        ["ps", "--url", "127.0.0.1:8000"],
        ["show"],
        ["show", "name@x"],
        ["infer", "name", "--input", "x"],
        ["infer", "name", "--from", "/nowhere/at/all.json"],
        ["serve", "--port", "70000"],
        ["serve", "--host-bytes", "much"],
        ["deploy", "x:y"],
        ["deploy", "x:y", "--name", "Not A Name"],
        ["deploy", "x:y", "--name", "x", "--tenant", "../x"],
        ["deploy", "x:y", "--name", "x", "--asset", "a/b=handler.py", "--handler", "handler.py"],
        ["deploy", "x:y", "--name", "x", "--asset", "words=words.txt"],
        ["deploy", "x:y", "--name", "x", "--asset", "words=words.txt", "--task", "text-classification"],
    ],
)
def test_wrong_usage_ends_with_exit_code_2(local: Run, arguments: list[str]) -> None:
    failed = local(*arguments, exit_code=2)
    assert "Error: " in failed.stderr
    assert failed.stdout == ""


@pytest.mark.parametrize(
    ("raised", "exit_code", "words"),
    [
        (NotFoundError("no function 'x'"), 1, "error: no function 'x'\n"),
        (NotFoundError(""), 1, "error: NotFoundError\n"),
        (PermissionError(errno.EACCES, "Permission denied", "/srv/x"), 1, "error: /srv/x: Permission denied\n"),
        (OSError("a plain word"), 1, "error: a plain word\n"),
        (HandlerError("a\x1b]0;b\x07\x9b31m\rc\u202e\n\tdé"), 1, "error: a�]0;b��31m�c�\n\tdé\n"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, ""),
        (
            ExceptionGroup("", [StoreError("a"), ExceptionGroup("", [OSError(errno.ENOSPC, "No space left")])]),
            1,
            "error: a\nerror: No space left\n",
        ),
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
        (click.Abort(), 130, "\ninterrupted\n"),
    ],
)
def test_an_error_determines_the_exit_code_and_the_text_of_a_command(
    raised: BaseException, exit_code: int, words: str
) -> None:
    result = CliRunner().invoke(raising(raised), ["command"])
    assert (result.exit_code, result.stderr) == (exit_code, words)


@pytest.mark.parametrize("raised", [ZeroDivisionError(), ExceptionGroup("", [StoreError("a"), ZeroDivisionError()])])
def test_an_unexpected_error_keeps_its_traceback(raised: Exception) -> None:
    with pytest.raises(type(raised)):
        raising(raised).main(["command"], standalone_mode=False)


def raising(error: BaseException) -> click.Group:
    @click.command()
    def command() -> None:
        raise error

    return Commands("test", commands={"command": command})

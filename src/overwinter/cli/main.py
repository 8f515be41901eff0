"""The command `overwinter` and its exit codes.

Exit codes: 0 success, 1 an error (each expected one is printed as one line) or a check of `doctor` that found that a
node cannot run, 2 wrong usage, 130 interrupted. Commands import slow modules (the HTTP client, tables, PyTorch) inside
their functions, so that `--help` answers at once.
"""

import errno
from collections.abc import Iterable
from typing import Any, NoReturn

import click

from overwinter.cli.deploy import deploy
from overwinter.cli.doctor import doctor
from overwinter.cli.elbow import elbow
from overwinter.cli.failures import EXPECTED_ERRORS, error_text, expected_errors
from overwinter.cli.functions import load, ps, rm, show, unload
from overwinter.cli.infer import infer
from overwinter.cli.options import echo
from overwinter.cli.profile import profile
from overwinter.cli.serve import serve
from overwinter.cli.simulate import simulate
from overwinter.cli.telemetry import devices, explain, logs, top, usage
from overwinter.cli.token import token
from overwinter.cli.traffic import promote, split

INTERRUPTED = 130


class Commands(click.Group):
    """The group of all commands. It turns expected errors into messages and exit codes."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; print each expected error as one line."""
        try:
            return super().invoke(ctx)
        except EXPECTED_ERRORS as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                # The reader of the pipe has closed it, as with `| head`; click handles this quietly.
                raise
            _fail(ctx, [error])
        except ExceptionGroup as group:
            if not (errors := expected_errors(group)):
                raise
            _fail(ctx, errors)
        except (KeyboardInterrupt, click.Abort):
            click.echo("\ninterrupted", err=True)
            ctx.exit(INTERRUPTED)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True, "auto_envvar_prefix": "OVERWINTER"},
)
@click.version_option(package_name="overwinter", message="%(prog)s %(version)s")
def main() -> None:
    """Serverless inference for many models on one machine."""


for _command in (
    serve,
    deploy,
    ps,
    show,
    infer,
    rm,
    load,
    unload,
    promote,
    split,
    simulate,
    profile,
    top,
    devices,
    explain,
    logs,
    usage,
    doctor,
    elbow,
    token,
):
    main.add_command(_command)


def _fail(ctx: click.Context, errors: Iterable[Exception]) -> NoReturn:
    for error in errors:
        echo(f"error: {error_text(error)}", err=True)
    ctx.exit(1)

"""The command `overwinter` and its exit codes.

Exit codes: 0 success, 1 an error with a message of one line, 2 wrong usage, 130 interrupted. Commands import slow
modules (the HTTP client, tables, PyTorch) inside their functions, so that `--help` answers at once.
"""

import errno
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import click

from overwinter.cli.deploy import deploy
from overwinter.cli.doctor import doctor
from overwinter.cli.functions import load, ps, rm, show, unload
from overwinter.cli.infer import infer
from overwinter.cli.options import printable
from overwinter.cli.profile import profile
from overwinter.cli.serve import serve
from overwinter.cli.simulate import simulate
from overwinter.cli.telemetry import explain, logs, top, usage
from overwinter.cli.token import token
from overwinter.cli.traffic import promote, split
from overwinter.core.errors import OverwinterError

INTERRUPTED = 130
FORESEEN = (OverwinterError, OSError)
"""What is raised on purpose, and what the system refuses: told in words, without a traceback."""


class Commands(click.Group):
    """The group of all commands, and the border at which errors become words and exit codes."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; errors that are foreseen are told in one line each."""
        try:
            return super().invoke(ctx)
        except FORESEEN as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                # Nobody reads on, as with `| head`: click ends quietly.
                raise
            _fail(ctx, [error])
        except ExceptionGroup as group:
            if group.split(FORESEEN)[1] is not None:
                raise
            _fail(ctx, _leaves(group))
        except (KeyboardInterrupt, click.Abort):
            click.echo("\ninterrupted", err=True)
            ctx.exit(INTERRUPTED)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True, "auto_envvar_prefix": "OVERWINTER"},
)
@click.version_option(package_name="overwinter", message="%(prog)s %(version)s")
def main() -> None:
    """Serverless inference for many models on few machines."""


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
    explain,
    logs,
    usage,
    doctor,
    token,
):
    main.add_command(_command)


def _fail(ctx: click.Context, errors: Iterable[Exception]) -> NoReturn:
    for error in errors:
        click.echo(f"error: {printable(_told(error))}", err=True)
    ctx.exit(1)


def _told(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def _leaves(group: ExceptionGroup[Exception]) -> Iterator[Exception]:
    for error in group.exceptions:
        if isinstance(error, ExceptionGroup):
            yield from _leaves(error)
        else:
            yield error

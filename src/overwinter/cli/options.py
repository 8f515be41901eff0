"""What the commands have in common: types of arguments, the address of the node, and JSON output."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from overwinter.core.ids import NAME_PATTERN

if TYPE_CHECKING:
    from overwinter.api.client import Client

DEFAULT_URL = "http://127.0.0.1:8000"
TOKEN = "overwinter.token"
"""Where the context of a command has the token."""
BYTES_OF = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}
"""Bytes of each unit of size, in lower case."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
Command = TypeVar("Command", bound=Callable[..., Any])


def byte_size(value: str | int) -> int:
    """Whole bytes out of 8GiB, 500MB or 4096; a usage error for what is no size."""
    if isinstance(value, int):
        return value
    found = _SIZE.fullmatch(value.strip())
    factor = None if found is None else BYTES_OF.get(found[2].lower())
    if found is None or factor is None:
        raise click.BadParameter(f"{value!r} is not a size: write 8GiB, 500MB or a number of bytes")
    return int(float(found[1]) * factor)


def size_text(nbytes: float) -> str:
    """A number of bytes in the largest binary unit that leaves it at least 1."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        nbytes /= 1024
        if nbytes < 1024:
            return f"{nbytes:.1f} {unit}"
    return f"{nbytes / 1024:.1f} TiB"


def printable(text: str) -> str:
    """Without what would move the cursor, colour or rename the terminal: a function's author wrote some of it."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "\ufffd" for sign in text)


def function_version(value: str) -> tuple[str, int | None]:
    """The name and the version in NAME[@VERSION], None for whichever answers; a usage error if it is no number."""
    name, mark, version = value.partition("@")
    if not mark:
        return name, None
    if not (version.isascii() and version.isdigit()):
        raise click.BadParameter(f"the version in {value!r} must be a whole number, as in {name or 'name'}@2")
    return name, int(version)


def assignment(value: str) -> tuple[str, str]:
    """The key and the content of key=content; a usage error without both."""
    key, mark, content = value.partition("=")
    if not (key and mark):
        raise click.BadParameter(f"{value!r} has no name and = before the value")
    return key, content


def named_function(command: Command) -> Command:
    """Give a command its argument NAME[@VERSION]."""
    return click.argument("function", type=function_version, metavar="NAME[@VERSION]")(command)


def node_url(command: Command) -> Command:
    """Give a command the address of the node, and the token for it (`connect` finds it in the context)."""
    with_token = click.option(
        "--token",
        envvar="OVERWINTER_TOKEN",
        show_envvar=True,
        expose_value=False,
        callback=_keep_token,
        help="Token for the node. Others on this machine can read a command line: better set the variable.",
    )(command)
    return click.option(
        "--url", default=DEFAULT_URL, envvar="OVERWINTER_URL", show_envvar=True, help="Address of the node."
    )(with_token)


def _keep_token(ctx: click.Context, _option: click.Parameter, value: str | None) -> None:
    ctx.meta[TOKEN] = value or None


def as_json(command: Command) -> Command:
    """Give a command the choice to answer in JSON."""
    return click.option("--json", "as_json", is_flag=True, help="Answer in JSON, for programs.")(command)


def whose(command: Command) -> Command:
    """Give a command the tenant for which it speaks."""
    return click.option(
        "--tenant", default="default", envvar="OVERWINTER_TENANT", show_envvar=True, metavar="NAME", help="Whose it is."
    )(command)


def connect(url: str, timeout_s: float = 75.0, tenant: str = "default") -> "Client":
    """A client of the node at `url` for a tenant; a usage error when either is none."""
    from overwinter.api.client import Client

    token = click.get_current_context().meta.get(TOKEN)
    return Client(checked_url(url), timeout_s, checked_name("--tenant", tenant), token)


def checked_name(option: str, text: str) -> str:
    """The same; a usage error when it is no name."""
    if not re.search(NAME_PATTERN, text):
        allowed = "lower-case letters, digits, dots, dashes and underscores, a letter or digit first"
        raise click.UsageError(f"{option} {text!r} is no name: {allowed}")
    return text


def checked_url(url: str) -> str:
    """The same; a usage error when it is no address."""
    if not url.startswith(("http://", "https://")):
        raise click.UsageError(f"--url {url!r} must begin with http:// or https://")
    return url


def print_json(value: object) -> None:
    """One JSON value on a line of its own."""
    click.echo(msgspec.json.encode(value))


def id_of(name: str, version: int | None) -> str:
    """The function as people write it."""
    return name if version is None else f"{name}@{version}"

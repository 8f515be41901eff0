"""What the commands have in common: types of arguments, the address of the node, and JSON output."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from overwinter.core.ids import NAME_PATTERN, NAME_RULE

if TYPE_CHECKING:
    from overwinter.api.client import Client

DEFAULT_URL = "http://127.0.0.1:8000"
TOKEN_KEY = "overwinter.token"
"""The key of the token in the context of a command."""
BYTES_OF = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}
"""Bytes of each unit of size, in lower case."""

SIZE_END = 1 << 63
"""No size is this large: sizes are signed 64-bit integers in the systems that get them."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
Command = TypeVar("Command", bound=Callable[..., Any])


def byte_size(value: str | int) -> int:
    """Parse a size such as 8GiB, 500MB or 4096 to bytes; raise a usage error otherwise."""
    if isinstance(value, int):
        return value
    found = _SIZE.fullmatch(value.strip())
    factor = None if found is None else BYTES_OF.get(found[2].lower())
    if found is None or factor is None:
        raise click.BadParameter(f"{value!r} is not a size: write 8GiB, 500MB or a number of bytes")
    nbytes = float(found[1]) * factor
    if nbytes >= SIZE_END:
        raise click.BadParameter(f"{value!r} is not a size: no disk or memory is that large")
    return int(nbytes)


def size_text(nbytes: float) -> str:
    """Format bytes in the largest binary unit in which the rounded value is at least 1."""
    if round(nbytes) < 1024:
        return f"{nbytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        nbytes /= 1024
        if round(nbytes, 1) < 1024:
            return f"{nbytes:.1f} {unit}"
    return f"{nbytes / 1024:.1f} TiB"


def printable(text: str) -> str:
    """Replace control characters, by which an author's text could control the terminal, except line ends and tabs."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)


def echo(text: str, err: bool = False) -> None:
    """Print a line without control characters; `err`: to standard error."""
    click.echo(printable(text), err=err)


def function_version(value: str) -> tuple[str, int | None]:
    """Split NAME[@VERSION] into name and version; the version is None if it is left out."""
    name, mark, version = value.partition("@")
    if not mark:
        return name, None
    if not (version.isascii() and version.isdigit()):
        raise click.BadParameter(f"the version in {value!r} must be a whole number, as in {name or 'name'}@2")
    return name, int(version)


def assignment(value: str) -> tuple[str, str]:
    """Split NAME=VALUE, whose value may be empty; raise a usage error if the name or `=` is missing."""
    key, mark, content = value.partition("=")
    if not (key and mark):
        raise click.BadParameter(f"{value!r} must have the form NAME=VALUE")
    return key, content


def named_function(command: Command) -> Command:
    """Add the argument NAME[@VERSION] to a command."""
    return click.argument("function", type=function_version, metavar="NAME[@VERSION]")(command)


def node_url(command: Command) -> Command:
    """Add --url and --token to a command; `connect` reads the token from the context."""
    with_token = click.option(
        "--token",
        envvar="OVERWINTER_TOKEN",
        show_envvar=True,
        expose_value=False,
        callback=_keep_token,
        help="Token for the node. Prefer the variable: other users can read command lines.",
    )(command)
    return click.option(
        "--url", default=DEFAULT_URL, envvar="OVERWINTER_URL", show_envvar=True, help="Address of the node."
    )(with_token)


def _keep_token(ctx: click.Context, _option: click.Parameter, value: str | None) -> None:
    ctx.meta[TOKEN_KEY] = value or None


def as_json(command: Command) -> Command:
    """Add --json to a command."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def tenant_option(command: Command) -> Command:
    """Add --tenant to a command."""
    return click.option(
        "--tenant", default="default", envvar="OVERWINTER_TENANT", show_envvar=True, metavar="NAME", help="Tenant."
    )(command)


def connect(url: str, timeout_s: float = 75.0, tenant: str = "default") -> "Client":
    """Return a client of the node at `url`; raise a usage error if the address or the tenant is invalid."""
    from overwinter.api.client import Client

    token = click.get_current_context().meta.get(TOKEN_KEY)
    return Client(checked_url(url), timeout_s, checked_name("--tenant", tenant), token)


def checked_name(option: str, text: str) -> str:
    """Return `text` if it is a valid name; raise a usage error otherwise."""
    if not re.search(NAME_PATTERN, text):
        raise click.UsageError(f"{option} {text!r} is not a valid name: {NAME_RULE}")
    return text


def checked_url(url: str) -> str:
    """Return `url` if it is an HTTP address; raise a usage error otherwise."""
    if not url.startswith(("http://", "https://")):
        raise click.UsageError(f"--url {url!r} must begin with http:// or https://")
    return url


def print_json(value: object) -> None:
    """Print a value as one line of JSON."""
    click.echo(msgspec.json.encode(value))


def id_of(name: str, version: int | None) -> str:
    """Return NAME or NAME@VERSION."""
    return name if version is None else f"{name}@{version}"

"""The commands that create, list and revoke tokens and set quotas, by changing files on the node's machine."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from overwinter.cli.options import Command, as_json, byte_size, print_json, printable, size_text
from overwinter.cli.serve import DEFAULTS

if TYPE_CHECKING:
    from rich.table import Table

    from overwinter.store.tokens import Known, Quota, Scope


def data_directory(command: Command) -> Command:
    """Give a command the directory of the node."""
    return click.option(
        "--data",
        type=click.Path(file_okay=False, path_type=Path),
        default=DEFAULTS["data"],
        envvar="OVERWINTER_DATA",
        show_envvar=True,
        metavar="PATH",
        help="Directory of the node's repository, as for `overwinter serve`.",
    )(command)


@click.group()
def token() -> None:
    """Say who may use a node, as what tenant, for what.

    These commands change files of the node, and are for whoever runs it, on its machine. A node that is up follows at
    once. From the first token on it answers nobody without one, also when all are revoked.
    """


@token.command()
@click.option("--tenant", required=True, metavar="NAME", help="For which the token speaks.")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice(["infer", "deploy", "admin"]),
    multiple=True,
    required=True,
    help="infer: run functions. deploy: deploy, promote, load, unload, measure, remove. admin: both, for any tenant, "
    "and what is told of the whole node. Any may look at the tenant's own. One for each.",
)
@click.option("--label", default="", help="What it is for, as people remember it.")
@data_directory
@as_json
def create(tenant: str, scopes: "tuple[Scope, ...]", label: str, data: Path, as_json: bool) -> None:
    """Make a token and print it. It is shown this once: the node keeps a hash of it."""
    from overwinter.store.tokens import TokenFile

    data = data.expanduser()
    made, text = TokenFile(data).create(tenant, scopes, label, time.time())
    # Whatever fails from here on: the token is made, and is told this once.
    if as_json:
        print_json({"token": text, "id": made.id, "tenant": made.tenant, "scopes": made.scopes})
    else:
        click.echo(text)
        click.echo(
            f"token {made.id} of tenant {made.tenant}, for {', '.join(made.scopes)}: keep it, it is not shown again. "
            "Use it as OVERWINTER_TOKEN, or as the header Authorization: Bearer TOKEN",
            err=True,
        )
    _record(data, tenant, "create", made.id)


@token.command("list")
@data_directory
@as_json
def list_(data: Path, as_json: bool) -> None:
    """List all tokens, without what is secret of them, and the quotas of tenants."""
    from overwinter.store.tokens import TokenFile

    known = TokenFile(data.expanduser()).read()
    if as_json:
        told = msgspec.to_builtins(known)
        shown = [{key: value for key, value in each.items() if key != "digest"} for each in told["tokens"].values()]
        print_json({"tokens": shown, "quotas": told["quotas"]})
        return
    if not known.tokens:
        click.echo("no tokens: make one with `overwinter token create --tenant NAME --scope infer`")
        return
    from overwinter.cli.tables import show

    show(_table(known))


@token.command()
@click.argument("id_", metavar="ID")
@data_directory
@as_json
def revoke(id_: str, data: Path, as_json: bool) -> None:
    """Take a token away: from the next request on it is worth nothing, also on connections that are open."""
    from overwinter.store.tokens import TokenFile

    data = data.expanduser()
    gone = TokenFile(data).revoke(id_)
    _record(data, gone.tenant, "revoke", gone.id)
    if as_json:
        print_json({"revoked": gone.id, "tenant": gone.tenant})
    else:
        click.echo(f"revoked token {gone.id} of tenant {gone.tenant}")


@token.command()
@click.argument("tenant")
@click.option("--functions", type=click.IntRange(0), metavar="NUMBER", help="Versions of functions deployed.")
@click.option("--bytes", "nbytes", type=byte_size, metavar="SIZE", help="Of the disk, for its blocks, as 8GiB.")
@click.option(
    "--requests-per-s",
    type=click.FloatRange(0, min_open=True),
    metavar="NUMBER",
    help="Requests a second, of any kind.",
)
@data_directory
@as_json
def limit(tenant: str, data: Path, as_json: bool, **bounds: float | None) -> None:
    """Say how much a tenant may take, in place of what was said before; without options what all may take."""
    from overwinter.store.tokens import Quota, TokenFile

    data = data.expanduser()
    quota = msgspec.convert(bounds, Quota)
    TokenFile(data).limit(tenant, quota)
    _record(data, tenant, "limit", tenant)
    if as_json:
        print_json({"tenant": tenant, "quota": quota})
    else:
        click.echo(f"tenant {tenant}: {_quota_text(quota) or 'no quota of its own'}")


def _record(data: Path, tenant: str, what: str, id_: str) -> None:
    from overwinter.api.audit import FILE, Line, said_at, write_line
    from overwinter.core.ids import TenantId
    from overwinter.store.sealing import disk_errors

    who = f"user {os.getuid()}"
    line = Line(at=said_at(time.time()), by=who, tenant=TenantId(tenant), method=f"token {what}", path=id_, status=0)
    with disk_errors("write the audit", data):
        write_line(data / FILE, line)


def _table(known: "Known") -> "Table":
    from overwinter.cli.tables import plain_table

    table = plain_table()
    for title in ("ID", "TENANT", "SCOPES", "CREATED", "QUOTA", "LABEL"):
        table.add_column(title)
    for each in sorted(known.tokens.values(), key=lambda each: (each.tenant, each.created)):
        created = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.created))
        quota = known.quotas.get(each.tenant)
        told = "" if quota is None else _quota_text(quota)
        table.add_row(each.id, each.tenant, ", ".join(each.scopes), created, told, printable(each.label))
    return table


def _quota_text(quota: "Quota") -> str:
    told = [] if quota.functions is None else [f"{quota.functions} functions"]
    told += [] if quota.nbytes is None else [size_text(quota.nbytes)]
    told += [] if quota.requests_per_s is None else [f"{quota.requests_per_s:g} requests/s"]
    return ", ".join(told)

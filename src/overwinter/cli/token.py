"""The commands that create, list and revoke tokens and set quotas, by changing files on the node's machine."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from overwinter.cli.options import Command, as_json, byte_size, print_json, size_text
from overwinter.cli.serve import DEFAULTS

if TYPE_CHECKING:
    from rich.table import Table

    from overwinter.store.tokens import KnownTokens, Quota, Scope


def data_directory(command: Command) -> Command:
    """Add --data, the node's directory, to a command."""
    return click.option(
        "--data",
        type=click.Path(file_okay=False, path_type=Path),
        default=DEFAULTS["data"],
        envvar="OVERWINTER_DATA",
        show_envvar=True,
        metavar="PATH",
        help="Directory of the node's repository, as in `overwinter serve`.",
    )(command)


@click.group()
def token() -> None:
    """Manage the tokens and quotas of a node.

    These commands change files in the node's data directory, so the administrator runs them on the node's machine. A
    running node applies the changes at once. Once a token has been created, the node refuses requests without one,
    except those for its health and its static pages, even if all tokens are revoked.
    """


@token.command()
@click.option("--tenant", required=True, metavar="NAME", help="Tenant of the token.")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice(["infer", "deploy", "admin"]),
    multiple=True,
    required=True,
    help="infer: run functions. deploy: deploy, promote, load, unload, profile, remove. admin: both, for any tenant, "
    "and the telemetry of the whole node. Each scope may read its tenant's data. Repeat for more.",
)
@click.option("--label", default="", help="Note on the purpose of the token.")
@data_directory
@as_json
def create(tenant: str, scopes: "tuple[Scope, ...]", label: str, data: Path, as_json: bool) -> None:
    """Create a token and print it. It cannot be printed again: the node keeps only a hash."""
    from overwinter.store.tokens import TokenFile

    data = data.expanduser()
    created, text = TokenFile(data).create(tenant, scopes, label, time.time())
    # Print the token first: it also exists if the audit record cannot be written, and it cannot be printed later.
    if as_json:
        print_json({"token": text, "id": created.id, "tenant": created.tenant, "scopes": created.scopes})
    else:
        click.echo(text)
        click.echo(
            f"token {created.id} of tenant {created.tenant}, for {', '.join(created.scopes)}, of the node with the "
            f"data directory {data}: keep it, it is not shown again. Use it as OVERWINTER_TOKEN, or as the header "
            "Authorization: Bearer TOKEN",
            err=True,
        )
    _audit(data, tenant, "create", created.id)


@token.command("list")
@data_directory
@as_json
def list_(data: Path, as_json: bool) -> None:
    """List all tokens without their secrets, and the quotas of tenants."""
    from overwinter.store.tokens import TokenFile

    known = TokenFile(data.expanduser()).read()
    if as_json:
        document = msgspec.to_builtins(known)
        shown = [{key: value for key, value in each.items() if key != "digest"} for each in document["tokens"].values()]
        print_json({"tokens": shown, "quotas": document["quotas"]})
        return
    if not known.tokens and not known.quotas:
        click.echo("no tokens: create one with `overwinter token create --tenant NAME --scope infer`")
        return
    from overwinter.cli.tables import show

    show(_table(known))


@token.command()
@click.argument("id_", metavar="ID")
@data_directory
@as_json
def revoke(id_: str, data: Path, as_json: bool) -> None:
    """Revoke a token. Requests with it are refused at once, also on open connections."""
    from overwinter.store.tokens import TokenFile

    data = data.expanduser()
    revoked = TokenFile(data).revoke(id_)
    _audit(data, revoked.tenant, "revoke", revoked.id)
    if as_json:
        print_json({"revoked": revoked.id, "tenant": revoked.tenant})
    else:
        click.echo(f"revoked token {revoked.id} of tenant {revoked.tenant}")


@token.command()
@click.argument("tenant")
@click.option("--functions", type=click.IntRange(0), metavar="NUMBER", help="Most deployed versions.")
@click.option("--bytes", "nbytes", type=byte_size, metavar="SIZE", help="Disk space for its blocks, for example 8GiB.")
@click.option(
    "--requests-per-s",
    type=click.FloatRange(0, min_open=True),
    metavar="NUMBER",
    help="Requests per second, of any kind.",
)
@data_directory
@as_json
def limit(tenant: str, data: Path, as_json: bool, **bounds: float | None) -> None:
    """Set the quota of a tenant, replacing its previous quota. Without options the node's defaults apply."""
    from overwinter.store.tokens import Quota, TokenFile

    data = data.expanduser()
    quota = msgspec.convert(bounds, Quota)
    TokenFile(data).limit(tenant, quota)
    _audit(data, tenant, "limit", tenant)
    if as_json:
        print_json({"tenant": tenant, "quota": quota})
    else:
        click.echo(f"tenant {tenant}: {_quota_text(quota) or 'no quota of its own'}")


def _audit(data: Path, tenant: str, what: str, id_: str) -> None:
    from overwinter.api.audit import FILE, AuditRecord, time_text, write_record
    from overwinter.core.ids import TenantId
    from overwinter.store.disk import disk_errors

    who = f"user {os.getuid()}"
    record = AuditRecord(
        at=time_text(time.time()), by=who, tenant=TenantId(tenant), method=f"token {what}", path=id_, status=0
    )
    with disk_errors("write the audit", data):
        write_record(data / FILE, record)


def _table(known: "KnownTokens") -> "Table":
    from overwinter.cli.tables import plain_table

    table = plain_table()
    for title in ("ID", "TENANT", "SCOPES", "CREATED", "QUOTA", "LABEL"):
        table.add_column(title)
    for each in sorted(known.tokens.values(), key=lambda each: (each.tenant, each.created)):
        created = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.created))
        quota = known.quotas.get(each.tenant)
        limits = "" if quota is None else _quota_text(quota)
        table.add_row(each.id, each.tenant, ", ".join(each.scopes), created, limits, each.label)
    for tenant in sorted(known.quotas.keys() - {each.tenant for each in known.tokens.values()}):
        table.add_row("", tenant, "", "", _quota_text(known.quotas[tenant]), "")
    return table


def _quota_text(quota: "Quota") -> str:
    parts = [] if quota.functions is None else [f"{quota.functions} versions"]
    parts += [] if quota.nbytes is None else [size_text(quota.nbytes)]
    parts += [] if quota.requests_per_s is None else [f"{quota.requests_per_s:g} requests/s"]
    return ", ".join(parts)

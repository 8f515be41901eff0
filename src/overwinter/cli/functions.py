"""The commands that list, show, load, unload and remove deployed functions."""

import sys
import time
from typing import TYPE_CHECKING

import click

from overwinter.cli.options import as_json, connect, echo, id_of, named_function, node_url, print_json, tenant_option

if TYPE_CHECKING:
    from overwinter.api.client import Client


@click.command()
@tenant_option
@node_url
@as_json
def ps(tenant: str, url: str, as_json: bool) -> None:
    """List every version of every function, and every pipeline; then the devices that are out of service.

    A node without tokens lists those of all tenants, unless --tenant names another than `default`. A terminal shows the
    columns that fit; a pipe and --json show all.
    """
    with connect(url, tenant=tenant) as client:
        functions, pipelines = (
            [each for each in found if tenant in ("default", each["tenant"])]
            for found in (client.functions(), client.pipelines())
        )
        devices = [] if as_json else client.devices()
    if as_json:
        print_json([*functions, *pipelines])
        return
    from overwinter.cli.device_tables import out_of_service
    from overwinter.cli.list_tables import functions_table, pipelines_table
    from overwinter.cli.tables import show as show_table

    if functions:
        show_table(functions_table(functions, time.time()))
    if functions and pipelines:
        click.echo()
    if pipelines:
        show_table(pipelines_table(pipelines, time.time()))
    if not functions and not pipelines:
        click.echo("no functions yet: deploy one with `overwinter deploy SOURCE --name NAME`")
    for line in out_of_service(devices):
        click.echo(line)


@click.command()
@named_function
@tenant_option
@node_url
@as_json
def show(function: tuple[str, int | None], tenant: str, url: str, as_json: bool) -> None:
    """Show the details of a function or a pipeline."""
    with connect(url, tenant=tenant) as client:
        described = client.function(*function)
    if as_json:
        print_json(described)
        return
    from overwinter.cli.tables import function_table, pipeline_table
    from overwinter.cli.tables import show as show_table

    table = pipeline_table if "stages" in described else function_table
    show_table(table(described, time.time()))


@click.command()
@named_function
@click.option("--yes", "-y", is_flag=True, help="Remove without asking.")
@tenant_option
@node_url
@as_json
def rm(function: tuple[str, int | None], yes: bool, tenant: str, url: str, as_json: bool) -> None:
    """Remove one version of a function, all versions (NAME alone), or a pipeline."""
    name, version = function
    with connect(url, tenant=tenant) as client:
        pipeline = _is_pipeline(client, name, version)
        what = f"all versions of {name}" if version is None and not pipeline else id_of(name, version)
        if not yes and not _is_confirmed(what):
            return
        client.remove(name, version)
    _print_result({"removed": name, "version": version}, f"removed {what}", as_json)


def _is_pipeline(client: "Client", name: str, version: int | None) -> bool:
    """Whether this is a pipeline; raise NotFoundError if there is neither a pipeline nor a function."""
    from overwinter.core.errors import NotFoundError

    try:
        return "stages" in client.function(name, version)
    except NotFoundError:
        # The only version of a function may be on trial.
        if version is not None or all(function["name"] != name for function in client.functions()):
            raise
        return False


def _is_confirmed(what: str) -> bool:
    """Ask whether to remove; raise a usage error if there is no terminal to ask on."""
    try:
        return click.confirm(f"Remove {what}?", err=True)
    except click.Abort:
        if sys.stdin.isatty():
            raise
        raise click.UsageError(f"there is no terminal to ask whether to remove {what}: add --yes") from None


@click.command()
@named_function
@tenant_option
@node_url
@as_json
def load(function: tuple[str, int | None], tenant: str, url: str, as_json: bool) -> None:
    """Wake a function, or all functions of a pipeline, and accept requests again.

    NAME alone loads the versions that get the requests that name no version.
    """
    from overwinter.api.deployer import DEPLOY_TIMEOUT_S

    with connect(url, DEPLOY_TIMEOUT_S, tenant) as client:
        client.load(*function)
    _print_result({"loaded": id_of(*function)}, f"loaded {id_of(*function)}", as_json)


@click.command()
@named_function
@tenant_option
@node_url
@as_json
def unload(function: tuple[str, int | None], tenant: str, url: str, as_json: bool) -> None:
    """Free the memory of a version, or of all (NAME alone); its requests are refused until it is loaded again."""
    with connect(url, tenant=tenant) as client:
        client.unload(*function)
    _print_result({"unloaded": id_of(*function)}, f"unloaded {id_of(*function)}", as_json)


def _print_result(value: object, text: str, as_json: bool) -> None:
    if as_json:
        print_json(value)
    else:
        echo(text)

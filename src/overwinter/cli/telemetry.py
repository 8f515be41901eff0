"""The commands that show activity, devices, the explanation and the output of a function, and usage."""

import sys
import threading
import time
from typing import TYPE_CHECKING

import click

from overwinter.cli.options import (
    as_json,
    connect,
    echo,
    id_of,
    named_function,
    node_url,
    print_json,
    tenant_option,
)

if TYPE_CHECKING:
    from overwinter.api.client import Client


@click.command()
@click.option("--once", is_flag=True, help="Print once and exit. This is the default without a terminal.")
@click.option("--every", type=click.FloatRange(0.1), default=1.0, metavar="SECONDS", help="Time between updates.")
@click.option(
    "--limit",
    type=click.IntRange(1),
    metavar="NUMBER",
    help="Most functions to show, except with --json. [default: all; while it updates, as many as fit]",
)
@node_url
@as_json
def top(once: bool, every: float, limit: int | None, url: str, as_json: bool) -> None:
    """Show the activity of the node and its functions, the most active first, until interrupted.

    A terminal shows the columns that fit; a pipe and --json show all.
    """
    with connect(url) as client:
        if as_json:
            print_json(client.activity())
        elif once or not sys.stdout.isatty():
            from overwinter.cli.tables import show
            from overwinter.cli.telemetry_tables import activity_table

            show(activity_table(client.activity(), limit))
        else:
            _watch(client, every, limit)


def _watch(client: "Client", every: float, limit: int | None) -> None:
    from rich.live import Live

    from overwinter.cli.tables import Terminal
    from overwinter.cli.telemetry_tables import activity_table, rows_for

    console = Terminal()
    pause = threading.Event()
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                seen = client.activity()
                live.update(activity_table(seen, limit or rows_for(seen, console)), refresh=True)
                pause.wait(every)
    except KeyboardInterrupt:
        # Ctrl-C is how the user ends `top`.
        return


@click.command()
@node_url
@as_json
def devices(url: str, as_json: bool) -> None:
    """Show the devices of the pool: their state, the functions there, their links, and failures.

    A block that several functions share counts once in TAKEN, and for each of them in BYTES.
    """
    with connect(url) as client:
        found = client.devices()
    if as_json:
        print_json(found)
        return
    from overwinter.cli.device_tables import described_devices
    from overwinter.cli.tables import show

    for part in described_devices(found) if found else ():
        show(part)
    if not found:
        click.echo("no devices: the node has no pool, or none of its devices serves this tenant")


@click.command()
@named_function
@tenant_option
@node_url
@as_json
def explain(function: tuple[str, int | None], tenant: str, url: str, as_json: bool) -> None:
    """Explain the state of a function: its blocks, its latency, recent decisions and refusals."""
    with connect(url, tenant=tenant) as client:
        explained = client.explain(*function)
    if as_json:
        print_json(explained)
        return
    from overwinter.cli.tables import show
    from overwinter.cli.telemetry_tables import explained_tables

    for number, table in enumerate(explained_tables(explained)):
        if number:
            click.echo()
        show(table)


@click.command()
@named_function
@tenant_option
@node_url
@as_json
def logs(function: tuple[str, int | None], tenant: str, url: str, as_json: bool) -> None:
    """Show the last lines that a function's code printed, the oldest first.

    Functions that share workers share their output. The node keeps at most the last 500 lines of each family.
    """
    with connect(url, tenant=tenant) as client:
        lines = client.logs(*function)
    if as_json:
        print_json(lines)
        return
    for line in lines:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(line["at"]))
        echo(f"{at} worker {line['worker']}: {line['text']}")
    if not lines:
        echo(f"{id_of(*function)} has printed nothing since the node started", err=True)


@click.command()
@click.option("--tenant", metavar="NAME", help="Show only this tenant.")
@node_url
@as_json
def usage(tenant: str | None, url: str, as_json: bool) -> None:
    """Show what each function used: cores during runs and while idle, devices, and bytes over time on each tier.

    Functions that share a block pay equal parts of it. Idle cores are billed at a tenth. A worker that tests a new
    version is not billed before it serves a request. A function of the pool is billed in milliseconds of a device: its
    runs in full, and the other time in which it lies in the host store at a tenth. A terminal shows the columns that
    fit; a pipe and --json show all.
    """
    with connect(url) as client:
        used = client.usage(tenant)
    if as_json:
        print_json(used)
        return
    from overwinter.cli.tables import show
    from overwinter.cli.telemetry_tables import usage_table

    if used:
        show(usage_table(used))
    else:
        echo("no usage yet" if tenant is None else f"no usage of {tenant} yet")

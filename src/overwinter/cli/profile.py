"""The command that measures a function on the node's machine and shows its profile."""

from typing import Any

import click

from overwinter.cli.options import as_json, connect, named_function, node_url, print_json, whose
from overwinter.core.profiling import Wanted


def numbers(value: str) -> tuple[int, ...]:
    """1,2,4 as numbers; a usage error for anything else."""
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise click.BadParameter(f"{value!r} must be whole numbers with commas between them, as in 1,2,4")
    return tuple(int(part) for part in parts)


@click.command()
@named_function
@click.option("--cores", type=numbers, metavar="LIST", help="Numbers of cores, as 1,2; up to its threads if not given.")
@click.option("--batches", type=numbers, metavar="LIST", help="Requests of one run, as 1,2,4; up to its max_batch.")
@click.option("--concurrency", type=numbers, metavar="LIST", help="Runs at once, as 1,2; up to its concurrency.")
@click.option("--layers/--no-layers", default=True, help="Also measure each layer alone.")
@click.option("--again", is_flag=True, help="Measure also what is known.")
@click.option("--known", is_flag=True, help="Only show what is known.")
@whose
@node_url
@as_json
def profile(function: tuple[str, int | None], known: bool, tenant: str, url: str, as_json: bool, **wanted: Any) -> None:
    """Measure memory and latency of a function over cores, batches and runs at once, and of each of its layers.

    What is known already, of this or of any function of its tenant with the same program, is not measured again. While
    requests are served the node takes its time.
    """
    from overwinter.cli.progress import measuring

    with connect(url, tenant=tenant) as client:
        if known:
            found = client.known_profile(*function)
        else:
            with measuring(f"measuring {function[0]}") as told:
                found = client.profile(*function, Wanted(**wanted), told)
    if as_json:
        print_json(found)
        return
    from overwinter.cli.profile_tables import layers_table, points_table, summary
    from overwinter.cli.tables import show as show_table

    click.echo(summary(found))
    if found.points:
        show_table(points_table(found.points))
    if found.layers and wanted["layers"]:
        click.echo()
        show_table(layers_table(found.layers))

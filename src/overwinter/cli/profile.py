"""The command that measures a function on the node's machine and shows its profile."""

from typing import Any

import click

from overwinter.cli.options import as_json, connect, echo, named_function, node_url, print_json, tenant_option
from overwinter.core.profiling import ProfileOptions


def number_list(value: str) -> tuple[int, ...]:
    """Parse numbers separated by commas, such as 1,2,4; raise a usage error otherwise."""
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise click.BadParameter(f"{value!r} must be whole numbers separated by commas, for example 1,2,4")
    return tuple(int(part) for part in parts)


@click.command()
@named_function
@click.option(
    "--cores",
    type=number_list,
    metavar="LIST",
    help="Numbers of cores, for example 1,2. [default: 1,2,4 and so on, up to the function's threads]",
)
@click.option(
    "--batches",
    type=number_list,
    metavar="LIST",
    help="Batch sizes, for example 1,2,4. [default: 1,2,4 and so on, up to the function's max_batch]",
)
@click.option(
    "--concurrency",
    type=number_list,
    metavar="LIST",
    help="Concurrent runs, for example 1,2. [default: 1,2,4 and so on, up to the function's concurrency]",
)
@click.option("--layers/--no-layers", default=True, help="Also measure each layer by itself.")
@click.option("--again", is_flag=True, help="Measure again what is already known.")
@click.option("--known", is_flag=True, help="Show the known profile without measuring.")
@tenant_option
@node_url
@as_json
def profile(
    function: tuple[str, int | None], known: bool, tenant: str, url: str, as_json: bool, **options: Any
) -> None:
    """Measure memory and latency of a function over cores, batch sizes and concurrency, and of each of its layers.

    Configurations that are already known are measured again only with --again; functions of a tenant with the same
    program and handler share a profile. Measuring takes longer while the node serves requests.
    """
    from overwinter.cli.progress import configuration_bar

    with connect(url, tenant=tenant) as client:
        if known:
            found = client.known_profile(*function)
        else:
            with configuration_bar(f"measuring {function[0]}") as report:
                found = client.profile(*function, ProfileOptions(**options), report)
    if as_json:
        print_json(found)
        return
    from overwinter.cli.profile_tables import layers_table, points_table, summary
    from overwinter.cli.tables import show as show_table

    echo(summary(found))
    if found.points:
        show_table(points_table(found.points))
    if found.layers and options["layers"]:
        click.echo()
        show_table(layers_table(found.layers))

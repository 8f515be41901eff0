"""The command that checks whether this machine can run a node well, with a remedy for each problem."""

import click

from overwinter.cli.options import as_json, print_json
from overwinter.cli.serve import config_options

OPTIONS = ("data", "host_store")
"""The options of `serve` that the checks need."""


@click.command(
    params=[option for option in config_options() if option.name in OPTIONS],
    context_settings={"auto_envvar_prefix": "OVERWINTER"},
)
@as_json
def doctor(data: str, host_store: str, as_json: bool) -> None:
    """Check what a node needs of this machine: Python, PyTorch, kernel, limits, memory and disk.

    Each problem is printed with a remedy. The exit code is 1 if a node cannot run at all.
    """
    from pathlib import Path

    from overwinter.core.config import NodeConfig
    from overwinter.node.checkup import checks, worst

    config = NodeConfig(data=str(Path(data).expanduser()), host_store=host_store)
    found = list(checks(config))
    if as_json:
        print_json(found)
    else:
        for check in found:
            click.echo(f"{check.level:<8} {check.what:<14} {check.found}")
            if check.remedy:
                click.echo(f"{'':<8} {'':<14} -> {check.remedy}")
    click.get_current_context().exit(1 if worst(found) == "fatal" else 0)

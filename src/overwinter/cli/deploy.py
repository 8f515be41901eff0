"""The command that deploys a model as a function of a node."""

import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from overwinter.cli.options import (
    as_json,
    assignment,
    checked_name,
    connect,
    node_url,
    print_json,
    printable,
    size_text,
    whose,
)

if TYPE_CHECKING:
    from overwinter.api.deployer import Package
    from overwinter.cli.inputs import File

TIMEOUT_S = 600.0
"""Longest wait for one answer of the node: it tries a new version before it says that it is deployed."""


@click.command()
@click.argument("source")
@click.option("--name", help="What the function is called.")
@click.option("--slo", help="Its SLO, a latency as 80ms.")
@click.option(
    "--handler",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A Python file with preprocess and postprocess.",
)
@click.option(
    "--asset",
    "assets",
    type=assignment,
    metavar="NAME=PATH",
    multiple=True,
    help="A file handed to the handler. One for each.",
)
@click.option(
    "--sample",
    "sample",
    type=assignment,
    metavar="NAME=VALUE",
    multiple=True,
    help="An input of a request that it must answer before it is deployed, as for `infer --input`. One for each.",
)
@click.option("--task", help="What a directory of transformers is for, as text-classification: brings its handler.")
@click.option(
    "--option",
    "options",
    type=assignment,
    metavar="KEY=VALUE",
    multiple=True,
    help="How a directory of transformers is deployed: sequence=128, height=any, part=encoder, or what its task knows.",
)
@click.option("--trust", is_flag=True, help="Open a .pt2 file that is more than data: code in it may run here.")
@whose
@click.option(
    "--set",
    "settings",
    type=assignment,
    metavar="KEY=VALUE",
    multiple=True,
    help="Any other setting, as max_workers=4; `overwinter show` lists them. One for each.",
)
@node_url
@as_json
def deploy(  # noqa: PLR0913 - what a person may want to say of a function
    source: str,
    name: str | None,
    slo: str | None,
    handler: Path | None,
    assets: tuple[tuple[str, str], ...],
    sample: tuple[tuple[str, str], ...],
    task: str | None,
    options: tuple[tuple[str, str], ...],
    trust: bool,
    tenant: str,
    settings: tuple[tuple[str, str], ...],
    url: str,
    as_json: bool,
) -> None:
    """Deploy a model as a new version of a function, or a pipeline of functions.

    SOURCE is `module:callable`, which returns (module, example_inputs) or (module, example_inputs, dynamic); a .pt2
    file of torch.export.save; or a directory of transformers, which with --task takes texts, images or sound and gives
    labels, entities, features or a text. Code in a module runs here; code in a .pt2 file or a directory does not,
    unless the file is opened with --trust. The model is exported here, and only blocks that the node lacks are sent. A
    .toml file is a pipeline: it says all of it, its name too, and takes the place of one that has the name.
    """
    if source.endswith(".toml"):
        beside = (name, slo, handler, assets, sample, task, options, trust, settings)
        _deploy_pipeline(Path(source), any(beside), tenant, url, as_json)
        return
    if name is None:
        raise click.UsageError("Missing option '--name'.")
    from overwinter.api.deployer import settings_of
    from overwinter.cli.inputs import open_files
    from overwinter.cli.progress import counting

    begun = time.monotonic()
    _check_names(name, [key for key, _ in assets], handler)
    # All that can be wrong at once is, before the long work: settings, files, the node.
    chosen = settings_of(slo, {key: _value(text) for key, text in settings})
    if task is not None and handler is not None:
        raise click.UsageError("--task brings a handler of its own: leave out --handler")
    code = None if handler is None else handler.read_text()
    files = {key: Path(path).read_bytes() for key, path in assets}
    opened = open_files(sample)
    with connect(url, TIMEOUT_S, tenant) as client:
        client.live()
        function = {"name": name, "handler": code, "assets": files, "tenant": tenant, "settings": chosen}
        wanted = Wanted(source, task, {key: _value(text) for key, text in options}, trust)
        package = _packaged(wanted, function, opened)
        with counting("uploading") as counted:
            uploaded = package.upload(client, counted)
    seconds = time.monotonic() - begun
    if as_json:
        print_json(msgspec.to_builtins(uploaded) | {"seconds": seconds})
        return
    sizes = f"{size_text(uploaded.nbytes)}, {size_text(uploaded.added_bytes)} of it new to the node"
    click.echo(f"{uploaded.name}@{uploaded.version}: {sizes}, in {seconds:.1f} s")
    if uploaded.warning:
        click.echo(f"warning: {printable(uploaded.warning)}", err=True)


def _deploy_pipeline(path: Path, with_options: bool, tenant: str, url: str, as_json: bool) -> None:
    from overwinter.core.pipeline import parse_pipeline

    if with_options:
        raise click.UsageError(f"{path} says all of a pipeline: leave out the options of functions")
    pipeline = parse_pipeline(path.read_text())
    with connect(url, tenant=tenant) as client:
        made = client.deploy_pipeline(pipeline)
    if as_json:
        print_json(made)
        return
    count = len(pipeline.stages)
    click.echo(f"{made.name}@{made.version}: a pipeline of {count} stage{'' if count == 1 else 's'}")


class Wanted(NamedTuple):
    """What is to be opened."""

    source: str
    task: str | None
    options: Mapping[str, Any]
    trusted: bool


def _packaged(wanted: Wanted, function: dict[str, Any], sample: "Sequence[tuple[str, str | File]]") -> "Package":
    from overwinter.api.deployer import declared, package
    from overwinter.cli.inputs import read_assignments
    from overwinter.cli.progress import turning

    with turning("importing PyTorch"):
        from overwinter.cli.source import export_source, open_source
        from overwinter.model.agreement import agree
        from overwinter.tasks.directory import Directory
    # What the author's code prints must not come between a program and its JSON.
    with redirect_stdout(sys.stderr):
        with turning(f"loading {wanted.source}"):
            opened = open_source(wanted.source, Path.cwd(), wanted.task, wanted.options)
            if wanted.trusted and not isinstance(opened, Path):
                raise click.UsageError(f"--trust is for a .pt2 file, and {wanted.source!r} is none")
        samples: list[Mapping[str, Any]] = []
        if isinstance(opened, Directory) and opened.handler is not None:
            function |= {"handler": opened.handler, "assets": opened.assets}
            samples.extend(opened.samples)
        with turning(f"exporting {wanted.source}"):
            exported = export_source(opened, trusted=wanted.trusted)
        with turning("comparing the program with the model"):
            program, weights, agreement = agree(exported, function["settings"].max_batch)
    for note in agreement.notes:
        click.echo(printable(note), err=True)
    handler = function["handler"]
    taken = (None if handler is None else declared(handler, "INPUTS")) or program.inputs
    if sample:
        samples.append(read_assignments(sample, {spec.name: spec for spec in taken}))
    with turning("hashing its blocks"):
        return package(program=program, weights=weights, agreement=agreement, samples=samples, **function)


def _check_names(name: str, assets: list[str], handler: Path | None) -> None:
    """A usage error for what the node would refuse only after the upload."""
    from overwinter.store.manifest import ASSET_PATTERN

    checked_name("--name", name)
    for asset in assets:
        if not re.search(ASSET_PATTERN, asset):
            raise click.UsageError(f"--asset {asset!r}: the name before the = is letters, digits, dots and dashes")
    if assets and handler is None:
        raise click.UsageError("--asset hands a file to a handler, and there is no --handler")


def _value(text: str) -> Any:
    """A setting's value: a JSON literal, or else the text itself."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text

"""The command that deploys a model as a function of a node."""

import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from overwinter.cli.options import (
    as_json,
    assignment,
    checked_name,
    connect,
    echo,
    node_url,
    print_json,
    size_text,
    tenant_option,
)

if TYPE_CHECKING:
    from overwinter.api.deployer import Package
    from overwinter.cli.inputs import File


@click.command()
@click.argument("source")
@click.option("--name", help="Name of the function.")
@click.option("--slo", help="Latency objective of the function, for example 80ms.")
@click.option(
    "--device",
    type=click.Choice(["cpu", "pool", "any"]),
    help="Where the program runs. cpu: on cores. pool: on devices. any: where each request is expected to end sooner.",
)
@click.option(
    "--handler",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Python file that defines preprocess and postprocess.",
)
@click.option(
    "--asset",
    "assets",
    type=assignment,
    metavar="NAME=PATH",
    multiple=True,
    help="File that the handler receives. Repeat for more.",
)
@click.option(
    "--sample",
    "sample",
    type=assignment,
    metavar="NAME=VALUE",
    multiple=True,
    help="Input of the request that tests the new version; same form as `infer --input`. Repeat for more inputs.",
)
@click.option("--task", help="Task of a transformers directory, for example text-classification. Adds a handler.")
@click.option(
    "--option",
    "options",
    type=assignment,
    metavar="KEY=VALUE",
    multiple=True,
    help="Option for a transformers directory (docs/tasks.md), for example sequence=128. Repeat for more.",
)
@click.option(
    "--trust", is_flag=True, help="Open a .pt2 file or a directory without a sandbox. Its code may run on this machine."
)
@tenant_option
@click.option(
    "--set",
    "settings",
    type=assignment,
    metavar="KEY=VALUE",
    multiple=True,
    help="Any other setting, for example max_workers=4. `overwinter show` lists them. Repeat for more.",
)
@node_url
@as_json
def deploy(  # noqa: PLR0913 - one parameter for each option
    source: str,
    name: str | None,
    slo: str | None,
    device: str | None,
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
    file that torch.export.save wrote; or a directory that transformers saved, which with --task takes texts, images or
    audio and returns labels, entities, features or texts. Code in a module runs on this machine; no code of a .pt2 file
    or a directory runs outside a sandbox, unless it is opened with --trust. The model is exported here, and only blocks
    that the node does not hold for the tenant are sent. A .toml file defines a pipeline completely, including its name,
    and replaces a pipeline of that name.
    """
    if source.endswith(".toml"):
        for_functions = (name, slo, device, handler, assets, sample, task, options, trust, settings)
        _deploy_pipeline(Path(source), any(for_functions), tenant, url, as_json)
        return
    if name is None:
        raise click.UsageError("Missing option '--name'.")
    from overwinter.api.deployer import DEPLOY_TIMEOUT_S, read_source, settings_of
    from overwinter.cli.inputs import read_files
    from overwinter.cli.progress import byte_bar

    started = time.monotonic()
    # Check everything that can be checked before the slow export.
    _check_usage(name, [key for key, _ in assets], handler, task)
    given = {key: _value(text) for key, text in settings}
    function_settings = settings_of(slo, given if device is None else given | {"device": device})
    code = None if handler is None else read_source(handler)
    files = {key: Path(path).read_bytes() for key, path in assets}
    read_sample = read_files(sample)
    with connect(url, DEPLOY_TIMEOUT_S, tenant) as client:
        client.live()
        function = {"name": name, "handler": code, "assets": files, "tenant": tenant, "settings": function_settings}
        model = ModelSource(source, task, {key: _value(text) for key, text in options}, trust)
        package = _packaged(model, function, read_sample)
        with byte_bar("uploading") as progress:
            uploaded = package.upload(client, progress)
    seconds = time.monotonic() - started
    if as_json:
        print_json(msgspec.to_builtins(uploaded) | {"seconds": seconds})
        return
    sizes = f"{size_text(uploaded.nbytes)}, {size_text(uploaded.added_bytes)} sent"
    echo(f"{uploaded.name}@{uploaded.version}: {sizes}, in {seconds:.1f} s")
    if uploaded.warning:
        echo(f"warning: {uploaded.warning}", err=True)


def _deploy_pipeline(path: Path, has_function_options: bool, tenant: str, url: str, as_json: bool) -> None:
    from overwinter.api.deployer import read_source
    from overwinter.core.pipeline import parse_pipeline

    if has_function_options:
        raise click.UsageError(f"{path} defines the whole pipeline: leave out the options for functions")
    pipeline = parse_pipeline(read_source(path))
    with connect(url, tenant=tenant) as client:
        deployed = client.deploy_pipeline(pipeline)
    if as_json:
        print_json(deployed)
        return
    count = len(pipeline.stages)
    echo(f"{deployed.name}@{deployed.version}: a pipeline of {count} stage{'' if count == 1 else 's'}")


class ModelSource(NamedTuple):
    """The source of a model, with the options that say how it is opened."""

    source: str
    task: str | None
    options: Mapping[str, Any]
    trusted: bool


def _packaged(model: ModelSource, function: dict[str, Any], sample: "Sequence[tuple[str, str | File]]") -> "Package":
    """Open and export the model, compare the program with it, and return the package of the function.

    `function`: further arguments of `package`. The handler and the assets of a task replace those in `function`.
    """
    from overwinter.api.contained import DeployableModel, open_contained, open_here
    from overwinter.api.deployer import declared_inputs, package
    from overwinter.cli.inputs import read_assignments
    from overwinter.cli.progress import spinner

    with spinner("importing PyTorch"):
        from overwinter.cli.source import open_source
        from overwinter.model.agreement import agree
        from overwinter.model.export import export
    max_batch = function["settings"].max_batch
    # The author's code may print; standard output is reserved for the JSON of `--json`.
    with redirect_stdout(sys.stderr):
        with spinner(f"loading {model.source}"):
            source = open_source(model.source, Path.cwd(), model.task, model.options)
        if isinstance(source, Path):
            opening = partial(open_here, trusted=True) if model.trusted else open_contained
            with spinner(f"exporting {model.source}, and comparing the program with the model"):
                opened = opening(source, max_batch, model.task, model.options)
        elif model.trusted:
            raise click.UsageError(f"--trust is for files and directories only, and {model.source!r} is neither")
        else:
            with spinner(f"exporting {model.source}"):
                exported = export(*source)
            with spinner("comparing the program with the model"):
                opened = DeployableModel(agree(exported, max_batch))
    program, weights, agreement = opened.agreed
    samples = list(opened.samples)
    if opened.handler is not None:
        function |= {"handler": opened.handler, "assets": opened.assets}
    for note in agreement.notes:
        echo(note, err=True)
    inputs = declared_inputs(function["handler"], program.inputs)
    if sample:
        samples.append(read_assignments(sample, {spec.name: spec for spec in inputs}))
    with spinner("hashing its blocks"):
        return package(program=program, weights=weights, agreement=agreement, samples=samples, **function)


def _check_usage(name: str, assets: list[str], handler: Path | None, task: str | None) -> None:
    """Raise a usage error for options that contradict each other, and for names that the node would refuse."""
    from overwinter.store.manifest import ASSET_PATTERN

    checked_name("--name", name)
    for asset in assets:
        if not re.search(ASSET_PATTERN, asset):
            raise click.UsageError(
                f"--asset {asset!r} is not a valid name: at most 128 letters, digits, underscores, dots and dashes, "
                "and no dot or dash first"
            )
    if task is not None and (assets or handler is not None):
        raise click.UsageError("--task adds its own handler and assets: leave out --handler and --asset")
    if assets and handler is None:
        raise click.UsageError("--asset gives a file to a handler: add --handler")


def _value(text: str) -> Any:
    """Parse the value of a setting or an option: a JSON literal, otherwise plain text."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text

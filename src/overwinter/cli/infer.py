"""The command that runs a function once."""

import time
from typing import Any, BinaryIO

import click
import msgspec

from overwinter.cli.options import (
    as_json,
    assignment,
    connect,
    echo,
    id_of,
    named_function,
    node_url,
    print_json,
    tenant_option,
)
from overwinter.core.errors import CallerError, RateError
from overwinter.core.tensor import TensorSpec

STARTS = {
    "warm": "warm",
    "bound": "bound in a worker of its family",
    "host": "weights from the host store",
    "disk": "weights from disk",
}
"""The text printed for each kind of start."""


@click.command()
@named_function
@click.option(
    "--input",
    "-i",
    "assignments",
    type=assignment,
    metavar="NAME=VALUE",
    multiple=True,
    help="Input: JSON, plain text for BYTES, or @file (.json, .npy; any other file for BYTES). Repeat for more inputs.",
)
@click.option(
    "--from",
    "document",
    type=click.File("rb"),
    help="JSON file with inputs by name, or an Open Inference Protocol request. - reads standard input.",
)
@click.option("--timeout", help="Timeout of the request, for example 500ms. [default: the function's timeout]")
@tenant_option
@node_url
@as_json
def infer(
    function: tuple[str, int | None],
    assignments: tuple[tuple[str, str], ...],
    document: BinaryIO | None,
    timeout: str | None,
    tenant: str,
    url: str,
    as_json: bool,
) -> None:
    """Run a function once and print its outputs.

    JSON has no literals for NaN and the infinities: --json prints them as "NaN", "Infinity" and "-Infinity", and inputs
    accept them in this form.
    """
    from overwinter.api.client import GRACE_S
    from overwinter.api.deployer import milliseconds

    name, version = function
    timeout_s = None if timeout is None else milliseconds(timeout) / 1000
    if timeout_s is not None and timeout_s <= 0:
        raise CallerError(f"--timeout {timeout} leaves no time for an answer: give a longer one, such as 500ms")
    with connect(url, tenant=tenant) as client:
        described = client.function(name, version)
        inputs = _inputs(described, assignments, document)
        wait_s = (described["settings"]["timeout_s"] if timeout_s is None else timeout_s) + GRACE_S
        try:
            outputs = client.infer(name, inputs, version, timeout_s, wait_s)
        except RateError as error:
            pause_s = error.retry_after_s or 0.0
            if pause_s > wait_s:
                raise
            # The request for the description may have used up the tenant's rate.
            time.sleep(pause_s)
            outputs = client.infer(name, inputs, version, timeout_s, wait_s)
        answer = client.last_answer
        assert answer is not None, "infer has just answered"
    shown = [(spec, *_lists(outputs[spec["name"]])) for spec in described["outputs"] if spec["name"] in outputs]
    if as_json:
        documents = [
            {"name": spec["name"], "datatype": spec["datatype"], "shape": shape, "data": _for_json(value)}
            for spec, shape, value in shown
        ]
        print_json(
            {
                "name": name,
                "version": answer.version,
                "start": answer.start,
                "milliseconds": answer.milliseconds,
                "outputs": documents,
            }
        )
        return
    from overwinter.cli.tables import outputs_table, show

    show(outputs_table(shown))
    echo(f"{id_of(name, answer.version)}, {STARTS[answer.start]}, {answer.milliseconds:.1f} ms")


def _inputs(
    described: dict[str, Any], assignments: tuple[tuple[str, str], ...], document: BinaryIO | None
) -> dict[str, Any]:
    from overwinter.cli.inputs import read_assignments, read_document

    specs = {spec.name: spec for spec in msgspec.convert(described["inputs"], list[TensorSpec])}
    if document is None:
        return read_assignments(assignments, specs)
    return read_document(document, specs) | read_assignments(assignments, specs)


def _lists(array: Any) -> tuple[list[int], Any]:
    """Return the shape of an output, and its elements as nested lists."""
    value = array.tolist() if hasattr(array, "tolist") else array
    if hasattr(array, "shape"):
        return list(array.shape), _as_text(value)
    shape, inner = [], value
    while isinstance(inner, list):
        shape.append(len(inner))
        inner = inner[0] if inner else None
    return shape, _as_text(value)


def _for_json(value: Any) -> Any:
    """Replace NaN and the infinities, which JSON cannot represent, by their names."""
    from overwinter.cli.inputs import shown_number

    if isinstance(value, list):
        return [_for_json(item) for item in value]
    return shown_number(value) if isinstance(value, float) else value


def _as_text(value: Any) -> Any:
    """Decode bytes to text. Bytes that are not UTF-8 stay, and JSON shows them as base64."""
    if isinstance(value, list):
        return [_as_text(item) for item in value]
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    return value

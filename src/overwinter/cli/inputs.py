"""Converts command-line arguments to the inputs of a function.

    name=[[1, 2], [3, 4]]    a JSON literal
    name=@numbers.json       a JSON file
    name=@numbers.npy        a NumPy file
    name=@photo.jpg          any other file, for an input of BYTES: its content is one element
    name=some words          plain text, for an input of BYTES: one element

JSON has no literal for NaN and the infinities: "NaN", "Infinity" and "-Infinity" represent them where floating-point
numbers are expected, as in the JSON of protocol buffers. They are also accepted without quotes, as Python's `json`
module writes them.

An input with fewer dimensions than the function expects gets leading dimensions of size 1: one row becomes a batch of
one.
"""

import json
import os
from collections.abc import Mapping, Sequence
from io import BytesIO
from math import inf, isfinite, isnan, nan
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from overwinter.core.errors import CallerError
from overwinter.core.tensor import BYTES, TensorSpec

_WORDS = {"NaN": nan, "Infinity": inf, "-Infinity": -inf}


class File(NamedTuple):
    """A file from which an input is read."""

    path: Path
    content: bytes


def read_files(assignments: Sequence[tuple[str, str]]) -> list[tuple[str, str | File]]:
    """Read the files that the assignments name; raise OSError if one cannot be read."""
    return [(name, _read(text)) for name, text in assignments]


def _read(text: str) -> str | File:
    return File(Path(text[1:]), Path(text[1:]).read_bytes()) if text.startswith("@") else text


def read_assignments(assignments: Sequence[tuple[str, str | File]], specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """Parse the inputs given as `name=value`; raise CallerError if a name or a value does not match, or OSError if a
    file cannot be read.
    """
    inputs: dict[str, Any] = {}
    for name, text in assignments:
        spec = specs.get(name)
        if spec is None:
            raise CallerError(f"unknown input {name!r}; the inputs are {', '.join(specs) or 'none'}")
        if name in inputs:
            raise CallerError(f"input {name!r} is given twice")
        given = _read(text) if isinstance(text, str) else text
        value = _from_file(given, spec) if isinstance(given, File) else _from_text(given, spec)
        inputs[name] = _fitted(value, spec)
    return inputs


def read_document(file: BinaryIO, specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """Read inputs from a JSON object of values by name or from an Open Inference Protocol request, or raise
    CallerError.
    """
    body = file.read()
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise CallerError(f"{file.name} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise CallerError(f"{file.name} must contain a JSON object of inputs by name")
    if isinstance(document.get("inputs"), list) and "inputs" not in specs:
        from overwinter.api.arrays import from_tensor
        from overwinter.api.oip import decode_request
        from overwinter.api.steps import finish

        return {tensor.name: from_tensor(tensor) for tensor in finish(decode_request(body, None)).inputs}
    return {name: _fitted(value, specs[name]) if name in specs else value for name, value in document.items()}


def shown_number(value: float) -> float | str:
    """Return a number in a form that JSON can represent and inputs accept."""
    if isfinite(value):
        return value
    return "NaN" if isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _from_text(text: str, spec: TensorSpec) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        if spec.datatype == BYTES:
            return text
        hint = f"; to send the file, write {spec.name}=@{text}" if os.path.isfile(text) else ""
        raise CallerError(f"input {spec.name!r} is {spec.datatype}, and {text!r} is not JSON: {error}{hint}") from None
    # For an input of BYTES, only a JSON string or list is JSON; anything else is plain text.
    return text if spec.datatype == BYTES and not isinstance(value, str | list) else value


def _from_file(file: File, spec: TensorSpec) -> Any:
    path, content = file
    if path.suffix == ".npy":
        return _from_numpy(file, spec)
    if path.suffix == ".json":
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise CallerError(f"{path} is not JSON: {error}") from error
    if spec.datatype != BYTES:
        raise CallerError(f"input {spec.name!r} is {spec.datatype}: {path} must be a .json or a .npy file")
    return content


def _from_numpy(file: File, spec: TensorSpec) -> Any:
    try:
        from numpy.lib.format import read_array
    except ImportError as error:
        raise CallerError(f"reading {file.path} needs NumPy: pip install numpy") from error
    try:
        array = read_array(BytesIO(file.content), allow_pickle=False)
    except Exception as error:  # `numpy` may raise any exception on a file that is not in its format
        raise CallerError(f"{file.path} is not a NumPy file that can be read without pickle: {error}") from error
    return array[(None,) * max(0, len(spec.shape) - array.ndim)]


def _fitted(value: Any, spec: TensorSpec) -> Any:
    return _deepened(_numbers(value) if spec.datatype.startswith(("FP", "BF")) else value, len(spec.shape))


def _numbers(value: Any) -> Any:
    """Replace the names of NaN and the infinities by the numbers."""
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return _WORDS.get(value, value) if isinstance(value, str) else value


def _deepened(value: Any, rank: int) -> Any:
    """Add the leading dimensions that a value lacks. NumPy arrays are returned unchanged."""
    if not isinstance(value, list | bytes | str | int | float):
        return value
    depth = 0
    inner: Any = value
    while isinstance(inner, list):
        depth += 1
        inner = inner[0] if inner else None
    for _ in range(rank - depth):
        value = [value]
    return value

"""Reads recorded arrivals from files.

Each reader returns seconds from the beginning of the trace, or counts per minute; only the times of requests are used.
A malformed file raises CallerError.
"""

import ast
import json
import re
from array import array
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from overwinter.core.errors import CallerError

NPY_MAGIC = b"\x93NUMPY\x01\x00"


@lru_cache(maxsize=8)
def minute_counts(path: Path) -> tuple[Sequence[int], ...]:
    """Invocations per minute of each function: a `.npy` file of 64-bit integers, functions by minutes."""
    data = path.read_bytes()
    if not data.startswith(NPY_MAGIC):
        raise CallerError(f"{path} is not a .npy file of version 1")
    start = 10 + int.from_bytes(data[8:10], "little")
    try:
        header = ast.literal_eval(data[10:start].decode("latin1").strip())
        kind, (rows, columns), fortran = header["descr"], map(int, header["shape"]), header["fortran_order"]
    except (ValueError, SyntaxError, KeyError, TypeError, OverflowError) as error:
        raise CallerError(f"{path}: its header cannot be read: {error}") from error
    if kind != "<i8" or fortran or rows < 1 or columns < 1 or len(data) - start != rows * columns * 8:
        raise CallerError(
            f"{path} must contain rows of 64-bit integers ('<i8', in C order); its header says {kind!r} of "
            f"{rows}x{columns}{' in Fortran order' if fortran else ''}, and {len(data) - start} bytes follow"
        )
    flat = array("q", data[start:])
    if flat and min(flat) < 0:
        raise CallerError(f"{path} holds a negative count")
    return tuple(flat[at : at + columns] for at in range(0, rows * columns, columns))


@lru_cache(maxsize=8)
def timestamps(path: Path) -> "array[float]":
    """Arrivals of a CSV with a column TIMESTAMP, or of JSON lines with `timestamp` in milliseconds."""
    try:
        lines = path.read_text().splitlines()
        if not lines:
            raise CallerError(f"{path} is empty")
        read = _json_times if lines[0].startswith("{") else _csv_times
        times = read(lines)
    except (ValueError, KeyError, TypeError) as error:
        raise CallerError(f"{path} is not a trace of timestamps: {error}") from error
    if not times:
        raise CallerError(f"{path} has no arrivals")
    if any(after < before for before, after in pairwise(times)):
        times.sort()
    return array("d", (time - times[0] for time in times))


def _json_times(lines: list[str]) -> list[float]:
    return [float(json.loads(line)["timestamp"]) / 1000 for line in lines if line]


def _csv_times(lines: list[str]) -> list[float]:
    column = lines[0].split(",").index("TIMESTAMP")
    rows = (line.split(",") for line in lines[1:] if line)
    return [_moment(row[column] if column < len(row) else "") for row in rows]


def _moment(text: str) -> float:
    """Return the Unix time of `2023-11-16 18:15:46.6805900` in UTC; `datetime` reads only six decimals."""
    found = re.fullmatch(r"(.{19})(\.\d+)?", text)
    if found is None:
        raise ValueError(f"{text!r} is not a date and time")
    whole = datetime.fromisoformat(found[1] + "+00:00").timestamp()
    return whole + float(found[2] or 0)

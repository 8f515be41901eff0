"""Hostile bodies of inference requests: mutants of valid ones, and bodies that are expensive to check."""

import gzip
import json
import struct
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from benchmarks.hostile import mutation
from benchmarks.hostile.exchange import request

MIB = 1 << 20
LARGE = 64 * MIB


class HostileRequest(NamedTuple):
    """A whole HTTP request, and the row of numbers in it, if that is certain."""

    content: bytes
    values: list[float] | None = None


def infer(function: str, body: bytes, headers: str = "") -> bytes:
    """Return a whole inference request."""
    return request("POST", f"/v2/models/{function}/infer", body, f"content-type: application/json\r\n{headers}")


def valid_json(rng: Random) -> dict[str, Any]:
    """Return a request that uses most of the protocol."""
    values = [round(rng.uniform(-9, 9), 3) for _ in range(4)]
    data: list[Any] = [values] if rng.random() < 0.5 else values
    return {
        "id": "abc",
        "parameters": {"priority": 1, "timeout": 5_000_000},
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": data, "parameters": {}}],
        "outputs": [{"name": "y", "parameters": {"binary_data": rng.random() < 0.5}}],
    }


def mutated_json(rng: Random) -> HostileRequest:
    """Return a mutant of the JSON."""
    mutant = mutation.tree(valid_json(rng), rng)
    return HostileRequest(infer("scale", json.dumps(mutant).encode()), row_of(mutant))


def mutated_text(rng: Random) -> HostileRequest:
    """Return a mutant of the JSON's bytes."""
    return HostileRequest(infer("scale", mutation.content(json.dumps(valid_json(rng)).encode(), rng)))


def mutated_binary(rng: Random) -> HostileRequest:
    """Return a mutant of a request with the binary extension: of its head, its lengths or its bytes."""
    data = struct.pack("<4f", *(rng.uniform(-9, 9) for _ in range(4)))
    given = {"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": len(data)}}
    tree: Any = {"inputs": [given], "parameters": {"binary_data_output": True}}
    if rng.random() < 0.6:
        tree = mutation.tree(tree, rng)
    head = json.dumps(tree).encode()
    length: Any = len(head) if rng.random() < 0.7 else rng.choice((*mutation.NUMBERS, "x", "", "1,2", "+5", "0x10"))
    body = head + (data if rng.random() < 0.7 else mutation.content(data, rng))
    return HostileRequest(infer("scale", body, f"inference-header-content-length: {length}\r\n"))


def mutated_words(rng: Random) -> HostileRequest:
    """Return a mutant of a binary request with BYTES, which has a length before each element."""
    words = [rng.randbytes(rng.randint(0, 9)) for _ in range(rng.randint(0, 5))]
    data = b"".join(len(word).to_bytes(4, "little") + word for word in words)
    data = data if rng.random() < 0.3 else mutation.content(data, rng)
    shape = [len(words)] if rng.random() < 0.7 else rng.choice(([], [0], [1, len(words)], [2**40], [2**62, 4], [-1]))
    given = {"name": "words", "datatype": "BYTES", "shape": shape, "parameters": {"binary_data_size": len(data)}}
    head = json.dumps({"inputs": [given]}).encode()
    return HostileRequest(infer("words", head + data, f"inference-header-content-length: {len(head)}\r\n"))


def row_of(tree: Any) -> list[float] | None:
    """Return the row in a request for `scale`, if it is certain."""
    try:
        [given] = tree["inputs"]
        data = given["data"]
        row = data[0] if isinstance(data[0], list) else data
        sure = given["name"] == "x" and given["datatype"] == "FP32" and given["shape"] == [1, 4] and len(row) == 4
        return [float(item) for item in row] if sure and not any(isinstance(item, bool) for item in row) else None
    except (TypeError, KeyError, ValueError, IndexError, OverflowError):
        return None


def _numbers(count: int) -> bytes:
    return b"0," * (count - 1) + b"0"


def _json_of(nbytes: int) -> bytes:
    count = nbytes // 2
    return b'{"inputs":[{"name":"x","datatype":"FP32","shape":[%d,4],"data":[%b]}]}' % (count // 4, _numbers(count))


def _binary(function: str, given: dict[str, Any], data: bytes, outputs: Any = None) -> bytes:
    tree: dict[str, Any] = {"inputs": [{**given, "parameters": {"binary_data_size": len(data)}}]}
    if outputs is not None:
        tree["outputs"] = outputs
    head = json.dumps(tree).encode()
    return infer(function, head + data, f"inference-header-content-length: {len(head)}\r\n")


def _empty_words(nbytes: int) -> bytes:
    """Return BYTES with only empty elements, 4 bytes each."""
    return _binary("words", {"name": "words", "datatype": "BYTES", "shape": [nbytes // 4]}, bytes(nbytes))


def _long_answer(nbytes: int) -> bytes:
    """Return many numbers in binary, with the answer requested as JSON."""
    shape = [nbytes // 16, 4]
    return _binary("scale", {"name": "x", "datatype": "FP32", "shape": shape}, bytes(nbytes // 16 * 16))


def _deep(levels: int) -> bytes:
    data = b"[" * levels + b"]" * levels
    return infer("scale", b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"data":%b}]}' % data)


def _dimensions(count: int) -> bytes:
    shape = [1] * count
    given = {"name": "x", "datatype": "FP32", "shape": shape, "data": [0.0]}
    return infer("scale", json.dumps({"inputs": [given]}).encode())


def _bomb(nbytes: int) -> bytes:
    packed = gzip.compress(_json_of(nbytes), 1)
    return infer("scale", packed, "content-encoding: gzip\r\n")


def _many_inputs(count: int) -> bytes:
    given = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [0, 0, 0, 0]}
    return infer("scale", json.dumps({"inputs": [given] * count}).encode())


def _huge_shape(_: int) -> bytes:
    given = {"name": "x", "datatype": "FP32", "shape": [2**62, 2**62] * 16, "data": []}
    return infer("scale", json.dumps({"inputs": [given]}).encode())


HEAVY: dict[str, Callable[[], bytes]] = {
    "json of 64 MiB": lambda: infer("scale", _json_of(LARGE)),
    "json of 8 MiB": lambda: infer("scale", _json_of(8 * MIB)),
    "gzip bomb of 64 MiB": lambda: _bomb(LARGE),
    "gzip bomb of 250 MiB of spaces": lambda: infer(
        "scale", gzip.compress(b" " * (250 * MIB), 1), "content-encoding: gzip\r\n"
    ),
    "empty BYTES of 64 MiB": lambda: _empty_words(LARGE),
    "empty BYTES of 8 MiB": lambda: _empty_words(8 * MIB),
    "JSON answer of 64 MiB": lambda: _long_answer(LARGE),
    "a thousand dimensions": lambda: _dimensions(1000),
    "a million dimensions": lambda: _dimensions(1_000_000),
    "nested 1000 deep": lambda: _deep(1000),
    "nested 4 million deep": lambda: _deep(1 << 22),
    "100,000 inputs": lambda: _many_inputs(100_000),
    "a shape of 2^1984": lambda: _huge_shape(0),
    "body of 300 MiB": lambda: infer("scale", bytes(300 * MIB)),
}
"""Requests each of which could freeze or bloat a node."""

LIGHT: dict[str, Callable[[Random], HostileRequest]] = {
    "json": mutated_json,
    "text": mutated_text,
    "binary": mutated_binary,
    "words": mutated_words,
}
"""Mutants by form."""

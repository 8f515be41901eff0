"""A minimal HTTP client for benchmarks: prepared requests over a plain socket."""

import json
import socket
from collections.abc import Sequence
from typing import NamedTuple

from overwinter.core.tensor import Tensor

END = b"\r\n\r\n"
CHUNK_BYTES = 1 << 20


class Answer(NamedTuple):
    """One HTTP answer; header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def start(self) -> str:
        """The kind of start: nothing needed (warm), a bind (bound), or a new worker with weights in memory (host) or on
        disk (disk).
        """
        return self.headers["overwinter-start"]

    @property
    def tensors(self) -> bytes:
        """The bytes of all outputs, in order, after the JSON head."""
        return self.body[int(self.headers["inference-header-content-length"]) :]


class Connection:
    """A connection to a node that stays open."""

    def __init__(self, port: int, timeout_s: float | None = None) -> None:
        """Connect. With `timeout_s`, raise TimeoutError if connecting, sending or receiving waits this long."""
        self._socket = socket.create_connection(("127.0.0.1", port), timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ask(self, request: bytes) -> Answer:
        """Send a request and wait for the answer; raise RuntimeError unless it is a success."""
        answer = self.exchange(request)
        if answer.status != 200:
            raise RuntimeError(f"the node answered {answer.status}: {answer.body.decode(errors='replace')}")
        return answer

    def exchange(self, request: bytes) -> Answer:
        """Send a request and wait for any answer; raise ConnectionError if there is none."""
        self._socket.sendall(request)
        received = bytearray()
        while (stop := received.find(END)) < 0:
            received += self._more()
        first, *lines = received[:stop].decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        size = stop + len(END) + int(headers["content-length"])
        while len(received) < size:
            received += self._more()
        return Answer(int(first.split()[1]), headers, bytes(received[stop + len(END) :]))

    def _more(self) -> bytes:
        part = self._socket.recv(CHUNK_BYTES)
        if not part:
            raise ConnectionResetError("the node closed the connection")
        return part


def get(path: str) -> bytes:
    """Return a request without a body."""
    return f"GET {path} HTTP/1.1\r\nhost: node\r\n\r\n".encode()


def binary_request(function: str, inputs: Sequence[Tensor]) -> bytes:
    """Return an inference request with the binary extension both ways."""
    described = [{**_described(tensor), "parameters": {"binary_data_size": len(tensor.data)}} for tensor in inputs]
    head = json.dumps({"inputs": described, "parameters": {"binary_data_output": True}}).encode()
    body = b"".join([head, *(tensor.data for tensor in inputs)])
    return _post(function, body, f"inference-header-content-length: {len(head)}\r\n")


def json_request(function: str, inputs: Sequence[Tensor], values: Sequence[list[float]]) -> bytes:
    """Return an inference request in JSON both ways; `values` are the flat elements of each input."""
    described = [{**_described(tensor), "data": data} for tensor, data in zip(inputs, values, strict=True)]
    return _post(function, json.dumps({"inputs": described}).encode(), "content-type: application/json\r\n")


def with_token(request: bytes, token: str | None) -> bytes:
    """The request as the owner of a token sends it; None: as it is."""
    if token is None:
        return request
    line, rest = request.split(b"\r\n", 1)
    return b"%s\r\nauthorization: Bearer %s\r\n%s" % (line, token.encode(), rest)


def _described(tensor: Tensor) -> dict[str, object]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}


def _post(function: str, body: bytes, headers: str) -> bytes:
    head = f"POST /v2/models/{function}/infer HTTP/1.1\r\nhost: node\r\n{headers}content-length: {len(body)}\r\n\r\n"
    return head.encode() + body

"""Sends raw bytes to a node and reads any answer."""

import errno
import json
import socket
import time
from collections.abc import Iterable
from typing import NamedTuple

END = b"\r\n\r\n"
CHUNK_BYTES = 1 << 20
ATTACKER = "127.0.0.2"
"""The address of attackers: a node may limit each address, and the neighbour has another one."""
PATIENCE_S = 30.0
"""A client that sent a whole request and has no complete answer after this time counts as hung."""
NO_PORT = (errno.EADDRINUSE, errno.EADDRNOTAVAIL)
PORTS_S = 90.0
"""A closed connection keeps its port for a minute."""


class Reply(NamedTuple):
    """One HTTP answer; header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def said(self) -> str:
        """The error in the answer, or the beginning of its content."""
        try:
            return str(json.loads(self.body)["error"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return self.body[:200].decode("latin-1")

    @property
    def tensors(self) -> bytes:
        """The bytes of all outputs after the JSON head."""
        return self.body[int(self.headers.get("inference-header-content-length", len(self.body))) :]


class HungError(Exception):
    """No answer came in time, and the connection stayed open."""


def connect(port: int, patience_s: float = PATIENCE_S) -> socket.socket:
    """Connect; raise ConnectionError if the port is closed. Waits while this machine has no free port."""
    until = time.monotonic() + PORTS_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), patience_s, (ATTACKER, 0))
        except OSError as error:
            if error.errno not in NO_PORT or time.monotonic() > until:
                raise
            time.sleep(0.1)


def exchange(port: int, parts: bytes | Iterable[bytes], patience_s: float = PATIENCE_S) -> Reply | None:
    """Send bytes over a new connection and wait for one answer.

    None if the node closes without one; HungError if it is not complete in time, ConnectionError if the port is closed.
    """
    with connect(port, patience_s) as end:
        try:
            for part in [parts] if isinstance(parts, bytes) else parts:
                end.sendall(part)
        except TimeoutError as error:
            raise HungError(f"the node stopped reading for {patience_s} s") from error
        except OSError:
            # The node may have answered before it closed.
            pass
        return receive(end, patience_s)


def receive(end: socket.socket, patience_s: float = PATIENCE_S) -> Reply | None:
    """Receive one answer; None if there is none, or only a part. Raises HungError."""
    until = time.monotonic() + patience_s
    received = bytearray()
    size = -1
    while size < 0 or len(received) < size:
        try:
            end.settimeout(max(0.001, until - time.monotonic()))
            part = end.recv(CHUNK_BYTES)
        except TimeoutError:
            raise HungError(f"no answer within {patience_s} s; so far {bytes(received[:80])!r}") from None
        except OSError:
            return None
        if not part:
            return _parsed(received) if _until_close(received) else None
        received += part
        if size < 0:
            size = _whole_size(received)
    return _parsed(received)


def request(method: str, path: str, body: bytes = b"", headers: str = "") -> bytes:
    """Return a whole request with its correct length."""
    head = f"{method} {path} HTTP/1.1\r\nhost: node\r\n{headers}content-length: {len(body)}\r\n\r\n"
    return head.encode("latin-1", "replace") + body


def tenant_header(tenant: str) -> str:
    """Return the tenant header of a request."""
    return f"overwinter-tenant: {tenant}\r\n"


def ask(
    port: int, method: str, path: str, body: bytes = b"", patience_s: float = PATIENCE_S, tenant: str = "default"
) -> Reply | None:
    """Send one valid request for a tenant."""
    return exchange(
        port, request(method, path, body, f"content-type: application/json\r\n{tenant_header(tenant)}"), patience_s
    )


def _whole_size(received: bytearray) -> int:
    """Return the size of the whole answer; -1 while it is unknown, which with chunks is until the last one."""
    stop = received.find(END)
    if stop < 0:
        return -1
    headers = _headers(received[:stop])
    if "content-length" in headers:
        return stop + len(END) + int(headers["content-length"])
    chunked = headers.get("transfer-encoding") == "chunked"
    return len(received) if chunked and received.endswith(b"0\r\n\r\n") else -1


def _until_close(received: bytearray) -> bool:
    """Whether the answer ends with its connection, because it has no length."""
    stop = received.find(END)
    return stop >= 0 and not {"content-length", "transfer-encoding"} & _headers(received[:stop]).keys()


def _headers(head: bytes | bytearray) -> dict[str, str]:
    _, *lines = bytes(head).decode("latin-1").split("\r\n")
    return {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}


def _parsed(received: bytearray) -> Reply | None:
    stop = received.find(END)
    first = bytes(received[:stop]).split(b"\r\n", 1)[0].split()
    if len(first) < 2 or not first[1].isdigit():
        return None
    return Reply(int(first[1]), _headers(received[:stop]), bytes(received[stop + len(END) :]))

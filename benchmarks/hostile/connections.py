"""Hostile bytes on HTTP connections: false lengths, slow senders, connections that never finish."""

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from random import Random

from benchmarks.hostile import mutation
from benchmarks.hostile.bodies import infer, valid_json
from benchmarks.hostile.exchange import connect, request
from benchmarks.wire import get

MIB = 1 << 20
WHOLE = get("/v2/health/live")
SLOW_S = 0.02
Parts = Iterator[bytes]


def headers_without_end(rng: Random) -> Parts:
    """Send header after header, up to 16 MiB."""
    yield b"GET /v2 HTTP/1.1\r\nhost: node\r\n"
    line = b"x-%d: " % rng.randrange(1000) + b"a" * rng.choice((10, 1000, 60_000)) + b"\r\n"
    part = line * max(1, (64 << 10) // len(line))
    for _ in range(16 * MIB // len(part)):
        yield part


def one_long_header(rng: Random) -> Parts:
    """Send one header line of many MiB."""
    yield b"GET /v2 HTTP/1.1\r\nhost: node\r\nx-long: "
    for _ in range(rng.choice((1, 8, 110))):
        yield b"a" * MIB
    yield b"\r\n\r\n"


def long_path(rng: Random) -> Parts:
    """Send a path of up to 4 MB, with many parts."""
    yield b"GET /" + rng.choice((b"a", b"a/", b"%41", b"..;/", b"%00")) * rng.choice((1000, 100_000, 1_000_000))
    yield b" HTTP/1.1\r\nhost: node\r\n\r\n"


def lying_chunks(rng: Random) -> Parts:
    """Send a chunked body with invalid sizes."""
    yield b"POST /v2/models/scale/infer HTTP/1.1\r\nhost: node\r\ntransfer-encoding: chunked\r\n\r\n"
    for _ in range(rng.randint(1, 20)):
        size = rng.choice((b"5", b"0x5", b"-1", b"ffffffffffffffffff", b"5;ext=" + b"a" * 9999, b"", b"\x00", b"0005"))
        yield size + b"\r\nabcde" + rng.choice((b"\r\n", b"\n", b"", b"xx"))
    yield rng.choice((b"0\r\n\r\n", b"0\r\nx: y\r\n\r\n", b""))


def tiny_chunks(rng: Random) -> Parts:
    """Send a body of up to 1 MB in chunks of one byte."""
    yield b"POST /v2/models/scale/infer HTTP/1.1\r\nhost: node\r\ntransfer-encoding: chunked\r\n\r\n"
    part = b"1\r\n \r\n" * 10_000
    for _ in range(rng.choice((2, 20, 100))):
        yield part
    yield b"0\r\n\r\n"


def two_lengths(rng: Random) -> Parts:
    """Send several lengths, or a length and chunks, so that the end of a request is ambiguous."""
    lengths = rng.choice(
        (b"content-length: 5\r\ncontent-length: 50\r\n", b"content-length: 5\r\ntransfer-encoding: chunked\r\n")
    )
    yield b"POST /v2/models/scale/infer HTTP/1.1\r\nhost: node\r\n" + lengths + b"\r\n0\r\n\r\n" + WHOLE


def odd_length(rng: Random) -> Parts:
    """Send a length that is not a number, or is far from the body's."""
    length = rng.choice((b"-1", b"1e9", b"+5", b"99999999999999999999", b"0x10", b"5 5", b"", b"\xb2", b"5,5", b"200"))
    path = rng.choice((b"/v2/models/scale/infer", b"/overwinter/v1/blocks/" + b"a" * 64, b"/overwinter/v1/functions"))
    method = b"PUT " if b"blocks" in path else b"POST "
    yield method + path + b" HTTP/1.1\r\nhost: node\r\ncontent-length: " + length + b"\r\n\r\nhello"


def pipelined(rng: Random) -> Parts:
    """Send up to 501 requests at once, in half of the cases with a broken one before the last."""
    yield WHOLE * rng.randint(1, 500) + rng.choice((b"", b"\x00\r\n\r\n")) + WHOLE


def old_and_new(rng: Random) -> Parts:
    """Send other versions, other protocols, other methods."""
    yield rng.choice(
        (
            b"GET /v2\r\n",
            b"GET /v2 HTTP/0.9\r\n\r\n",
            b"GET /v2 HTTP/9.9\r\nhost: node\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
            b"GET /v2 HTTP/1.1\r\nhost: node\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
            b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nhost: node\r\n\r\n",
            b"OPTIONS * HTTP/1.1\r\nhost: node\r\n\r\n",
            b"GET http://127.0.0.1:1/v2 HTTP/1.1\r\nhost: node\r\n\r\n",
            b"HEAD /v2 HTTP/1.1\r\nhost: node\r\n\r\n",
            b"POST /v2/models/scale/infer HTTP/1.1\r\nhost: node\r\nexpect: 100-continue\r\ncontent-length: 9\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200),
        )
    )


def mutated(rng: Random) -> Parts:
    """Send a valid request with a few random bytes changed."""
    yield mutation.content(rng.choice((WHOLE, infer("scale", json.dumps(valid_json(rng)).encode()))), rng)


def noise(rng: Random) -> Parts:
    """Send random bytes."""
    yield rng.randbytes(rng.choice((1, 100, 100_000)))


def slow(rng: Random) -> Parts:
    """Send, byte by byte, a request that never completes."""
    for byte in WHOLE[: rng.randint(5, 30)]:
        time.sleep(SLOW_S)
        yield bytes([byte])


def paths(rng: Random) -> Parts:
    """Send requests for nearly valid paths."""
    name = rng.choice(
        ("scale", "scale@1", "..", "%2e%2e", "a" * 500, "é", "", "-", "scale%00", "Scale", "'--", "nobody")
    )
    version = rng.choice(("1", "0", "-1", "999999999999999999999", "1.0", "latest", "²", "", "01"))
    path = rng.choice(
        (
            f"/v2/models/{name}/versions/{version}/infer",
            f"/v2/models/{name}/config",
            f"/overwinter/v1/functions/{name}/versions/{version}",
            f"/overwinter/v1/functions/{name}/explain",
            f"/overwinter/v1/usage/{name}",
            f"/v2/repository/models/{name}/load",
            f"/v2/repository/models/{name}/unload",
            f"/overwinter/v1/blocks/{name}",
            f"//v2//models/{name}",
        )
    )
    yield request(rng.choice(("GET", "POST", "PUT", "HEAD", "PATCH")), path, rng.choice((b"", b"{}", b"[]", b"null")))


SENT: dict[str, Callable[[Random], Parts]] = {
    "headers without end": headers_without_end,
    "one long header": one_long_header,
    "long path": long_path,
    "lying chunks": lying_chunks,
    "tiny chunks": tiny_chunks,
    "two lengths": two_lengths,
    "odd length": odd_length,
    "pipelined": pipelined,
    "old and new": old_and_new,
    "mutated": mutated,
    "noise": noise,
    "slow": slow,
    "paths": paths,
}
"""What is sent on one connection. Any answer is allowed except an unforeseen 5xx."""


@contextlib.contextmanager
def half_open(
    port: int, count: int, begun: bytes = b"POST /v2/models/scale/infer HTTP/1.1\r\nhost: n"
) -> Iterator[int]:
    """Hold connections with incomplete requests; yield the number that the node accepted."""
    held: list[socket.socket] = []
    try:
        with contextlib.suppress(OSError):
            for _ in range(count):
                held.append(connect(port, 2.0))
                held[-1].sendall(begun)
        yield len(held)
    finally:
        for end in held:
            end.close()


def stalled(nbytes: int, announced: int) -> bytes:
    """Return the beginning of a request whose body stops in the middle."""
    head = f"POST /v2/models/scale/infer HTTP/1.1\r\nhost: node\r\ncontent-length: {announced}\r\n\r\n"
    return head.encode() + bytes(nbytes)

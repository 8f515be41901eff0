"""A request is checked against the version that answers it."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.api.fake_node import Served, spec

NAME = "changing"


@contextmanager
def deployed_meanwhile(served: Served, body: bytes, fields: str) -> Iterator[socket.socket]:
    """Send a request without a version, and replace the version that answers it when a part of its body has arrived."""
    node = served.node
    # The test before this one may have just received its answer.
    while served.budget.held:
        pass
    node._add(NAME, 1, (spec("a", "INT32", 2),), (spec("y", "INT32", 2),))
    with socket.create_connection(("127.0.0.1", served.port), 20) as client:
        head = f"POST /v2/models/{NAME}/infer HTTP/1.1\r\ncontent-length: {len(body)}\r\n{fields}\r\n"
        client.sendall(head.encode() + body[:8])
        while not served.budget.held:
            pass
        node._add(NAME, 2, (spec("x", "FP32", 3),), (spec("y", "FP32", 3),))
        client.sendall(body[8:])
        yield client
    node.views = {key: view for key, view in node.views.items() if key[0] != NAME}


def request(name: str, datatype: str, count: int) -> bytes:
    data = list(range(count))
    return json.dumps({"inputs": [{"name": name, "datatype": datatype, "shape": [count], "data": data}]}).encode()


@pytest.mark.parametrize(
    ("body", "fields", "status", "words"),
    [
        (request("a", "INT32", 2), "", 400, b"the inputs are 'x'"),
        (request("x", "FP32", 3), "", 200, b'"model_version":"2"'),
        (bytes(12), "inference-header-content-length: 0\r\n", 200, b'"model_version":"2"'),
    ],
)
def test_a_request_is_checked_against_the_version_that_is_deployed_while_its_body_arrives(
    served: Served, body: bytes, fields: str, status: int, words: bytes
) -> None:
    with deployed_meanwhile(served, body, fields) as client:
        answer = client.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 %d" % status)
    assert words in answer


def test_the_body_of_a_request_for_an_unknown_function_is_not_read(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port), 20) as client:
        client.sendall(b"POST /v2/models/absent/infer HTTP/1.1\r\ncontent-length: 100\r\n\r\n")
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 404")

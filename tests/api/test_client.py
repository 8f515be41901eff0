import socket
import ssl
import threading
from collections.abc import Callable, Iterator

import httpx
import numpy
import pytest
import torch

from overwinter.api.client import Client
from overwinter.core.errors import (
    CallerError,
    ConflictError,
    DeadlineError,
    MachineError,
    NotFoundError,
    OverloadedError,
    RateError,
    TooLargeError,
)
from overwinter.store.blocks import address_of
from tests.api.fake_node import BLOCK_BYTES_MAX, Served, manifest_of, spec


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with Client(served.url) as client:
        yield client


def answer_once(listener: socket.socket, answer: bytes) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(65536)
        connection.sendall(answer)


def test_arrays_tensors_and_lists_give_the_same_answer(client: Client) -> None:
    for a in (torch.tensor([[1, 2, 3]], dtype=torch.int32), numpy.array([[1, 2, 3]], dtype="int32"), [[1, 2, 3]]):
        answer = client.infer("add", {"a": a, "b": [[10, 20, 30]]})
        assert list(answer) == ["sum", "difference"]
        assert answer["sum"].tolist() == [[11, 22, 33]]
        assert answer["difference"].dtype == numpy.int32


def test_strings(client: Client) -> None:
    assert client.infer("reverse", {"text": ["stone", b"\xff\x00"]})["reversed"].tolist() == [b"enots", b"\x00\xff"]


def test_bfloat16(client: Client) -> None:
    given = torch.tensor([[0.5, -2.0]], dtype=torch.bfloat16)
    assert client.infer("echo-bf16", {"x": given})["y"].tolist() == [[0.5, -2.0]]


def test_an_empty_tensor(client: Client) -> None:
    assert client.infer("echo-fp32", {"x": numpy.zeros((0, 4), dtype="float32")})["y"].shape == (0, 4)


def test_version_and_timeout_reach_the_node(client: Client, served: Served) -> None:
    inputs = {"a": [[1, 2, 3]], "b": [[1, 2, 3]]}
    client.infer("add", inputs, version=1, timeout_s=1.5)
    assert served.node.calls[-1] == ("add", 1, 1.5, 0)
    client.infer("add", inputs, timeout_s=0.0)
    assert served.node.calls[-1] == ("add", None, 1e-6, 0)


def test_state(client: Client) -> None:
    assert client.live()
    assert client.ready()
    client.unload("echo-int16")
    assert not client.ready("echo-int16")
    client.load("echo-int16")
    assert client.ready("echo-int16", 1)
    client.unload("add", 1)
    assert (client.ready("add", 1), client.ready("add", 2)) == (False, True)
    client.load("add", 1)
    assert client.ready("add", 1)
    assert client.function("add")["version"] == 2
    assert client.function("add", 1)["traffic"] == 0
    with pytest.raises(NotFoundError, match="absent"):
        client.ready("absent")


def test_a_deploy(client: Client, served: Served) -> None:
    program = bytes(range(256)) * 6000
    address = address_of(program)
    manifest = manifest_of("new", program, (spec("x", "FP32", "batch", 2),), (spec("y", "FP32", "batch", 2),))
    assert client.missing([address]) == [address]
    with pytest.raises(ConflictError, match="not in the repository"):
        client.register(manifest)
    assert client.put_block(address, memoryview(program))
    assert not client.put_block(address, program)
    assert client.missing([address]) == []
    registered = client.register(manifest)
    assert (registered.name, registered.version) == ("new", 1)
    assert ("new", 1) in [(each["name"], each["version"]) for each in client.functions()]
    assert client.infer("new", {"x": [[1, 2]]})["y"].tolist() == [[1.0, 2.0]]
    client.remove("new", 1)
    with pytest.raises(NotFoundError):
        client.remove("new")
    assert served.node.repository.read(address) == program


def test_errors_have_their_class_and_say_what_is_wrong(client: Client) -> None:
    with pytest.raises(NotFoundError, match="unknown function 'absent'"):
        client.infer("absent", {"x": numpy.zeros(1)})
    with pytest.raises(CallerError, match="'b' is missing"):
        client.infer("add", {"a": [[1, 2, 3]]})
    with pytest.raises(CallerError, match="unknown input 'c' of 'add'; its inputs are a, b"):
        client.infer("add", {"c": [[1, 2, 3]]})
    with pytest.raises(OverloadedError, match="512 requests") as full:
        client.infer("busy", {"x": [1.0]})
    assert full.value.retry_after_s == 3
    with pytest.raises(MachineError, match="internal error"):
        client.infer("broken", {"x": [1.0]})
    with pytest.raises(TooLargeError):
        client.put_block(address_of(b""), bytes(BLOCK_BYTES_MAX + 1))


@pytest.mark.parametrize("scheme", ["https", "HTTPS"])
def test_certificates_are_checked(scheme: str) -> None:
    with Client(f"{scheme}://127.0.0.1") as client:
        pool = client._http._transport._pool  # type: ignore[attr-defined]
        assert pool._ssl_context.verify_mode == ssl.CERT_REQUIRED


def test_the_error_for_an_address_where_no_node_listens_says_how_to_start_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with Client(f"http://127.0.0.1:{port}") as client, pytest.raises(MachineError, match="overwinter serve"):
        client.functions()


def test_a_node_that_does_not_answer_in_time_is_a_deadline_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with Client(url, timeout_s=0.05) as client, pytest.raises(DeadlineError, match="in time"):
            client.functions()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 2\r\n\r\nhi", "status 502"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", "not a node's"),
    ],
)
def test_an_answer_that_is_not_a_node_s_is_an_error(answer: bytes, words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        answering = threading.Thread(target=answer_once, args=(listener, answer))
        answering.start()
        with Client(url) as client, pytest.raises(MachineError, match=words):
            client.functions()
        answering.join()


@pytest.mark.parametrize(
    ("answer", "call"),
    [
        (b'{"progress": 1}\n', lambda client: client.profile("f")),
        (b'{"model_version": "1", "outputs": [{"name": "y", "datatype": "FP32", "shape": [0], "parameters": {}}]}',
         lambda client: client.infer("f", {"x": numpy.zeros(1)})),
    ],
)  # fmt: skip
def test_an_answer_in_another_form_is_an_error_of_the_machine(answer: bytes, call: Callable[[Client], object]) -> None:
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(answer)}\r\nInference-Header-Content-Length: {len(answer)}\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        answering = threading.Thread(target=answer_once, args=(listener, head.encode() + answer))
        answering.start()
        with Client(url) as client, pytest.raises(MachineError, match=url):
            call(client)
        answering.join()


@pytest.mark.parametrize(
    "url", ["http://::1:8000", "http://localhost:8OOO", "http://node.example:${PORT}", f"http://{'a' * 64}:8000"]
)
def test_an_invalid_address_is_named(url: str) -> None:
    with pytest.raises(CallerError, match="is not an address"):
        Client(url)


def test_an_address_may_have_an_international_name_or_be_one_of_ipv6() -> None:
    for host in ("bücher.example", "xn--ls8h.la", "אב1.com", "::1", "localhost"):
        url = httpx.URL(scheme="http", host=host)
        with Client(str(url)) as client:
            assert client._http.base_url.raw_host == url.raw_host


def test_the_client_waits_at_most_once_for_the_rate_and_only_if_wait_s_suffices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("overwinter.api.client.time.sleep", slept.append)

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"inputs": [{"name": "x", "datatype": "FP32", "shape": [1]}]})
        return httpx.Response(429, json={"error": "too many"}, headers={"retry-after": "30"})

    with Client() as client:
        client._http = httpx.Client(base_url="http://node", transport=httpx.MockTransport(answer))
        for wait_s, sleeps in ((10.0, []), (60.0, [30.0])):
            with pytest.raises(RateError):
                client.infer("f", {"x": [1.0]}, wait_s=wait_s)
            assert slept == sleeps

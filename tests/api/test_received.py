"""Received data is parsed in steps, round-robin by client, and more data is read when there is room."""

import asyncio
import socket
from contextlib import ExitStack

import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from overwinter.api.app import serve
from overwinter.api.connections import PARSED_MAX
from overwinter.api.draining import Drain
from overwinter.api.protocol import BoundedProtocol
from overwinter.api.received import STEP_BYTES
from overwinter.node.fair_queue import STARTED_MAX
from tests.api.fake_node import LIMITS, Held

READ_BYTES = 256 << 10
"""The most bytes that one read takes from a connection."""

GET = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /v2/models/echo-fp32/infer HTTP/1.1\r\nHost: x\r\n"


def test_tiny_chunks_are_parsed_a_step_at_a_time() -> None:
    count = 40_000
    chunks = b"1\r\nx\r\n" * count + b"0\r\n\r\n"
    bodies: list[list[int]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        sizes = []
        more = True
        while more:
            message = await receive()
            sizes.append(len(message["body"]))
            more = message["more_body"]
        bodies.append(sizes)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def work(listener: socket.socket, client: socket.socket) -> None:
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(serve(app, listener, LIMITS, Drain(0)))
            answers = b""
            while answers.count(b"HTTP/1.1 200") < 3:
                answers += await asyncio.get_running_loop().sock_recv(client, 65536)
            serving.cancel()

    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        # Everything is sent before the server reads anything.
        client.sendall((POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunks) * 2 + GET + b"\r\n")
        client.setblocking(False)
        uvloop.run(asyncio.wait_for(work(listener, client), 20))
    assert [sum(sizes) for sizes in bodies] == [count, count, 0]
    assert max(map(max, bodies)) <= count / 2


def test_what_waits_to_be_parsed_is_bounded_however_the_application_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 500_000
    chunks = b"4\r\nabcd\r\n" * count + b"0\r\n\r\n"
    waiting: list[int] = []
    read = 0
    parse = BoundedProtocol._parse

    def counted(protocol: BoundedProtocol) -> None:
        waiting.append(len(protocol._received._data) - protocol._received._taken)
        parse(protocol)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal read
        more = True
        while more:
            # In each iteration at most one step is parsed, not all received data.
            for _ in range(10):
                await asyncio.sleep(0)
            message = await receive()
            read += len(message["body"])
            more = message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def work(listener: socket.socket, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(serve(app, listener, LIMITS, Drain(0)))
            await loop.sock_sendall(client, POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
            assert (await loop.sock_recv(client, 65536)).startswith(b"HTTP/1.1 200")
            serving.cancel()

    monkeypatch.setattr(BoundedProtocol, "_parse", counted)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        client.setblocking(False)
        uvloop.run(asyncio.wait_for(work(listener, client), 20))
    assert read == 4 * count
    assert max(waiting) <= READ_BYTES + STEP_BYTES
    assert len(waiting) > len(chunks) / (2 * STEP_BYTES)


def test_a_request_does_not_wait_for_all_that_another_client_has_sent() -> None:
    seen, done = list[str](), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["client"][0] if scope["path"] == "/work" else "health")
        if len(seen) == 10 * STARTED_MAX + 2:
            done.set()

    async def work(listener: socket.socket, clients: ExitStack) -> None:
        def connected(source: str) -> socket.socket:
            return clients.enter_context(socket.create_connection(listener.getsockname(), source_address=(source, 0)))

        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(serve(app, listener, LIMITS, Drain(0)))
            many = [connected("127.0.0.1") for _ in range(10 * STARTED_MAX)]
            other, health = connected("127.0.0.2"), connected("127.0.0.1")
            await asyncio.sleep(0.1)
            for each in (*many, other):
                each.sendall(b"GET /work HTTP/1.1\r\n\r\n")
            health.sendall(GET + b"\r\n")
            await done.wait()
            serving.cancel()

    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener, ExitStack() as clients:
        uvloop.run(asyncio.wait_for(work(listener, clients), 20))
    assert seen.index("127.0.0.2") <= 2 * STARTED_MAX
    # `health` is the last of its client's heads to be parsed, and starts immediately then.
    assert seen.index("health") <= (2 + 10 * STARTED_MAX // PARSED_MAX) * STARTED_MAX


def test_a_head_does_not_wait_for_all_that_another_client_has_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed, done = list[str](), asyncio.Event()
    complete = BoundedProtocol.on_headers_complete
    connected_count = 3 * PARSED_MAX
    # What follows a request that waits is not parsed.
    count = 2 * connected_count + 1

    def counted(protocol: BoundedProtocol) -> None:
        parsed.append(protocol.client_key)
        complete(protocol)
        if len(parsed) == count:
            done.set()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def work(listener: socket.socket, clients: ExitStack) -> None:
        def connected(source: str) -> socket.socket:
            return clients.enter_context(socket.create_connection(listener.getsockname(), source_address=(source, 0)))

        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(serve(app, listener, LIMITS, Drain(0)))
            many, other = [connected("127.0.0.1") for _ in range(connected_count)], connected("127.0.0.2")
            await asyncio.sleep(0.1)
            for each in many:
                each.sendall((POST + b"Content-Length: 1\r\n\r\nx") * 10)
            other.sendall(GET + b"\r\n")
            await done.wait()
            await asyncio.sleep(0.05)
            serving.cancel()

    monkeypatch.setattr(BoundedProtocol, "on_headers_complete", counted)
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener, ExitStack() as clients:
        uvloop.run(asyncio.wait_for(work(listener, clients), 20))
    assert parsed.index("127.0.0.2") <= 2 * PARSED_MAX
    assert len(parsed) == count


def test_nothing_more_is_read_while_requests_wait_behind_another(monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0
    all_read = asyncio.Event()
    receive = BoundedProtocol.data_received

    def counted(self: BoundedProtocol, data: bytes) -> None:
        nonlocal read
        read += len(data)
        if read > 8 << 20:
            all_read.set()
        receive(self, data)

    async def work(listener: socket.socket, client: socket.socket) -> int:
        loop, app = asyncio.get_running_loop(), Held()
        body = b"POST /x HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (8 << 20) + bytes(8 << 20)
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(serve(app, listener, LIMITS, Drain(0)))
            head = GET.replace(b"/v2/health/live", b"/waits") + b"\r\n"
            sending = tasks.create_task(loop.sock_sendall(client, head + 20 * (GET + b"\r\n") + body))
            await asyncio.sleep(0.3)
            before = read
            app.released.set()
            await sending
            answers = b""
            while answers.count(b"HTTP/1.1 200") < 22:
                answers += await loop.sock_recv(client, 1 << 16)
            await all_read.wait()
            serving.cancel()
        return before

    monkeypatch.setattr(BoundedProtocol, "data_received", counted)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        client.setblocking(False)
        assert uvloop.run(asyncio.wait_for(work(listener, client), 20)) <= READ_BYTES


@pytest.mark.parametrize("path", ["/reads", "/ignores"])
def test_bodies_are_handled_in_turns_as_they_arrive(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    connected_count = 20
    body_bytes = 2 << 20
    large: list[int] = [0]
    total = 0
    arrived: dict[BoundedProtocol, int] = {}
    receive_data, parse = BoundedProtocol.data_received, BoundedProtocol._parse

    def counted(self: BoundedProtocol, data: bytes) -> None:
        nonlocal total
        total += len(data)
        arrived[self] = len(data)
        receive_data(self, data)

    def parsed(self: BoundedProtocol) -> None:
        large[-1] += arrived.pop(self, 0) >= READ_BYTES // 2
        parse(self)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while scope["path"] == "/reads" and (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def work(listener: socket.socket, clients: ExitStack) -> None:
        loop = asyncio.get_running_loop()

        async def send(client: socket.socket) -> None:
            client.setblocking(False)
            await loop.sock_sendall(client, head + bytes(body_bytes))

        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(serve(app, listener, LIMITS, Drain(0)))
            for _ in range(connected_count):
                tasks.create_task(send(clients.enter_context(socket.create_connection(listener.getsockname()))))
            while total < connected_count * body_bytes:
                large.append(0)
                await asyncio.sleep(0)
            serving.cancel()

    head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), body_bytes)
    monkeypatch.setattr(BoundedProtocol, "data_received", counted)
    monkeypatch.setattr(BoundedProtocol, "_parse", parsed)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener, ExitStack() as clients:
        uvloop.run(asyncio.wait_for(work(listener, clients), 20))
    assert sum(large) > connected_count
    assert max(large) <= 2

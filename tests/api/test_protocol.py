"""Bounds on the data of a connection and on the number of connections, while another client is served."""

import asyncio
import gc
import re
import resource
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import uvloop
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from overwinter.api import app
from overwinter.api.app import ACCEPTED_MAX, serve
from overwinter.api.connections import Connections, Waits
from overwinter.api.draining import Drain
from overwinter.api.protocol import URL_MAX, BoundedProtocol
from tests.api.fake_node import LIMITS, Held, Served, serving

DATA_SEGS_IN = 152
"""The offset of the number of received data segments in the kernel's `tcp_info`."""

GET = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /v2/models/echo-fp32/infer HTTP/1.1\r\nHost: x\r\n"
LARGE = b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (32 << 20) + bytes(32 << 20)
PLACES = 8


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Yield a node with few connections and short timeouts."""
    limits = msgspec.structs.replace(
        LIMITS, head_timeout_s=0.3, stall_s=0.3, connections_max=8, idle_timeout_s=20, rate_min_bytes=1 << 20
    )
    # Without a drain: a client that sends requests ahead and disconnects leaves a request that never ends.
    with serving(tmp_path_factory.mktemp("repository"), drain_s=0, limits=limits) as served:
        yield served


def connect(served: Served) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", served.port))
    client.settimeout(20)
    return client


def send(served: Served, data: bytes) -> tuple[int, int]:
    """Return how many bytes the node accepted, at most 64 KiB too few, and the status of its answer; 0 without one."""
    sent = 0
    with connect(served) as client:
        try:
            for at in range(0, len(data), 1 << 16):
                client.sendall(data[at : at + (1 << 16)])
                sent = at
                client.setblocking(False)
                try:
                    answer = client.recv(65536)
                    break
                except BlockingIOError:
                    client.settimeout(20)
            else:
                answer = client.recv(65536)
        except ConnectionError:
            return sent, 0
    return sent, int(answer.split(b" ")[1])


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (GET + b"a: b\r\n" * 1_000_000, 431),
        (GET + b"a: " + b"b" * (8 << 20), 431),
        (GET + b"a" * (8 << 20), 431),
        (GET + b"a: b\r\n" * (LIMITS.headers_max + 1) + b"\r\n", 431),
        (b"GET /" + b"a" * (8 << 20), 414),
        (b"GET /" + b"a" * URL_MAX + b" HTTP/1.1\r\n\r\n", 414),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"e" * (8 << 20), 431),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n" + b"a: b\r\n" * 1_000_000, 431),
        (b"\0" * (1 << 20), 400),
    ],
    ids=["lines", "value", "name", "count", "path", "path-at-once", "extension", "trailers", "zeros"],
)  # fmt: skip
def test_a_head_is_bounded(served: Served, http: httpx.Client, data: bytes, status: int) -> None:
    sent, answered = send(served, data)
    assert answered == status
    # Sockets hold data in between; the node itself stops at its bounds.
    assert sent <= 6 << 20
    assert http.get("/v2/health/live").status_code == 200


def test_a_trailer_is_no_header(served: Served) -> None:
    head = b"POST /overwinter/v1/blocks/missing HTTP/1.1\r\nHost: x\r\nOverwinter-Tenant: b\r\n"
    body = b'Transfer-Encoding: chunked\r\n\r\n12\r\n{"addresses":  []}\r\n0\r\n'
    with connect(served) as client:
        # An invalid name in a trailer has no effect, so the name of another tenant would have none.
        client.sendall(head + body + b"Overwinter-Tenant: NO NAME\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_head_that_waits_behind_a_slow_request_is_not_too_slow(strict: Served) -> None:
    slow = b"POST /v2/models/slow/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s"
    body = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[1]}]}'
    strict.node.slow_cancelled.clear()
    with connect(strict) as eager:
        eager.sendall(slow % (len(body), body))
        # The piece that ends the second head begins the third.
        for piece in (GET[:-2] + b"\r\n\r", b"\n" + GET[:9]):
            eager.sendall(piece)
            time.sleep(0.05)
        assert not strict.node.slow_cancelled.wait(1)


def test_pipelined_requests_are_answered_in_order(served: Served) -> None:
    with connect(served) as eager:
        for number in range(300):
            eager.sendall(GET + b"X-Request-Id: number-%d\r\n\r\n" % number)
        eager.sendall(POST + b"Connection: close\r\n\r\n")
        answers = b""
        while more := eager.recv(65536):
            answers += more
    assert re.findall(rb"x-request-id: number-(\d+)", answers) == [b"%d" % number for number in range(300)]
    assert answers.count(b"HTTP/1.1 ") == 301


@pytest.mark.parametrize("sent", [b"GET", GET, POST + b"Content-Length: 9\r\n\r\nabc"])
def test_a_connection_that_sends_nothing_more_is_closed(strict: Served, sent: bytes) -> None:
    with connect(strict) as slow:
        slow.sendall(sent)
        assert slow.recv(65536).startswith(b"HTTP/1.1 408")
        assert slow.recv(65536) == b""


def test_a_connection_without_a_request_is_closed_without_an_answer(strict: Served) -> None:
    with connect(strict) as idle:
        assert idle.recv(65536) == b""


def test_a_quarter_of_the_descriptors_is_for_clients() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (400, limits[1]))
        assert Connections(LIMITS).most == 100
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_body_that_arrives_too_slowly_is_cut_off(strict: Served) -> None:
    with connect(strict) as slow:
        slow.sendall(POST + b"Content-Length: 100000\r\n\r\n")
        slow.settimeout(0.01)
        answer = b""
        for _ in range(1000):
            slow.sendall(b"x" * 10)
            try:
                answer = slow.recv(65536)
                break
            except TimeoutError:
                pass
    assert answer.startswith(b"HTTP/1.1 408")


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Served]:
    """Yield a node with at most PLACES connections, which it checks every `request.param` seconds, or hourly."""
    monkeypatch.setattr(app, "SWEEP_S", getattr(request, "param", 3600.0))
    with serving(tmp_path, limits=msgspec.structs.replace(LIMITS, connections_max=PLACES)) as served:
        yield served


def answer_to(client: socket.socket, data: bytes) -> bytes:
    client.sendall(data)
    return client.recv(65536)


@pytest.mark.parametrize("small", [0.01], indirect=True)
@pytest.mark.parametrize("sent", [b"", GET, GET + b"\r\n", POST + b"Content-Length: 100000\r\n\r\nabc"])
def test_idle_and_stalled_connections_make_room_for_new_ones(small: Served, sent: bytes) -> None:
    with ExitStack() as open_:
        still = [open_.enter_context(connect(small)) for _ in range(PLACES)]
        for client in still:
            client.sendall(sent)
        for _ in range(1000):
            with connect(small) as newcomer:
                answer = answer_to(newcomer, GET + b"\r\n")
            if answer.startswith(b"HTTP/1.1 200"):
                break
        assert answer.startswith(b"HTTP/1.1 200")


def test_a_connection_without_a_request_makes_room_for_another_client(small: Served) -> None:
    with ExitStack() as open_:
        for source in ("127.0.0.1", "127.0.0.2"):
            idle = [
                open_.enter_context(socket.create_connection(("127.0.0.1", small.port), 20, (source, 0)))
                for _ in range(PLACES // 2)
            ]
        with socket.create_connection(("127.0.0.1", small.port), 20, ("127.0.0.3", 0)) as newcomer:
            assert answer_to(newcomer, GET + b"\r\n").startswith(b"HTTP/1.1 200")
        assert answer_to(idle[-1], GET + b"\r\n").startswith(b"HTTP/1.1 200")


def send_until_it_is_closed(client: socket.socket) -> None:
    for _ in range(1000):
        client.sendall(b"x")
        time.sleep(0.001)


def slow_requests(served: Served, open_: ExitStack, count: int) -> list[socket.socket]:
    """Open connections with a request that is not answered yet, each from another address."""
    body = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[1]}]}'
    head = b"POST /v2/models/slow/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    clients = []
    for number in range(count):
        source = f"127.0.1.{number}", 0
        clients.append(open_.enter_context(socket.create_connection(("127.0.0.1", served.port), 20, source)))
        served.node.slow_started.clear()
        clients[-1].sendall(head + body)
        assert served.node.slow_started.wait(20)
    return clients


def test_a_new_connection_does_not_displace_one_that_is_about_to_send_a_request(small: Served) -> None:
    with ExitStack() as open_:
        slow_requests(small, open_, PLACES - 1)
        eager, late = (open_.enter_context(connect(small)) for _ in range(2))
        assert late.recv(65536).startswith(b"HTTP/1.1 503")
        assert answer_to(eager, GET + b"\r\n").startswith(b"HTTP/1.1 200")


def test_a_new_connection_does_not_displace_one_whose_body_is_arriving(small: Served) -> None:
    body = b'{"addresses":[]}'
    head = b"POST /overwinter/v1/blocks/missing HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    with ExitStack() as open_:
        slow_requests(small, open_, PLACES - 1)
        sender = open_.enter_context(connect(small))
        sender.sendall(head + body[:5])
        with connect(small) as newcomer:
            assert newcomer.recv(65536).startswith(b"HTTP/1.1 503")
        assert answer_to(sender, body[5:]).startswith(b"HTTP/1.1 200")


def test_a_refused_connection_can_read_the_reason_after_it_sent_a_large_request(small: Served) -> None:
    with ExitStack() as open_:
        slow_requests(small, open_, PLACES)
        newcomer = open_.enter_context(connect(small))
        assert answer_to(newcomer, LARGE).startswith(b"HTTP/1.1 503")
        assert newcomer.recv(65536) == b""


@pytest.mark.parametrize("small", [0.01], indirect=True)
def test_the_first_of_too_many_refused_connections_is_closed(small: Served) -> None:
    with ExitStack() as open_:
        slow_requests(small, open_, PLACES)
        away = [open_.enter_context(connect(small)) for _ in range(PLACES)]
        for client in away:
            assert client.recv(65536).startswith(b"HTTP/1.1 503")
        # More refused connections are open than the limit: the first is closed before its timeout.
        with pytest.raises(ConnectionError):
            send_until_it_is_closed(away[0])


def test_near_the_limit_of_connections_an_answer_closes_its_connection(small: Served) -> None:
    with ExitStack() as open_:
        clients = [open_.enter_context(connect(small)) for _ in range(PLACES - 1)]
        assert all(b"connection: close" not in answer_to(client, GET + b"\r\n") for client in clients)
        last = open_.enter_context(connect(small))
        assert b"connection: close" in answer_to(last, GET + b"\r\n")
        assert last.recv(65536) == b""
        # A place is free again.
        assert b"connection: close" not in answer_to(clients[0], GET + b"\r\n")


def test_an_answer_that_closes_its_connection_can_be_read_after_a_large_request(small: Served) -> None:
    with ExitStack() as open_:
        for _ in range(PLACES - 1):
            open_.enter_context(connect(small))
        last = open_.enter_context(connect(small))
        answer = answer_to(last, LARGE)
        assert answer.startswith(b"HTTP/1.1 404")
        assert b"connection: close" in answer


def test_a_request_behind_an_answer_that_closes_its_connection_is_not_started(
    small: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    begin = BoundedProtocol._start_asgi_task

    def recording(self: BoundedProtocol, cycle: Any, app: Any) -> None:
        begun.append(cycle.scope["path"])
        begin(self, cycle, app)

    monkeypatch.setattr(BoundedProtocol, "_start_asgi_task", recording)
    with ExitStack() as open_:
        for _ in range(PLACES - 1):
            open_.enter_context(connect(small))
        last = open_.enter_context(connect(small))
        answer = answer_to(last, GET + b"\r\nPOST /behind HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc")
        assert b"connection: close" in answer
        assert last.recv(65536) == b""
        time.sleep(0.05)
    assert begun == ["/v2/health/live"]


class Computing:
    """A connection with a request in progress."""

    client_key = "client"
    looked_at = 0

    def waits(self) -> Waits:
        self.looked_at += 1
        return Waits("", 1, 0)


def test_newcomers_that_find_no_room_are_refused_without_a_look_at_all_others() -> None:
    connections = Connections(LIMITS)
    busy = [Computing() for _ in range(connections.most)]
    for each in busy:
        assert connections.admit(each)
        connections.mark_busy(each)
    for now in (1.0, 2.0):
        connections.sweep(now)
        before = busy[0].looked_at
        assert not any(connections.admit(Computing()) for _ in range(100))
        assert busy[0].looked_at <= before + 2


def test_connections_with_a_request_make_no_room(tmp_path: Path) -> None:
    limits = msgspec.structs.replace(LIMITS, connections_max=4)
    with serving(tmp_path, limits=limits) as served, ExitStack() as open_:
        busy = slow_requests(served, open_, 4)[-1]
        with connect(served) as newcomer:
            assert newcomer.recv(65536).startswith(b"HTTP/1.1 503")
            assert newcomer.recv(65536) == b""
        served.loop.call_soon_threadsafe(served.node.slow_go.set)
        assert busy.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_connection_whose_second_request_is_in_progress_makes_no_room(tmp_path: Path) -> None:
    body = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[1]}]}'
    slow = b"POST /v2/models/slow/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    # The first answer of the last ones would end their connections.
    sent = [GET + b"\r\n" + slow] * 6 + [slow] * 2
    limits = msgspec.structs.replace(LIMITS, connections_max=len(sent))
    with serving(tmp_path, limits=limits) as served, ExitStack() as open_:
        for number, data in enumerate(sent):
            source = f"127.0.1.{number}", 0
            busy = open_.enter_context(socket.create_connection(("127.0.0.1", served.port), 20, source))
            served.node.slow_started.clear()
            busy.sendall(data)
            assert served.node.slow_started.wait(20)
        with socket.create_connection(("127.0.0.1", served.port), 20, ("127.0.0.3", 0)) as newcomer:
            assert newcomer.recv(65536).startswith(b"HTTP/1.1 503")
        served.loop.call_soon_threadsafe(served.node.slow_go.set)


def test_an_idle_connection_is_closed(tmp_path: Path) -> None:
    limits = msgspec.structs.replace(LIMITS, idle_timeout_s=0.3)
    with serving(tmp_path, limits=limits) as served, connect(served) as client:
        assert answer_to(client, GET + b"\r\n").startswith(b"HTTP/1.1 200")
        assert client.recv(65536) == b""


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (POST + b"Content-Length: -1\r\n\r\n", 400),
        (POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", 400),
        (POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (POST + b"Content-Length: 99999999999999999999\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (GET + b"Host: y\r\n\r\n", 400),
        (GET + 2 * b"Authorization: Bearer x\r\n" + b"\r\n", 400),
        (GET + b"Overwinter-Tenant: a\r\noverwinter-tenant: b\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (POST + b"Transfer-Encoding: Chunked\r\nContent-Encoding: br\r\n\r\n0\r\n\r\n", 415),
        (POST + b"Content-Length: 999999999\r\nExpect: 100-continue\r\n\r\n", 413),
        (POST + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n", 100),
        (GET.replace(b"1.1", b"1.0") + b"\r\n", 200),
        (GET.replace(b"1.1", b"9.9") + b"\r\n", 400),
        (GET.replace(b"GET", b"BREW") + b"\r\n", 400),
        (GET.replace(b"GET", b"PATCH") + b"\r\n", 405),
        (GET + b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: eA==\r\n\r\n", 200),
        (GET.replace(b"live", b"%00%ff%2e%2e") + b"\r\n", 404),
        (GET.replace(b"live", b"live?" + b"a=b&" * 1000) + b"\r\n", 200),
        (GET.replace(b"/v2/health/live", b"http://[/") + b"\r\n", 400),
        (GET.replace(b"/v2/health/live", b"*") + b"\r\n", 404),
    ],
)  # fmt: skip
def test_unusual_requests_get_the_right_status(served: Served, data: bytes, status: int) -> None:
    assert send(served, data)[1] == status


@pytest.mark.parametrize(
    "framing", [b"Content-Length: %d\r\n\r\n%b", b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"]
)
@pytest.mark.parametrize("apart", [False, True])
def test_the_body_of_a_request_for_an_upgrade_is_no_request(served: Served, framing: bytes, apart: bool) -> None:
    hidden = GET + b"X-Request-Id: hidden\r\n\r\n"
    head, body = (framing % (len(hidden), hidden)).split(b"\r\n\r\n", 1)
    parts = [
        POST + b"Connection: Upgrade\r\nUpgrade: h2c\r\n" + head + b"\r\n\r\n",
        body,
        GET + b"X-Request-Id: last\r\nConnection: close\r\n\r\n",
    ]
    with connect(served) as client:
        for part in parts if apart else [b"".join(parts)]:
            client.sendall(part)
            time.sleep(0.05)
        answers = b""
        while data := client.recv(65536):
            answers += data
    assert answers.count(b"HTTP/1.1 400 ") == answers.count(b"HTTP/1.1 200 ") == 1, answers
    assert b"not a valid inference request" in answers
    assert b"x-request-id: last" in answers
    assert b"x-request-id: hidden" not in answers


def test_a_small_answer_is_one_packet(served: Served) -> None:
    with connect(served) as client:
        client.sendall(GET + b"\r\n")
        answer = client.recv(65536)
        while not answer.endswith(b'{"live":true}'):
            answer += client.recv(65536)
        (packets,) = struct.unpack_from("I", client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160), DATA_SEGS_IN)
        assert packets == 1


def test_many_new_connections_are_accepted_in_one_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """An iteration may be long, and the connections of all clients wait in one queue."""
    count = 3 * ACCEPTED_MAX
    accepted = iterations = 0
    admit = Connections.admit

    def counted(connections: Connections, connection: BoundedProtocol) -> bool:
        nonlocal accepted
        accepted += 1
        return admit(connections, connection)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("there is no request")

    async def work(listener: socket.socket, clients: ExitStack) -> None:
        nonlocal iterations
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(serve(app, listener, LIMITS, Drain(0)))
            await asyncio.sleep(0.1)
            for _ in range(count):
                clients.enter_context(socket.create_connection(listener.getsockname()))
            while accepted < count:
                await asyncio.sleep(0)
                iterations += 1
            serving.cancel()

    monkeypatch.setattr(Connections, "admit", counted)
    with socket.create_server(("127.0.0.1", 0), backlog=count) as listener, ExitStack() as clients:
        uvloop.run(asyncio.wait_for(work(listener, clients), 20))
    # One iteration for each ACCEPTED_MAX connections, and two until the protocol knows of the last ones.
    assert iterations <= count // ACCEPTED_MAX + 2


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        GET,
        GET + b"\r\n",
        2 * (GET + b"\r\n"),
        b"no HTTP\r\n\r\n",
        b"GET /waits HTTP/1.1\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 20_000,
    ],
    ids=["nothing", "half a head", "a request", "two", "no HTTP", "one that waits", "chunks"],
)
def test_a_closed_connection_is_freed_without_the_garbage_collector(sent: bytes) -> None:
    left = 0

    def count() -> int:
        return sum(isinstance(each, BoundedProtocol | RequestResponseCycle) for each in gc.get_objects())

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while scope["path"] == "/waits" and (await receive())["type"] != "http.disconnect":
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def work(listener: socket.socket) -> None:
        nonlocal left
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(serve(app, listener, LIMITS, Drain(0)))
            for _ in range(3):
                with socket.create_connection(listener.getsockname()) as client:
                    client.sendall(sent)
                    await asyncio.sleep(0.05)
            await asyncio.sleep(0.05)
            left = count() - before
            serving.cancel()

    gc.collect()
    before = count()
    gc.disable()
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            uvloop.run(asyncio.wait_for(work(listener), 20))
    finally:
        gc.enable()
    assert left == 0


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /x HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}" + b"\x00" * (200 << 10),
        2 * (GET + b"\r\n") + b"\x00\r\n\r\n",
        b"POST /waits HTTP/1.1\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["after a body", "after a health check that waits", "before the permission to send"],
)
def test_a_request_is_refused_once(caplog: pytest.LogCaptureFixture, sent: bytes) -> None:
    async def work(listener: socket.socket) -> bytes:
        loop, answer, app = asyncio.get_running_loop(), b"", Held()
        app.released.set()
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(serve(app, listener, LIMITS, Drain(0)))
            with socket.create_connection(listener.getsockname()) as client:
                client.setblocking(False)
                await loop.sock_sendall(client, sent)
                while part := await loop.sock_recv(client, 1 << 16):
                    answer += part
            serving.cancel()
        return answer

    with socket.create_server(("127.0.0.1", 0)) as listener:
        answer = uvloop.run(asyncio.wait_for(work(listener), 20))
    assert answer.count(b"HTTP/1.1 4") == 1
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


@pytest.mark.parametrize("path", [b"/nowhere", b"/v2/health/live"])
def test_an_answer_before_the_client_is_asked_for_its_body_closes_the_connection(served: Served, path: bytes) -> None:
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 70\r\nExpect: 100-continue\r\n\r\n" % path
    with connect(served) as client:
        client.sendall(head)
        answer = b""
        while more := client.recv(65536):
            answer += more
    assert answer.startswith(b"HTTP/1.1 40")
    assert b"connection: close" in answer.lower()


def test_a_client_that_is_not_asked_for_its_body_yet_is_not_too_slow() -> None:
    limits = msgspec.structs.replace(LIMITS, head_timeout_s=0.2, stall_s=0.2)

    async def work(listener: socket.socket) -> bytes:
        loop, released = asyncio.get_running_loop(), asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await released.wait()
            body = (await receive())["body"]
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": body})

        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(serve(app, listener, limits, Drain(0)))
            with socket.create_connection(listener.getsockname()) as client:
                client.setblocking(False)
                head = b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
                await loop.sock_sendall(client, head)
                await asyncio.sleep(5 * limits.stall_s)
                released.set()
                asked = await loop.sock_recv(client, 1 << 16)
                await loop.sock_sendall(client, b"{}")
                answer = await loop.sock_recv(client, 1 << 16)
            serving.cancel()
        assert asked.startswith(b"HTTP/1.1 100 ")
        return answer

    with socket.create_server(("127.0.0.1", 0)) as listener:
        answer = uvloop.run(asyncio.wait_for(work(listener), 20))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"{}")

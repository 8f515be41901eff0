"""How long connections keep their places, and which one is closed for a new one."""

import asyncio
import socket

import msgspec
import uvloop

from overwinter.api.app import serve
from overwinter.api.connections import Connections, Waits, client_of
from overwinter.api.draining import Drain
from tests.api.fake_node import LIMITS, Held


class Answering:
    """A connection whose request is being answered."""

    def __init__(self, client: str) -> None:
        self.client_key = client
        self.asked = 0

    def waits(self) -> Waits:
        self.asked += 1
        return Waits("", 1, 0)

    def time_out(self) -> None:
        raise AssertionError("it is not slow")

    abort = time_out


def test_a_full_node_looks_only_once_between_sweeps_for_a_connection_to_close() -> None:
    limits = msgspec.structs.replace(LIMITS, connections_max=8, caller_share=0.5)
    connections = Connections(limits)
    here = [Answering(client) for client in "aaaabbbb"]
    for each in here:
        assert connections.admit(each)
        connections.mark_busy(each)
    assert not any(connections.admit(Answering("c")) for _ in range(100))
    assert sum(each.asked for each in here) <= len(here)
    connections.sweep(1.0)
    before = sum(each.asked for each in here)
    assert not connections.admit(Answering("c"))
    assert sum(each.asked for each in here) > before


def test_the_connection_of_a_client_that_disconnects_counts_until_its_request_ends() -> None:
    limits = msgspec.structs.replace(LIMITS, connections_max=4, caller_share=1.0)

    async def answered(address: tuple[str, int]) -> bytes:
        loop = asyncio.get_running_loop()
        with socket.create_connection(address) as client:
            client.setblocking(False)
            await loop.sock_sendall(client, b"GET /x HTTP/1.1\r\n\r\n")
            return (await loop.sock_recv(client, 1 << 16))[:12]

    async def work(listener: socket.socket) -> list[bytes]:
        app, address = Held(), listener.getsockname()
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(serve(app, listener, limits, Drain(0)))
            for _ in range(4):
                with socket.create_connection(address) as client:
                    client.sendall(b"GET /waits HTTP/1.1\r\n\r\n")
                    await app.begun.acquire()
            await asyncio.sleep(0.1)
            found = [await answered(address)]
            app.released.set()
            await asyncio.sleep(0.1)
            found.append(await answered(address))
            serving.cancel()
        return found

    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = uvloop.run(asyncio.wait_for(work(listener), 20))
    assert found == [b"HTTP/1.1 503", b"HTTP/1.1 200"]


class Waiting:
    """A connection that waits for its client."""

    def __init__(self, client: str, what: str = "idle") -> None:
        self.client_key, self.what, self.open = client, what, True

    def waits(self) -> Waits:
        return Waits(self.what, 1, 0)

    def time_out(self) -> None:
        raise AssertionError("it is not slow")

    def abort(self) -> None:
        self.open = False


def opened(most: int, here: str, what: str = "idle") -> tuple[Connections, list[Waiting]]:
    """Return a server's connections: one for each letter of `here`, which is the name of the client."""
    connections = Connections(msgspec.structs.replace(LIMITS, connections_max=most))
    made = [Waiting(client, what) for client in here]
    for each in made:
        assert connections.admit(each)
        if what != "idle":
            connections.mark_busy(each)
    return connections, made


def test_a_new_connection_displaces_one_of_the_client_with_the_most_connections() -> None:
    for what in ("idle", "body"):
        connections, here = opened(6, "aaaabc", what)
        assert [connections.admit(Waiting(client)) for client in "bcd"] == [True] * 3
        assert [each.open for each in here] == [False] * 3 + [True] * 3


def test_a_client_does_not_displace_a_connection_of_a_client_with_as_many() -> None:
    connections, here = opened(6, "aabbcc")
    assert [connections.admit(Waiting(client)) for client in "abc"] == [False] * 3
    assert all(each.open for each in here)
    assert connections.admit(Waiting("d"))


def test_a_client_without_a_connection_that_can_be_closed_is_passed_over() -> None:
    connections, _ = opened(6, "aaaabb", "")
    assert not connections.admit(Waiting("c"))
    connections, here = opened(6, "aaabbb", "")
    here[-1].what = "body"
    assert connections.admit(Waiting("c"))
    assert [each.open for each in here] == [True] * 5 + [False]


def test_near_the_limit_a_client_with_about_the_average_of_connections_or_more_is_crowded() -> None:
    connections, _ = opened(8, "aaaaaab")
    assert not connections.is_crowded("a")
    assert connections.admit(Waiting("b"))
    assert (connections.is_crowded("a"), connections.is_crowded("b")) == (True, False)
    connections, _ = opened(8, "abcdefgh")
    assert all(connections.is_crowded(each) for each in "abcdefgh")


def test_one_search_finds_what_can_be_closed_among_as_many_clients_as_connections() -> None:
    most = 400
    connections = Connections(msgspec.structs.replace(LIMITS, connections_max=most))
    here: list[Answering | Waiting] = [*(Answering(str(number)) for number in range(most - 1)), Waiting("last")]
    for each in here:
        assert connections.admit(each)
        if isinstance(each, Answering):
            connections.mark_busy(each)
    assert connections.admit(Waiting("new"))
    asked = sum(each.asked for each in here if isinstance(each, Answering))
    assert asked <= 2 * most
    assert connections.admit(Waiting("newer"))
    assert sum(each.asked for each in here if isinstance(each, Answering)) <= 2 * most


def test_a_network_of_ipv6_is_one_client() -> None:
    assert client_of("10.0.0.1") == "10.0.0.1"
    assert client_of("2001:db8:1:2:3:4:5:6") == client_of("2001:db8:1:2:ffff::1") != client_of("2001:db8:1:3::1")
    assert client_of("::ffff:10.0.0.1") != client_of("::ffff:10.0.0.2")
    assert client_of("2001:db8::a:b:c:d") == client_of("2001:db8::1") != client_of("2001:db8:0:1::1")
    assert client_of("fe80::1%eth0") == client_of("fe80::2%eth0")

"""A request reserves memory before its body is read, and waits for memory only while its client is connected."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from starlette.types import Message

from overwinter.api.access import CALLER
from overwinter.api.budget import Budget, Reservation
from overwinter.api.exchange import CLIENT_DISCONNECTED, CONNECTION, FIELDS, RESERVATION, Request
from overwinter.api.reading import BodyLimits
from overwinter.api.steps import StepRunner
from overwinter.core.errors import CallerError, TooLargeError

MIB = 1 << 20


class FakeConnection:
    """The connection of one request."""

    has_disconnected = False
    on_disconnect: Callable[[], object] | None = None

    def disconnect(self) -> None:
        self.has_disconnected = True
        if self.on_disconnect is not None:
            self.on_disconnect()


def request(budget: Budget, connection: FakeConnection, *chunks: bytes) -> Request:
    left = [*chunks]

    async def receive() -> Message:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    fields = {b"content-length": b"%d" % sum(map(len, chunks))}
    reservation = Reservation(budget, "caller")
    scope = {
        "type": "http",
        FIELDS: fields,
        RESERVATION: reservation,
        CALLER: SimpleNamespace(),
        CONNECTION: connection,
    }
    return Request(scope, receive, StepRunner())


def test_the_memory_of_a_body_is_reserved_before_it_is_read() -> None:
    async def scene() -> None:
        budget = Budget(MIB, 1.0, 0.01)
        with pytest.raises(TooLargeError):
            await request(budget, FakeConnection(), bytes(2 * MIB)).body(BodyLimits(8 * MIB))
        small = request(budget, FakeConnection(), b"abc")
        assert await small.body(BodyLimits(MIB, 8)) == b"abc"
        assert small.reservation.nbytes == 24

    asyncio.run(scene())


def test_a_request_whose_client_disconnected_does_not_wait_for_memory() -> None:
    async def scene() -> None:
        budget = Budget(4 * MIB, 1.0, 20.0)
        first = Reservation(budget, "other")
        assert first.reserve(3 * MIB)
        connections = [FakeConnection(), FakeConnection(), FakeConnection()]
        bodies = [
            asyncio.create_task(request(budget, connection, bytes(MIB)).body(BodyLimits(MIB)))
            for connection in connections
        ]
        await asyncio.sleep(0)
        for connection in connections[:2]:
            connection.disconnect()
        # The requests of those that disconnected do not wait, although no memory was released.
        done, _ = await asyncio.wait(bodies[:2], timeout=10)
        assert done == set(bodies[:2])
        for body in done:
            with pytest.raises(CallerError, match=CLIENT_DISCONNECTED):
                await body
        assert not bodies[2].done()
        first.close()
        assert len(await bodies[2]) == MIB
        assert dict(budget.held_by) == {"caller": MIB}
        assert [connection.on_disconnect for connection in connections] == [None] * 3

    asyncio.run(scene())

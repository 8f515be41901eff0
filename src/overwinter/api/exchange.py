"""The HTTP request and the responses that route handlers use."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

import msgspec
from starlette import responses
from starlette.requests import HTTPConnection
from starlette.types import Receive, Scope, Send

from overwinter.api.access import CALLER, Caller
from overwinter.api.budget import Reservation
from overwinter.api.connections import PIECE_BYTES
from overwinter.api.reading import BodyLimits, Fields, announced_length, read_body
from overwinter.api.steps import StepRunner, Steps
from overwinter.core.errors import CallerError
from overwinter.core.tensor import Buffer

JSON_TYPE = (b"content-type", b"application/json")

CONNECTION = "overwinter.connection"
"""The key of the request's connection in the ASGI scope."""
CLIENT = "overwinter.client"
"""The key of the client's address or network (`client_of`) in the ASGI scope."""
RESERVATION = "overwinter.reservation"
"""The key of the request's memory reservation in the ASGI scope."""
FIELDS = "overwinter.fields"
"""The key of the request's headers, as a dictionary; Starlette's lookup is much slower."""
CLIENT_DISCONNECTED = "the client closed the connection before its answer was ready"
REQUEST_ID = b"x-request-id"
"""The header with the caller's id of a request. The answer repeats it."""
REQUEST_ID_MAX = 256

T = TypeVar("T")

encode_json = msgspec.json.Encoder().encode


class RequestConnection(Protocol):
    """The connection of a request while it is answered."""

    has_disconnected: bool
    """Whether the client has closed the connection."""
    on_disconnect: Callable[[], object] | None
    """Called when the client closes the connection."""


Write = Callable[[bytes], Awaitable[None]]


class Response(responses.Response):
    """A status, headers and the complete body. Until the client has read a long body, its request keeps its reservation
    of memory.
    """

    def __init__(
        self, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]], tail: Sequence[Buffer] = ()
    ) -> None:
        """`tail` follows `body`; a large response is sent without joining them. The headers are sent unchanged."""
        self.status_code = status
        self.background = None
        self.tail = tail
        self.nbytes = len(body) + sum(map(len, tail))
        self.body = body
        self.raw_headers = [*headers, (b"content-length", b"%d" % self.nbytes)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response. `send` waits for the reader; the connection closes if the reader is too slow."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        parts = (self.body, *self.tail)
        if self.nbytes <= PIECE_BYTES:
            await send({"type": "http.response.body", "body": b"".join(parts)})
            return
        for part in parts:
            view = memoryview(part).cast("B")
            for at in range(0, len(view), PIECE_BYTES):
                piece = view[at : at + PIECE_BYTES]
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class StreamingResponse(responses.StreamingResponse):
    """A streamed body that `produce` writes; `produce` is cancelled when the client disconnects or a drain ends."""

    def __init__(self, media_type: str, produce: Callable[[Write], Awaitable[None]]) -> None:
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self.init_headers()
        self._produce = produce

    async def stream_response(self, send: Send) -> None:
        """Send the head, the produced chunks, and the end."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        # Cancelled if the client has disconnected, or a drain has ended: the answer ends after what was written.
        with suppress(asyncio.CancelledError):
            await self._produce(lambda chunk: send({"type": "http.response.body", "body": chunk, "more_body": True}))
        await send({"type": "http.response.body", "body": b""})


def json_response(value: object, status: int = 200) -> Response:
    """A response whose body is `value` as JSON."""
    return Response(status, encode_json(value), [JSON_TYPE])


def decode_json(decoder: msgspec.json.Decoder[T], body: Buffer) -> T:
    """Decode the body; CallerError says what is wrong and where."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise CallerError(f"the body is not valid: {error}") from error


class Request(HTTPConnection):
    """One HTTP request. Starlette's class reads a body of any size; this one reads it within bounds."""

    def __init__(self, scope: Scope, receive: Receive, steps: StepRunner) -> None:
        super().__init__(scope)
        self.receive = receive
        self.fields: Fields = scope[FIELDS]
        """The headers, as in `headers` but faster to look up."""
        self.steps = steps
        """Runs long work in steps."""
        self.reservation: Reservation = scope[RESERVATION]
        """The request's memory reservation. It is released when the answer is sent."""
        self.caller: Caller = scope[CALLER]
        """The caller, with its view of the node."""

    async def body(self, limits: BodyLimits) -> Buffer:
        """Read the whole body, decompressed.

        Raises TooLargeError when it exceeds its limit, compressed or decompressed, OverloadedError when there is no
        memory for it, MediaError for an unknown coding, and CallerError when it is invalid or the client disconnects.
        """
        if announced := announced_length(self.fields, limits):
            await self.reserve(announced * limits.cost)
        body = await read_body(self.receive, self.fields, self.reservation, self.steps, limits)
        await self.steps.body_queue.turn(self.reservation.caller, len(body))
        return body

    async def run(self, steps: Steps[T]) -> T:
        """Run long work in steps, round-robin by caller."""
        return await self.steps.run(self.reservation.caller, steps)

    async def reserve(self, nbytes: int) -> None:
        """Reserve an announced amount of memory, waiting for it while the client stays.

        Raises TooLargeError when one request may never reserve this much, OverloadedError after the maximum wait, and
        CallerError when the client disconnects.
        """
        if not self.reservation.reserve(nbytes):
            await self.unless_disconnected(self.reservation.wait(nbytes))

    def counted(self, response: Response) -> Response:
        """The answer, whose memory is reserved until it is read. Raises TooLargeError or OverloadedError."""
        self.reservation.grow(response.nbytes)
        return response

    async def unless_disconnected(self, answer: Awaitable[T]) -> T:
        """Await `answer`; cancel it when the client disconnects, so that it leaves all queues."""
        connection: RequestConnection = self.scope[CONNECTION]
        task = asyncio.current_task()
        assert task is not None
        if connection.has_disconnected:
            task.cancel()
        # A separate watching task would cost each request more.
        connection.on_disconnect = task.cancel
        try:
            return await answer
        except asyncio.CancelledError:
            if connection.has_disconnected and not task.uncancel():
                raise CallerError(CLIENT_DISCONNECTED) from None
            raise
        finally:
            connection.on_disconnect = None

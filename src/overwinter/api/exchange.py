"""What does a handler see of one HTTP request, and what does it give back?"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import msgspec

from overwinter.api.access import Caller
from overwinter.api.budget import Hold
from overwinter.api.messages import Headers, Receive
from overwinter.api.reading import Bounds, read_body
from overwinter.api.steps import Turns
from overwinter.core.errors import CallerError
from overwinter.core.tensor import Buffer

JSON_TYPE = (b"content-type", b"application/json")

CONNECTION = "overwinter.connection"
"""Where in the scope of a request its connection is."""

LEFT = "the client closed the connection before its answer was ready"

T = TypeVar("T")

encode_json = msgspec.json.Encoder().encode


class Connection(Protocol):
    """The connection over which a request came, as long as it is the one that is answered."""

    has_left: bool
    """Whether its other side has closed it."""
    on_leave: Callable[[], object] | None
    """What is called when that happens."""


Write = Callable[[bytes], Awaitable[None]]


class Response(msgspec.Struct):
    """A status, headers and the whole body, or what writes the body as it comes."""

    status: int
    body: bytes
    headers: list[tuple[bytes, bytes]]
    stream: Callable[[Write], Awaitable[None]] | None = None
    """It raises nothing but what says that nobody reads on."""
    tail: Sequence[Buffer] = ()
    """More of the body, behind `body`, that is not copied together."""


def json_response(value: object, status: int = 200) -> Response:
    """A response whose body is `value` as JSON."""
    return Response(status, encode_json(value), [JSON_TYPE])


def decode_json(decoder: msgspec.json.Decoder[T], body: Buffer) -> T:
    """The body as what `decoder` makes of it; CallerError says what is wrong and where."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise CallerError(f"the body is not valid: {error}") from error


class Request(msgspec.Struct):
    """One HTTP request; `values` are the parts of the path that stand for `*` in its route."""

    headers: Headers
    values: list[str]
    receive: Receive
    hold: Hold
    """What it holds of the memory for requests; given back when its answer is sent."""
    turns: Turns
    """For work of more than one step."""
    connection: Connection
    caller: Caller
    """For whom it acts; what it sees of the node."""

    async def body(self, bounds: Bounds) -> Buffer:
        """The whole body, decompressed; TooLargeError when it is over its bound before or after that, OverloadedError
        when there is no memory for it.
        """
        return await read_body(self.receive, self.headers, self.hold, self.turns, bounds)

    async def unless_gone(self, answer: Awaitable[T]) -> T:
        """Await `answer` after the body was read; cancel it when the client hangs up, so that no queue holds it."""
        task = asyncio.current_task()
        assert task is not None
        if self.connection.has_left:
            task.cancel()
        # A task of its own that watches would cost each request more.
        self.connection.on_leave = task.cancel
        try:
            return await answer
        except asyncio.CancelledError:
            if self.connection.has_left and not task.uncancel():
                raise CallerError(LEFT) from None
            raise
        finally:
            self.connection.on_leave = None

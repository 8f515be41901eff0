"""What does a handler see of one HTTP request, and what does it give back?"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from overwinter.api.budget import Hold
from overwinter.api.messages import Headers, Receive
from overwinter.api.reading import Bounds, read_body
from overwinter.api.steps import Turns
from overwinter.core.errors import CallerError, OverwinterError
from overwinter.core.tensor import Buffer

JSON_TYPE = (b"content-type", b"application/json")

WATCH_AFTER_S = 0.02
"""Whether a caller has gone is looked at from then on: most answers are there sooner, and need no second task."""

T = TypeVar("T")

encode_json = msgspec.json.Encoder().encode


class _HungUpError(Exception):
    """The client closed its connection."""


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

    async def body(self, bounds: Bounds) -> Buffer:
        """The whole body, decompressed; TooLargeError when it is over its bound before or after that, OverloadedError
        when there is no memory for it.
        """
        return await read_body(self.receive, self.headers, self.hold, self.turns, bounds)

    async def unless_gone(self, answer: Awaitable[T]) -> T:
        """Await `answer` after the body was read; cancel it when the client hangs up, so that no queue holds it."""
        gone = False
        outcome: T | OverwinterError
        watchers: list[asyncio.Task[None]] = []
        try:
            async with asyncio.TaskGroup() as group:
                later = asyncio.get_running_loop().call_later(
                    WATCH_AFTER_S, lambda: watchers.append(group.create_task(self._hung_up()))
                )
                try:
                    outcome = await answer
                except OverwinterError as error:
                    outcome = error
                finally:
                    later.cancel()
                for watcher in watchers:
                    watcher.cancel()
        except* _HungUpError:
            gone = True
        if gone:
            raise CallerError("the client closed the connection before its answer was ready")
        if isinstance(outcome, OverwinterError):
            raise outcome
        return outcome

    async def _hung_up(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        raise _HungUpError

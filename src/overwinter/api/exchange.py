"""What does a handler see of one HTTP request, and what does it give back?"""

import asyncio
import zlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

import msgspec

from overwinter.core.errors import CallerError, OverwinterError, TooLargeError

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = dict[bytes, bytes]

JSON_TYPE = (b"content-type", b"application/json")
WINDOW_BITS = {b"gzip": 31, b"deflate": 15}
"""zlib's word for each content coding: a gzip frame, a zlib frame."""

T = TypeVar("T")

_encode_json = msgspec.json.Encoder().encode


class MethodError(CallerError):
    """The path exists, but not with this method."""

    status = 405


class MediaError(CallerError):
    """The body comes in a form that nobody here reads."""

    status = 415


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


def json_response(value: object, status: int = 200) -> Response:
    """A response whose body is `value` as JSON."""
    return Response(status, _encode_json(value), [JSON_TYPE])


def decode_json(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
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

    async def body(self, bytes_max: int) -> bytes:
        """The whole body, decompressed; TooLargeError when it is over `bytes_max` before or after that."""
        check_length(self.headers, bytes_max)
        message = await self.receive()
        body = body_of(message)
        if message.get("more_body"):
            body = await self._gather(body, bytes_max)
        if len(body) > bytes_max:
            raise too_large(bytes_max)
        if (coding := self.headers.get(b"content-encoding")) is not None:
            return await asyncio.to_thread(inflate, body, coding, bytes_max)
        return body

    async def unless_gone(self, answer: Awaitable[T]) -> T:
        """Await `answer` after the body was read; cancel it when the client hangs up, so that no queue holds it."""
        gone = False
        outcome: T | OverwinterError
        try:
            async with asyncio.TaskGroup() as group:
                watcher = group.create_task(self._hung_up())
                try:
                    outcome = await answer
                except OverwinterError as error:
                    outcome = error
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

    async def _gather(self, first: bytes, bytes_max: int) -> bytes:
        parts = [first]
        size = len(first)
        more = True
        while more:
            message = await self.receive()
            parts.append(body_of(message))
            size += len(parts[-1])
            if size > bytes_max:
                raise too_large(bytes_max)
            more = message.get("more_body", False)
        return b"".join(parts)


def body_of(message: Message) -> bytes:
    """The bytes that one ASGI message brings; CallerError when the client has gone."""
    if message["type"] == "http.disconnect":
        raise CallerError("the client closed the connection before its request was complete")
    body: bytes = message.get("body", b"")
    return body


def check_length(headers: Headers, bytes_max: int) -> None:
    """TooLargeError when the announced length is over the bound, before a byte is read."""
    length = headers.get(b"content-length")
    if length is not None and int(length) > bytes_max:
        raise too_large(bytes_max)


def too_large(bytes_max: int) -> TooLargeError:
    """The error that names the bound."""
    return TooLargeError(f"the request body is larger than this node accepts: {bytes_max} bytes")


def inflate(body: bytes, coding: bytes, bytes_max: int) -> bytes:
    """Undo gzip or deflate; never makes more than `bytes_max` bytes."""
    coding = coding.strip().lower()
    if coding == b"identity":
        return body
    bits = WINDOW_BITS.get(coding)
    if bits is None:
        raise MediaError(f"content-encoding {coding.decode('latin-1')!r} is not known; known: gzip, deflate, identity")
    stream = zlib.decompressobj(wbits=bits)
    try:
        plain = stream.decompress(body, bytes_max + 1)
    except zlib.error as error:
        raise CallerError(f"the body is not valid {coding.decode()}: {error}") from error
    if len(plain) > bytes_max:
        raise too_large(bytes_max)
    if not stream.eof or stream.unused_data:
        raise CallerError(f"the {coding.decode()} body is cut short or has bytes after its end")
    return plain

"""Which operations does the API have? The routes and the OpenAPI document are both made from this one table."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import msgspec
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from overwinter.api.exchange import Request
from overwinter.api.steps import Turns

Handler = Callable[[Request], Awaitable[ASGIApp]]
"""Gives what sends the response."""


class Body(msgspec.Struct, frozen=True):
    """One form in which a body may come."""

    media_type: str
    message: Any = None
    """The type of the message; None: bytes."""
    about: str = ""


def json_body(*messages: Any) -> tuple[Body, ...]:
    """A body of one of these messages in JSON."""
    return tuple(Body("application/json", message) for message in messages)


class Operation(msgspec.Struct, frozen=True):
    """One method on one path. Its handler's docstring describes it."""

    method: str
    path: str
    """As Starlette and OpenAPI write it: `/v2/models/{name}`."""
    handler: Handler
    gives: Mapping[int, tuple[Body, ...]]
    """The answers that are no errors, by status."""
    takes: tuple[Body, ...] = ()
    optional: bool = False
    """Whether the body may be left out."""
    headers: tuple[str, ...] = ()
    """Those of the request that it reads, beside those of HTTP."""
    fails: tuple[int, ...] = ()
    """The statuses of its errors, beside those that every operation of its kind may have."""


class _Endpoint:
    """A handler as an ASGI application."""

    def __init__(self, handler: Handler, turns: Turns) -> None:
        self._handler = handler
        self._turns = turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._handler(Request(scope, receive, self._turns))
        await response(scope, receive, send)


def routes_of(operations: Iterable[Operation]) -> list[Route]:
    """The operations as routes; Starlette tries them in this order."""
    turns = Turns()
    return [
        Route(each.path, _Endpoint(each.handler, turns), methods=[each.method], name=each.handler.__name__)
        for each in operations
    ]

"""The description of an operation of the API, from which its route and its entry in the OpenAPI document are made."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Literal

import msgspec
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from overwinter.api.exchange import Request
from overwinter.api.steps import StepRunner
from overwinter.core.errors import ForbiddenError
from overwinter.store.tokens import SCOPES
from overwinter.store.tokens import Scope as TokenScope

Handler = Callable[[Request], Awaitable[ASGIApp]]
"""Returns the ASGI application that sends the response."""
Needs = Literal["nothing", "token", TokenScope]
"""What a caller needs if the node requires tokens: nothing, any token, or a token with this scope."""
AUDITED = "overwinter.audited"
"""The key in the ASGI scope that says whether the audit log records the operation."""


class Body(msgspec.Struct, frozen=True):
    """One media type of a body."""

    media_type: str
    message: Any = None
    """The type of the message; None: bytes."""
    about: str = ""


def json_body(*messages: Any) -> tuple[Body, ...]:
    """A JSON body of one of these messages."""
    return tuple(Body("application/json", message) for message in messages)


class Operation(msgspec.Struct, frozen=True):
    """One method on one path. Its handler's docstring describes it."""

    method: str
    path: str
    """The path as Starlette and OpenAPI write it: `/v2/models/{name}`."""
    needs: Needs
    handler: Handler
    responses: Mapping[int, tuple[Body, ...]]
    """The responses that the handler returns, by status."""
    request_body: tuple[Body, ...] = ()
    is_body_optional: bool = False
    """Whether the request body may be left out."""
    headers: tuple[str, ...] = ()
    """The headers that it reads, besides those of HTTP and of the tenant."""
    errors: tuple[int, ...] = ()
    """The statuses of its errors, in addition to those that follow from its path, its body and what it needs."""
    has_lasting_effect: bool = True
    """The audit log does not record operations without a lasting effect."""

    @property
    def scope(self) -> TokenScope | None:
        """The scope that a token needs; None: the operation requires no scope."""
        return next((scope for scope in SCOPES if scope == self.needs), None)

    @property
    def is_audited(self) -> bool:
        """Whether the audit log records it."""
        return self.scope in ("deploy", "admin") and self.has_lasting_effect


class _Endpoint:
    """An operation as an ASGI application."""

    def __init__(self, operation: Operation, steps: StepRunner) -> None:
        self._handler = operation.handler
        self._scope = operation.scope
        self._is_audited = operation.is_audited
        self._steps = steps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[AUDITED] = self._is_audited
        request = Request(scope, receive, self._steps)
        if self._scope is not None and self._scope not in (has := request.caller.scopes):
            raise ForbiddenError(
                f"this token has the scopes {', '.join(sorted(has))}, and the operation needs {self._scope}"
            )
        response = await self._handler(request)
        await response(scope, receive, send)


def routes_of(operations: Iterable[Operation]) -> list[Route]:
    """The operations as routes; Starlette tries them in this order."""
    steps = StepRunner()
    return [
        Route(each.path, _Endpoint(each, steps), methods=[each.method], name=each.handler.__name__)
        for each in operations
    ]

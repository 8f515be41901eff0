"""The middleware between the border and the routes: it authenticates callers and writes the audit log."""

import asyncio
from collections.abc import Container

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from overwinter.api.access import CALLER, Access
from overwinter.api.exchange import FIELDS, HOLD
from overwinter.api.operations import AUDITED
from overwinter.core.errors import OverloadedError


class AccessMiddleware:
    """Authenticates a request; the routes find its caller in the scope."""

    def __init__(self, app: ASGIApp, access: Access, open_paths: Container[str]) -> None:
        """`open_paths` need no token."""
        self._app = app
        self._access = access
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on; UnauthorizedError, ForbiddenError, RateError, StoreError."""
        path = scope["path"]
        caller = self._access.anybody if path in self._open_paths else self._access.caller(scope[FIELDS])
        scope[CALLER] = caller
        if caller.token is None:
            await self._app(scope, receive, send)
            return
        answered = False

        def note(status: int) -> None:
            nonlocal answered
            if not answered and scope.get(AUDITED):
                self._access.record(caller, scope["method"], path, scope[HOLD].client, status)
            answered = True

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                note(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, noted)
        # What the outer layers will answer.
        except asyncio.CancelledError:
            note(OverloadedError.status)
            raise
        except Exception:
            note(500)
            raise

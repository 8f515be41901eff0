"""What stands between the border and the routes? Who asks is known first, and what came of it is kept."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from overwinter.api.access import CALLER, Access
from overwinter.api.exchange import FIELDS, HOLD
from overwinter.core.errors import OverloadedError


class AccessMiddleware:
    """Lets a request in, or not; the routes find its caller in the scope."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on; UnauthorizedError, ForbiddenError, RateError, StoreError."""
        method, path = scope["method"], scope["path"]
        caller = scope[CALLER] = self._access.caller(method, path, scope[FIELDS])
        if caller.token is None:
            await self._app(scope, receive, send)
            return
        recorded = False

        def record(status: int) -> None:
            nonlocal recorded
            if not recorded:
                self._access.record(caller, method, path, scope[HOLD].client, status)
            recorded = True

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, noted)
        # What the outer layers will answer.
        except asyncio.CancelledError:
            record(OverloadedError.status)
            raise
        except Exception:
            record(500)
            raise

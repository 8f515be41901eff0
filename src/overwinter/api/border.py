"""What holds for every request, whatever answers it?

It holds memory of the budget until its answer is sent, it is answered also when the node stops, and its id comes back.
"""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from overwinter.api.budget import Budget, Hold, client_of
from overwinter.api.errors import error_response
from overwinter.api.exchange import FIELDS, HOLD
from overwinter.core.errors import OverloadedError

REQUEST_ID = b"x-request-id"
REQUEST_ID_MAX = 256


class Border:
    """The outermost layer of the application: nothing but an answer leaves it."""

    def __init__(self, app: ASGIApp, budget: Budget) -> None:
        self._app = app
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        # It may have left before anybody could see its address.
        hold = Hold(self._budget, client_of(scope["client"][0] if scope["client"] else ""))
        scope[HOLD] = hold
        fields = scope[FIELDS] = dict(scope["headers"])
        started = False

        async def marked(message: Message) -> None:
            nonlocal started
            if not started:
                started = True
                if (request_id := fields.get(REQUEST_ID)) is not None:
                    message["headers"].append((REQUEST_ID, request_id[:REQUEST_ID_MAX]))
            await send(message)

        try:
            await self._app(scope, receive, marked)
        except Exception as error:  # noqa: BLE001 - Starlette has answered and raises it again for its server to log
            # Its frames hold what the request sent, and are held by it: that would stay until the next collection.
            error.__traceback__ = None
        except asyncio.CancelledError:
            # Only the end of a drain cancels; the task is over with this answer, so nothing is swallowed.
            if not started:
                late = OverloadedError("the node is stopping before this request was done: try again")
                await error_response(late)(scope, receive, marked)
        finally:
            hold.close()

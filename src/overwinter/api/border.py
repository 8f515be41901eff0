"""The outermost layer of the application, which every request passes.

A request reserves memory of the budget until its answer is sent. It is answered also when the node stops, and its
request id is returned. A node that stops accepts no new requests.
"""

import asyncio
from collections.abc import Container

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from overwinter.api.budget import Budget, Hold, client_of
from overwinter.api.draining import Drain
from overwinter.api.errors import error_response
from overwinter.api.exchange import FIELDS, HOLD, REQUEST_ID, REQUEST_ID_MAX
from overwinter.core.errors import OverloadedError

CLOSE = (b"connection", b"close")
STOPPING = "this node is stopping and accepts no more requests: ask another one, or try again when it is back"


class Border:
    """The outermost layer of the application: every exception becomes an answer."""

    def __init__(self, app: ASGIApp, budget: Budget, drain: Drain, open_paths: Container[str]) -> None:
        """`open_paths` are answered also while the node stops: its health."""
        self._app = app
        self._budget = budget
        self._drain = drain
        self._open_paths = open_paths

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
                if self._drain.begun:
                    # The connection would end before another request came over it.
                    message["headers"].append(CLOSE)
                if (request_id := fields.get(REQUEST_ID)) is not None:
                    message["headers"].append((REQUEST_ID, request_id[:REQUEST_ID_MAX]))
            await send(message)

        drain = self._drain
        refused = drain.begun and scope["path"] not in self._open_paths
        drain.enter()
        try:
            await (error_response(OverloadedError(STOPPING)) if refused else self._app)(scope, receive, marked)
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
            drain.leave()

"""The one layer around the routes, which every request passes.

It authenticates the caller before anything else of the request is handled, bounds the requests in progress, converts
errors to answers, returns the request id, and writes the audit log. When the answer is sent, it releases the memory
that the request has reserved. A node that stops accepts new requests only for operations that never need a token. This
is one layer because each layer adds time to every request.
"""

import asyncio
from collections.abc import Container

from starlette.routing import Router
from starlette.types import Message, Receive, Scope, Send

from overwinter.api.access import CALLER, Access
from overwinter.api.budget import Budget, Reservation
from overwinter.api.connections import DESCRIPTORS_DIVISOR, client_of
from overwinter.api.draining import Drain
from overwinter.api.errors import answer_error, error_response, refusal_log
from overwinter.api.exchange import CLIENT, FIELDS, REQUEST_ID, REQUEST_ID_MAX, RESERVATION
from overwinter.api.operations import AUDITED
from overwinter.api.slots import FairSlots
from overwinter.core.errors import OverloadedError

CLOSE = (b"connection", b"close")
STOPPING = "this node is stopping and accepts no more requests: ask another one, or try again when it is back"
TOO_LATE = "the node stopped before this request was done: try again"


class RequestMiddleware:
    """The ASGI application: a router, and the common work for all of its routes."""

    def __init__(
        self,
        router: Router,
        access: Access,
        budget: Budget,
        slots: FairSlots,
        drain: Drain,
        open_paths: Container[str],
    ) -> None:
        """`slots`: one for each request in progress. `open_paths` (health, pages about the API) need no token and no
        slot, and are answered even while the node stops.
        """
        self._router = router
        self._access = access
        self._budget = budget
        self._slots = slots
        self._drain = drain
        self._open_paths = open_paths
        self._refusals = refusal_log()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        # The client may have disconnected before its address was read.
        client = scope[CLIENT] = client_of(scope["client"][0] if scope["client"] else "")
        reservation = scope[RESERVATION] = Reservation(self._budget, client)
        scope[FIELDS] = dict(scope["headers"])
        # With `app` in the scope, Starlette's routes raise an HTTPException for 404 and 405, which is converted here.
        scope["app"] = self._router
        started = has_slot = False

        async def send_answer(message: Message) -> None:
            nonlocal started
            if not started:
                started = True
                self._add_headers(scope, message)
                self._record(scope, message["status"])
            await send(message)

        self._drain.enter()
        try:
            try:
                has_slot = self._admit(scope, reservation)
                await self._router.app(scope, receive, send_answer)
            except Exception as error:  # noqa: BLE001 - whatever failed, the caller gets an answer
                answer = answer_error(scope, error, self._refusals)
                if not started:
                    await answer(scope, receive, send_answer)
        except asyncio.CancelledError:
            # Only the end of a drain cancels a request here: `unless_disconnected` has handled a disconnect. The task
            # ends with this answer, so the cancellation need not be raised again.
            if not started:
                await error_response(OverloadedError(TOO_LATE))(scope, receive, send_answer)
        finally:
            if has_slot:
                self._slots.release(reservation.caller)
            reservation.close()
            self._drain.leave()

    def _admit(self, scope: Scope, reservation: Reservation) -> bool:
        """Find the caller; return whether the request has taken a slot. Raises OverloadedError, UnauthorizedError,
        ForbiddenError, CallerError, RateError or StoreError if it is refused.
        """
        if scope["path"] in self._open_paths:
            scope[CALLER] = self._access.anonymous
            return False
        if self._drain.begun:
            raise OverloadedError(STOPPING)
        # Before routing, so that every path except the open ones gets the same refusal, whether or not a route exists.
        caller = scope[CALLER] = self._access.caller(scope[FIELDS])
        if caller.token is not None:
            reservation.caller = caller.token.tenant
        slots = self._slots
        if not slots.take(reservation.caller):
            raise OverloadedError(
                f"too many requests are in progress, {slots.by_caller[reservation.caller]} of them yours: try again "
                "when one has ended, or start the node with a higher --connections-max and at least "
                f"{DESCRIPTORS_DIVISOR} descriptors (ulimit -Hn) for each connection"
            )
        return True

    def _add_headers(self, scope: Scope, message: Message) -> None:
        """Add the headers that do not depend on the route."""
        if self._drain.begun:
            # The node will stop, so the client must use another connection for its next request.
            message["headers"].append(CLOSE)
        if (request_id := scope[FIELDS].get(REQUEST_ID)) is not None:
            message["headers"].append((REQUEST_ID, request_id[:REQUEST_ID_MAX]))

    def _record(self, scope: Scope, status: int) -> None:
        """Write the request into the audit log, if its operation is recorded."""
        if scope.get(AUDITED):
            self._access.record(scope[CALLER], scope["method"], scope["path"], scope[CLIENT], status)

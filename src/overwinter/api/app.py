"""The front door itself: one ASGI callable, and the server that feeds it."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import version

import uvicorn

from overwinter.api.access import Access, Caller
from overwinter.api.budget import Budget, Hold, client_of
from overwinter.api.connections import PIECE_BYTES, Connections
from overwinter.api.deployments import DeploymentApi
from overwinter.api.errors import error_response
from overwinter.api.exchange import CONNECTION, Request, Response
from overwinter.api.inference import InferenceApi
from overwinter.api.insight import InsightApi
from overwinter.api.messages import Receive, Scope, Send
from overwinter.api.profiles import ProfileApi
from overwinter.api.protocol import BoundedProtocol
from overwinter.api.routing import Routes
from overwinter.api.steps import Turns
from overwinter.core.config import RequestLimits
from overwinter.core.errors import CallerError, OverloadedError
from overwinter.node.threads import Threads

App = Callable[[Scope, Receive, Send], Awaitable[None]]

DISK_THREADS = 4
DRAIN_S = 10
"""How long a stop waits for the answers under way."""
REQUEST_ID_MAX = 256
MORE = {"more_body": True}
SWEEP_S = 0.25
"""Time between two looks at what connections wait for."""


def create_app(access: Access, limits: RequestLimits, budget: Budget) -> App:
    """The ASGI callable over one node; what requests take is bounded by `limits`, their memory by `budget`."""
    disk = Threads(DISK_THREADS, "api-disk")
    turns = Turns()
    inference = InferenceApi(limits, version("overwinter"))
    deployments = DeploymentApi(disk, limits)
    find = Routes([*inference.routes(), *deployments.routes(), *ProfileApi().routes(), *InsightApi().routes()]).find

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        method, path, headers = scope["method"], scope["path"], dict(scope["headers"])
        caller: Caller | None = None
        # It may have left before anybody could see its address.
        hold = Hold(budget, client_of(scope["client"][0] if scope["client"] else ""))
        try:
            try:
                caller = access.caller(method, path, headers)
                handler, values = find(method, path)
                response = await handler(Request(headers, values, receive, hold, turns, scope[CONNECTION], caller))
            except Exception as error:  # noqa: BLE001 - the outer border: whatever failed, the caller gets an answer
                response = error_response(error)
                if caller is not None:
                    response.body = caller.told(response.body)
                # Its frames hold what the request sent, and are held by it: that would stay until the next collection.
                error.__traceback__ = None
            except asyncio.CancelledError:
                # Only the end of a drain cancels; the task is over with this answer, so nothing is swallowed.
                response = error_response(
                    OverloadedError("the node is stopping before this request was done: try again")
                )
            if caller is not None:
                access.record(caller, method, path, hold.client, response.status)
            if (request_id := headers.get(b"x-request-id")) is not None:
                response.headers.append((b"x-request-id", request_id[:REQUEST_ID_MAX]))
            await _answer(response, send)
        finally:
            hold.close()

    return app


async def _answer(response: Response, send: Send) -> None:
    """Send the response."""
    if response.stream is None:
        nbytes = len(response.body) + sum(map(len, response.tail))
        response.headers.append((b"content-length", b"%d" % nbytes))
        if nbytes <= PIECE_BYTES:
            response.body = b"".join((response.body, *response.tail))
            response.tail = ()
    await send({"type": "http.response.start", "status": response.status, "headers": response.headers})
    if response.stream is not None:
        # The client has gone, or a drain is at its end: there is nobody to tell.
        with suppress(CallerError, asyncio.CancelledError):
            await response.stream(lambda chunk: send({"type": "http.response.body", "body": chunk, **MORE}))
    if len(response.body) > PIECE_BYTES or response.tail:
        await _send_pieces(response, send)
    else:
        await send({"type": "http.response.body", "body": response.body})


async def _send_pieces(response: Response, send: Send) -> None:
    """Send a long body. `send` waits for the reader: but for the last piece, what is not read yet is still counted as
    held; whoever does not read on is cut off by its connection.
    """
    for part in (response.body, *response.tail):
        view = memoryview(part).cast("B")
        for at in range(0, len(view), PIECE_BYTES):
            await send({"type": "http.response.body", "body": view[at : at + PIECE_BYTES], **MORE})
    await send({"type": "http.response.body", "body": b""})


async def serve(app: App, listener: socket.socket, limits: RequestLimits, drain_s: int = DRAIN_S) -> None:
    """Answer requests on a bound socket until cancelled; then let the answers under way finish, within `drain_s`."""
    connections = Connections(limits)
    config = uvicorn.Config(
        app,
        http=partial(BoundedProtocol, connections),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        # Whoever likes can make it warn; what fails inside is an error.
        log_level="error",
        access_log=False,
        # A caller does not say who it is: shares are counted for the address that it really has.
        proxy_headers=False,
        date_header=False,
        server_header=False,
        timeout_keep_alive=limits.idle_timeout_s,  # type: ignore[arg-type]
        timeout_graceful_shutdown=drain_s,
    )
    server = _Server(config)
    async with asyncio.TaskGroup() as tasks:
        sweeping = tasks.create_task(_sweep(connections))
        try:
            await server.serve([listener])
        finally:
            if server.started:
                await server.shutdown([listener])
            sweeping.cancel()


async def _sweep(connections: Connections) -> None:
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(SWEEP_S)
        connections.sweep(loop.time())


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the daemon has its own, and stops this task."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

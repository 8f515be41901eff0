"""The front door itself: one ASGI callable, and the server that feeds it."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.metadata import version

import uvicorn

from overwinter.api.deployments import DeploymentApi
from overwinter.api.errors import error_response
from overwinter.api.exchange import Receive, Request, Scope, Send
from overwinter.api.front import Front
from overwinter.api.inference import InferenceApi
from overwinter.api.insight import InsightApi
from overwinter.api.profiles import ProfileApi
from overwinter.api.routing import Routes
from overwinter.core.errors import CallerError, OverloadedError

App = Callable[[Scope, Receive, Send], Awaitable[None]]

DISK_THREADS = 4
UPLOAD_IDLE_S = 60.0
KEEP_ALIVE_S = 75
"""Longer than the idle time of common client pools, so that they, not we, close first."""
DRAIN_S = 10
"""How long a stop waits for the answers under way."""
REQUEST_ID_MAX = 256
MORE = {"more_body": True}


def create_app(front: Front, request_bytes_max: int, block_bytes_max: int, upload_idle_s: float = UPLOAD_IDLE_S) -> App:
    """The ASGI callable over one node; bodies are bounded in bytes, an upload that stands still in seconds."""
    disk = ThreadPoolExecutor(DISK_THREADS, thread_name_prefix="api-disk")
    inference = InferenceApi(front, request_bytes_max, version("overwinter"))
    deployments = DeploymentApi(front, disk, request_bytes_max, block_bytes_max, upload_idle_s)
    profiles = ProfileApi(front, request_bytes_max)
    find = Routes([*inference.routes(), *deployments.routes(), *profiles.routes(), *InsightApi(front).routes()]).find

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        try:
            handler, values = find(scope["method"], scope["path"])
            response = await handler(Request(headers, values, receive))
        except Exception as error:  # noqa: BLE001 - the outer border: whatever failed, the caller gets an answer
            response = error_response(error)
        except asyncio.CancelledError:
            # Only the end of a drain cancels; the task is over with this answer, so nothing is swallowed.
            response = error_response(OverloadedError("the node is stopping before this request was done: try again"))
        if response.stream is None:
            response.headers.append((b"content-length", b"%d" % len(response.body)))
        request_id = headers.get(b"x-request-id")
        if request_id is not None:
            response.headers.append((b"x-request-id", request_id[:REQUEST_ID_MAX]))
        await send({"type": "http.response.start", "status": response.status, "headers": response.headers})
        if response.stream is not None:
            # The client has gone, or a drain is at its end: there is nobody to tell.
            with suppress(CallerError, asyncio.CancelledError):
                await response.stream(lambda chunk: send({"type": "http.response.body", "body": chunk, **MORE}))
        await send({"type": "http.response.body", "body": response.body})

    return app


async def serve(app: App, listener: socket.socket, drain_s: int = DRAIN_S) -> None:
    """Answer requests on a bound socket until cancelled; then let the answers under way finish, within `drain_s`."""
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        date_header=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=drain_s,
    )
    server = _Server(config)
    try:
        await server.serve([listener])
    finally:
        if server.started:
            await server.shutdown([listener])


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the daemon has its own, and stops this task."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

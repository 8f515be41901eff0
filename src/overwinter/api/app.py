"""The HTTP API of a node: one ASGI application, and the server that runs it."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version

import uvicorn
from starlette.routing import Router
from starlette.types import ASGIApp

from overwinter.api.access import Access
from overwinter.api.budget import Budget
from overwinter.api.connections import Connections, connections_most
from overwinter.api.deployments import DeploymentApi
from overwinter.api.draining import Drain
from overwinter.api.inference import InferenceApi
from overwinter.api.middleware import RequestMiddleware
from overwinter.api.operations import routes_of
from overwinter.api.pages import Pages
from overwinter.api.profiles import ProfileApi
from overwinter.api.protocol import BoundedProtocol
from overwinter.api.slots import FairSlots
from overwinter.api.telemetry import TelemetryApi
from overwinter.core.config import RequestLimits
from overwinter.node.threads import Threads

DISK_THREADS = 4
CLOSE_WAIT_S = 2
"""How long a stop waits for clients to read their answers after everything is answered."""
ACCEPTED_MAX = 16
"""The most connections that are accepted in one iteration of the event loop."""
SWEEP_S = 0.25
"""The time between two checks of the events that connections wait for."""


def create_app(access: Access, limits: RequestLimits, budget: Budget, drain: Drain) -> ASGIApp:
    """Create the ASGI application over the node of `access`.

    `limits` bounds each request, `budget` the memory of all. Once `drain` has begun, only requests for operations that
    never need a token are accepted.
    """
    disk = Threads(DISK_THREADS, "api-disk")
    own_version = version("overwinter")
    operations = [
        # Ordered by how often they are called, because routes are tried in order.
        *InferenceApi(limits, own_version, drain).operations(),
        *DeploymentApi(disk, limits).operations(),
        *ProfileApi().operations(),
        *TelemetryApi().operations(),
    ]
    operations += Pages(operations, own_version).operations()
    open_paths = frozenset(each.path for each in operations if each.needs == "nothing")
    # Each path has exactly one form: Starlette must not redirect from or to a trailing slash.
    router = Router(routes_of(operations), redirect_slashes=False)
    # As many slots as connections, because a request in progress keeps its connection.
    slots = FairSlots(connections_most(limits))
    return RequestMiddleware(router, access, budget, slots, drain, open_paths)


async def serve(app: ASGIApp, listener: socket.socket, limits: RequestLimits, drain: Drain) -> None:
    """Answer requests on a bound socket until cancelled; then complete open requests, as `drain` allows."""
    connections = Connections(limits)
    config = uvicorn.Config(
        app,
        http=partial(BoundedProtocol, connections),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        # Any client can cause warnings; internal failures are errors.
        log_level="error",
        access_log=False,
        # Client addresses count for limits, so a client must not be able to forge its own.
        proxy_headers=False,
        date_header=False,
        server_header=False,
    )
    server = _Server(config)
    server.servers = []
    # The loop accepts one connection in each iteration for each listening socket, and all these sockets share one
    # queue. With one socket, new connections would wait for many iterations, which are long while many requests run.
    listeners = [listener, *(listener.dup() for _ in range(ACCEPTED_MAX - 1))]
    async with asyncio.TaskGroup() as tasks:
        sweeping = tasks.create_task(_sweep(connections))
        try:
            await server.serve(listeners)
        finally:
            # Even a start that was cancelled may have opened some servers.
            if server.servers:
                # Requests that are unanswered after the drain are refused because the node stops.
                config.timeout_graceful_shutdown = CLOSE_WAIT_S if await drain.finish() else 0
                await server.shutdown(listeners)
            for each in listeners:
                each.close()
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

"""Closes the connection of a client that was not asked for the body of its request.

A client that expects `100 Continue` may leave out the body if the answer comes first. Its next request would then be
read as that body.
"""

from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


async def close_unless_asked(
    cycle: RequestResponseCycle,
    app: ASGI3Application,
    scope: Scope,
    receive: ASGIReceiveCallable,
    send: ASGISendCallable,
) -> None:
    """Run an application. If its answer begins before the client was asked for its body, the connection closes."""

    async def send_answer(message: ASGISendEvent) -> None:
        if cycle.waiting_for_100_continue and cycle.more_body:
            cycle.keep_alive = False
        await send(message)

    await app(scope, receive, send_answer)

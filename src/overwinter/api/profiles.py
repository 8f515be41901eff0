"""Measures a function's profile over HTTP.

A measurement takes long, so its answer is a stream of JSON lines: the progress, and at the end the profile or an error.
Empty lines keep the connection alive. Disconnecting ends the measurement.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from overwinter.api.errors import log_unexpected, text_of_unexpected
from overwinter.api.exchange import Request, Response, StreamingResponse, Write, decode_json, json_response
from overwinter.api.inference import SHORT, function_of
from overwinter.api.operations import Body, Operation, json_body
from overwinter.api.tenants import check_owner
from overwinter.core.errors import OverwinterError
from overwinter.core.profile import Profile
from overwinter.core.profiling import ProfileLine, ProfileOptions, Progress, ReportProgress

SILENT_S = 10.0
"""The most seconds without a line. A client may take a longer silence for a dead node."""
LINES = "application/x-ndjson"
STOPPED = ProfileLine(
    error="the node is stopping before all was measured: try again, what it measured is kept", status=503
)

Measuring = Callable[[ReportProgress], Awaitable[Profile]]

_options_decoder = msgspec.json.Decoder(ProfileOptions)
_encode = msgspec.json.Encoder().encode


class ProfileApi:
    """The routes for profiles of functions."""

    def operations(self) -> list[Operation]:
        """Every operation on profiles."""
        paths = [f"/overwinter/v1/functions/{{name}}{version}/profile" for version in ("", "/versions/{version}")]
        lines = Body(
            LINES, about="One ProfileLine as JSON per line. An empty line means that the measurement continues."
        )
        return [
            *(Operation("GET", path, "token", self.known, {200: json_body(Profile)}) for path in paths),
            *(
                Operation(
                    "POST", path, "deploy", self.measure, {200: (lines,)}, request_body=json_body(ProfileOptions),
                    is_body_optional=True, errors=(409,),
                )
                for path in paths
            ),
        ]  # fmt: skip

    async def known(self, request: Request) -> Response:
        """The profile of a function on this machine."""
        return request.counted(json_response(await request.caller.node.known_profile(*function_of(request))))

    async def measure(self, request: Request) -> StreamingResponse:
        """Measure the configurations in the body, and skip known ones unless it has `again`; a list that the body
        leaves out means 1, 2, 4 and so on, up to the function's setting, or to what machine and program allow if that
        is less.
        """
        body = bytes(await request.body(SHORT))
        options = decode_json(_options_decoder, body) if body.strip() else ProfileOptions()
        name, version = function_of(request)
        check_owner(request, name)
        version = request.caller.node.view(name, version).version

        async def produce(write: Write) -> None:
            measuring = partial(request.caller.node.profile, name, version, options)
            await _write_lines(measuring, request, write)

        return StreamingResponse(LINES, produce)


async def _write_lines(measuring: Measuring, request: Request, write: Write) -> None:
    lines: asyncio.Queue[bytes | None] = asyncio.Queue()

    def report(progress: Progress) -> None:
        lines.put_nowait(_line(ProfileLine(progress=progress)))

    async def work() -> None:
        try:
            last = _line(ProfileLine(profile=await measuring(report)))
            # The client may read it slowly.
            request.reservation.grow(len(last))
            lines.put_nowait(last)
        except OverwinterError as error:
            lines.put_nowait(_line(ProfileLine(error=str(error), status=error.status)))
        except Exception as error:  # noqa: BLE001 - raised, it would cancel the writer below, as the end of a drain does
            log_unexpected(request.scope, error)
            lines.put_nowait(_line(ProfileLine(error=text_of_unexpected(error), status=500)))
        finally:
            # Also after a cancellation: without the end, the writer below would send empty lines forever.
            lines.put_nowait(None)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(work())
        try:
            while (chunk := await _next(lines)) is not None:
                await write(chunk)
        except asyncio.CancelledError:
            # A drain is at its end, or the client has gone and reads no more.
            await write(_line(STOPPED))
            raise


async def _next(lines: asyncio.Queue[bytes | None]) -> bytes | None:
    """Return the next line; an empty one after a pause; None at the end."""
    try:
        async with asyncio.timeout(SILENT_S):
            return await lines.get()
    except TimeoutError:
        return b"\n"


def _line(line: ProfileLine) -> bytes:
    return _encode(line) + b"\n"

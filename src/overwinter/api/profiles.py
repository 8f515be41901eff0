"""Measures a function's profile over HTTP.

A measurement takes long, so its answer is a stream of JSON lines: the progress, and at the end the profile or an error.
Empty lines keep the connection alive. Disconnecting ends the measurement.
"""

import asyncio

import msgspec

from overwinter.api.exchange import Request, Response, StreamingResponse, Write, decode_json, json_response
from overwinter.api.inference import SHORT, function_of
from overwinter.api.node_interface import NodeInterface
from overwinter.api.operations import Body, Operation, json_body
from overwinter.api.tenants import check_owner
from overwinter.core.errors import OverwinterError
from overwinter.core.ids import FunctionName
from overwinter.core.profile import Profile
from overwinter.core.profiling import ProfileLine, ProfileOptions, Progress

SILENT_S = 10.0
"""The most seconds without a line. A client may take a longer silence for a dead node."""
LINES = "application/x-ndjson"
STOPPED = ProfileLine(
    error="the node is stopping before all was measured: try again, what it measured is kept", status=503
)

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
        return json_response(request.caller.node.known_profile(*function_of(request)))

    async def measure(self, request: Request) -> StreamingResponse:
        """Measure the configurations in the body that are not known; without a body, all that the settings allow."""
        body = bytes(await request.body(SHORT))
        options = decode_json(_options_decoder, body) if body.strip() else ProfileOptions()
        name, version = function_of(request)
        check_owner(request, name)
        version = request.caller.node.view(name, version).version

        async def produce(write: Write) -> None:
            await _write_lines(request.caller.node, name, version, options, write)

        return StreamingResponse(LINES, produce)


async def _write_lines(
    node: NodeInterface, name: FunctionName, version: int, options: ProfileOptions, write: Write
) -> None:
    lines: asyncio.Queue[ProfileLine | None] = asyncio.Queue()

    def report(progress: Progress) -> None:
        lines.put_nowait(ProfileLine(progress=progress))

    async def work() -> None:
        try:
            lines.put_nowait(ProfileLine(profile=await node.profile(name, version, options, report)))
        except OverwinterError as error:
            lines.put_nowait(ProfileLine(error=str(error), status=error.status))
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


async def _next(lines: asyncio.Queue[ProfileLine | None]) -> bytes | None:
    """Return the next line, encoded; an empty one after a pause; None at the end."""
    try:
        async with asyncio.timeout(SILENT_S):
            line = await lines.get()
    except TimeoutError:
        return b"\n"
    return None if line is None else _line(line)


def _line(line: ProfileLine) -> bytes:
    return _encode(line) + b"\n"

"""How do functions come and go over HTTP?

As with a container registry: ask which blocks are missing, send those, then send the manifest that names them all. A
pipeline is sent as it is. Both are found and removed by their names.
"""

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from typing import Annotated

import msgspec

from overwinter.api.exchange import (
    MediaError,
    Message,
    Request,
    Response,
    body_of,
    check_length,
    decode_json,
    json_response,
    too_large,
)
from overwinter.api.front import Front
from overwinter.api.inference import function_of
from overwinter.api.routing import Route
from overwinter.core.errors import CallerError
from overwinter.core.ids import Address
from overwinter.core.pipeline import decode_pipeline
from overwinter.store.manifest import ADDRESS_PATTERN, Manifest, decode_manifest

MISSING_MAX = 1_000_000
"""Addresses in one question."""


class MissingRequest(msgspec.Struct):
    """A question: which of these blocks are not stored?"""

    addresses: Annotated[
        list[Annotated[Address, msgspec.Meta(pattern=ADDRESS_PATTERN)]], msgspec.Meta(max_length=MISSING_MAX)
    ]


_missing_decoder = msgspec.json.Decoder(MissingRequest)
_is_address = re.compile(ADDRESS_PATTERN).match


class DeploymentApi:
    """Overwinter's own routes over one node."""

    def __init__(
        self, front: Front, disk: Executor, request_bytes_max: int, block_bytes_max: int, upload_idle_s: float
    ) -> None:
        self._front = front
        self._disk = disk
        self._request_bytes_max = request_bytes_max
        self._block_bytes_max = block_bytes_max
        self._upload_idle_s = upload_idle_s

    def routes(self) -> list[Route]:
        """Every route for deployers."""
        return [
            ("POST", "/overwinter/v1/blocks/missing", self.missing),
            ("PUT", "/overwinter/v1/blocks/*", self.put_block),
            ("POST", "/overwinter/v1/functions", self.register),
            ("GET", "/overwinter/v1/functions", self.functions),
            ("POST", "/overwinter/v1/pipelines", self.register_pipeline),
            ("GET", "/overwinter/v1/pipelines", self.pipelines),
            ("GET", "/overwinter/v1/functions/*", self.function),
            ("GET", "/overwinter/v1/functions/*/versions/*", self.function),
            ("DELETE", "/overwinter/v1/functions/*", self.remove),
            ("DELETE", "/overwinter/v1/functions/*/versions/*", self.remove),
        ]

    async def missing(self, request: Request) -> Response:
        """Which of the given blocks the repository lacks."""
        asked = decode_json(_missing_decoder, await request.body(self._request_bytes_max))
        loop = asyncio.get_running_loop()
        lacking = await loop.run_in_executor(self._disk, self._front.repository.missing, asked.addresses)
        return json_response({"missing": lacking})

    async def put_block(self, request: Request) -> Response:
        """Store one block: 201 when it is new, 200 when it was there."""
        address = request.values[0]
        if not _is_address(address):
            raise CallerError(f"{address!r} is not a block's address: 64 hexadecimal digits in lower case")
        if request.headers.get(b"content-encoding", b"identity") != b"identity":
            raise MediaError("blocks are sent as they are, without a content-encoding")
        check_length(request.headers, self._block_bytes_max)
        loop = asyncio.get_running_loop()
        upload = Upload(request, loop, self._block_bytes_max, self._upload_idle_s)
        try:
            new = await loop.run_in_executor(self._disk, self._front.repository.put, Address(address), upload)
        finally:
            upload.stop()
        return json_response({"address": address, "new": new}, 201 if new else 200)

    async def register(self, request: Request) -> Response:
        """Make a new version of a function whose blocks are all stored."""
        manifest = read_manifest(request.headers.get(b"content-type"), await request.body(self._request_bytes_max))
        deployed = await self._front.deploy(manifest)
        told = {"name": manifest.name, "version": deployed.version, "warning": deployed.warning}
        return json_response(told, 201)

    async def register_pipeline(self, request: Request) -> Response:
        """Make functions that are deployed callable as one."""
        pipeline = decode_pipeline(await request.body(self._request_bytes_max))
        deployed = await self._front.deploy_pipeline(pipeline)
        return json_response({"name": pipeline.name, "version": deployed.version}, 201)

    async def pipelines(self, request: Request) -> Response:
        """Every pipeline, with all that the node says of it."""
        return json_response([view.info() for view in self._front.pipelines()])

    async def functions(self, request: Request) -> Response:
        """Every version of every function, with all that the node says of it."""
        return json_response([view.info() for view in self._front.functions()])

    async def function(self, request: Request) -> Response:
        """One version of a function, the latest where the path does not say; or a pipeline."""
        return json_response(self._front.view(*function_of(request)).info())

    async def remove(self, request: Request) -> Response:
        """Take away one version of a function, or all; or a pipeline."""
        name, version = function_of(request)
        await self._front.remove(name, version)
        return json_response({"name": name, "version": version})


class Upload:
    """The chunks of a request's body, for a thread to iterate over; the loop reads no further ahead than one chunk."""

    def __init__(self, request: Request, loop: asyncio.AbstractEventLoop, bytes_max: int, idle_s: float) -> None:
        self._request = request
        self._loop = loop
        self._bytes_max = bytes_max
        self._idle_s = idle_s
        self._next: Future[Message] | None = None
        self._stopped = False

    def __iter__(self) -> Iterator[bytes]:
        size = 0
        more = True
        while more and not self._stopped:
            self._next = asyncio.run_coroutine_threadsafe(self._receive(), self._loop)
            try:
                message = self._next.result(self._idle_s)
            except TimeoutError:
                self._next.cancel()
                raise CallerError(f"the upload stood still for {self._idle_s} s") from None
            chunk = body_of(message)
            size += len(chunk)
            if size > self._bytes_max:
                raise too_large(self._bytes_max)
            more = message.get("more_body", False)
            yield chunk

    def stop(self) -> None:
        """Nobody waits for the upload any more: let the thread go."""
        self._stopped = True
        if self._next is not None:
            self._next.cancel()

    async def _receive(self) -> Message:
        return await self._request.receive()


def read_manifest(content_type: bytes | None, body: bytes) -> Manifest:
    """A manifest sent as JSON (also without a Content-Type) or as msgpack; CallerError, MediaError."""
    kind = (content_type or b"application/json").split(b";")[0].strip().lower()
    if kind == b"application/json":
        return decode_manifest(body)
    if kind not in (b"application/msgpack", b"application/x-msgpack"):
        raise MediaError(f"a manifest comes as application/json or application/msgpack, not {kind.decode('latin-1')!r}")
    try:
        # One reader checks manifests, and it reads JSON.
        return decode_manifest(msgspec.json.encode(msgspec.msgpack.decode(body)))
    except (msgspec.MsgspecError, UnicodeError, RecursionError, TypeError) as error:
        raise CallerError(f"the manifest is not valid msgpack: {error}") from error

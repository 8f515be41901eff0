"""Deploys, lists and removes functions and pipelines over HTTP.

A deploy works as with a container registry: query the missing blocks, send those, then send the manifest that names
them all. A pipeline is sent as one document. Every request acts for one tenant, and a block that only another tenant
has sent is missing.
"""

import re
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Annotated

import msgspec
from msgspec import Raw

from overwinter.api.answers import MissingBlocks, RegisteredFunction, RegisteredPipeline, Removed, StoredBlock
from overwinter.api.caller_thread import CallerThread
from overwinter.api.exchange import JSON_TYPE, Request, Response, decode_json, json_response
from overwinter.api.floats import check_floats
from overwinter.api.inference import function_of
from overwinter.api.listing import listed
from overwinter.api.node_interface import FunctionView
from overwinter.api.operations import Body, Operation, json_body
from overwinter.api.reading import BodyLimits
from overwinter.api.steps import Steps
from overwinter.api.tenants import check_manifest, check_owner, tenant_of
from overwinter.api.uploads import Uploads
from overwinter.core.config import RequestLimits
from overwinter.core.errors import CallerError, MediaError, TooLargeError
from overwinter.core.ids import Address
from overwinter.core.pipeline import Pipeline, decode_pipeline
from overwinter.core.tensor import Buffer
from overwinter.core.versions import SHARES_MAX, Shares, check_shares
from overwinter.node import clock
from overwinter.node.pipelines import PipelineInfo
from overwinter.node.views import FunctionInfo
from overwinter.store.manifest import ADDRESS_PATTERN, ALL_SAMPLES_BYTES_MAX, Manifest, decode_manifest

JSON = "application/json"
MSGPACK = ("application/msgpack", "application/x-msgpack")
MISSING_MAX = 16_384
"""The most addresses in one query."""
QUERY = BodyLimits(2 << 20)
PIPELINE = BodyLimits(64 << 10)
TRAFFIC = BodyLimits(64 << 10)
MANIFEST_COST = 8
"""The bytes of memory for each byte of a manifest while it is read."""
MSGPACK_BYTES_MAX = 256 << 10
LISTS_MAX = 1 << 15
"""The most lists in a manifest. A weight is one list, and a block is two."""
MARKS_MAX = {b"[": LISTS_MAX, b"{": LISTS_MAX // 4, b":": LISTS_MAX // 2, b",": 8 * LISTS_MAX}
"""The most of each of these characters in a manifest: they limit its lists, objects, keys and values. They are counted
before decoding, because decoding creates all of these. The inputs and outputs may be 2048 objects with 6144 keys. A
weight or a block takes three commas."""
DESCRIPTION_BYTES_MAX = 64 << 10
"""The most bytes of inputs, outputs, settings and agreement together. This description is encoded again for each query,
and a MiB takes the event loop 12 ms. The size is checked before decoding, because decoding checks the pattern of every
name, even in a list that is too long.
"""
HANDLER_BYTES_MAX = 256 << 10
"""The most bytes of the names and addresses of a handler's files: enough for more than a thousand files. With 16,000
files, the check of their names keeps all other threads waiting for 60 ms.
"""
SAMPLES_BYTES_MAX = 2 * ALL_SAMPLES_BYTES_MAX
"""The most bytes of all samples as JSON, where their bytes are base64."""


class MissingRequest(msgspec.Struct):
    """A query for those of these blocks that the tenant has to send."""

    addresses: Annotated[
        list[Annotated[Address, msgspec.Meta(pattern=ADDRESS_PATTERN)]], msgspec.Meta(max_length=MISSING_MAX)
    ]


class _Outline(msgspec.Struct, forbid_unknown_fields=True):
    """A manifest whose parts are not decoded yet."""

    name: Raw
    tenant: Raw
    program: Raw
    blocks: Raw
    inputs: Raw
    outputs: Raw
    handler: Raw = Raw(b"null")
    settings: Raw = Raw(b"{}")
    agreement: Raw = Raw(b"null")
    samples: Raw = Raw(b"[]")


class TrafficShares(msgspec.Struct):
    """The shares of versions in the requests without a version: 100 per cent together; if empty, the newest version has
    all.
    """

    shares: Annotated[Shares, msgspec.Meta(max_length=SHARES_MAX)]


_missing_decoder = msgspec.json.Decoder(MissingRequest)
_traffic_decoder = msgspec.json.Decoder(TrafficShares)
_is_address = re.compile(ADDRESS_PATTERN).match


class DeploymentApi:
    """The routes of deploys."""

    def __init__(self, disk: Executor, limits: RequestLimits) -> None:
        self._uploads = Uploads(disk, limits)
        self._manifest = BodyLimits(limits.manifest_bytes_max, MANIFEST_COST)
        # Uploads run in the threads of `disk`.
        self._queries, self._manifests = CallerThread("api-queries"), CallerThread("api-manifests")

    def operations(self) -> list[Operation]:
        """Every operation for deployers."""
        functions, function = "/overwinter/v1/functions", "/overwinter/v1/functions/{name}"
        version = "/overwinter/v1/functions/{name}/versions/{version}"
        pipelines, blocks = "/overwinter/v1/pipelines", "/overwinter/v1/blocks"
        manifest = tuple(Body(kind, Manifest) for kind in (JSON, *MSGPACK))
        description = json_body(FunctionInfo, PipelineInfo)
        return [
            Operation(
                "POST", f"{blocks}/missing", "deploy", self.missing, {200: json_body(MissingBlocks)},
                request_body=json_body(MissingRequest), has_lasting_effect=False,
            ),
            Operation(
                "PUT", blocks + "/{address}", "deploy", self.put_block,
                {status: json_body(StoredBlock) for status in (200, 201)},
                request_body=(Body("application/octet-stream", about="The bytes of the block."),), errors=(507,),
            ),
            Operation(
                "POST", functions, "deploy", self.register, {201: json_body(RegisteredFunction)}, request_body=manifest,
                errors=(409, 504, 507),
            ),
            Operation("GET", functions, "token", self.functions, {200: json_body(list[FunctionInfo])}, errors=(413,)),
            Operation(
                "POST", pipelines, "deploy", self.register_pipeline, {201: json_body(RegisteredPipeline)},
                request_body=json_body(Pipeline), errors=(404, 409, 507),
            ),
            Operation("GET", pipelines, "token", self.pipelines, {200: json_body(list[PipelineInfo])}, errors=(413,)),
            *(Operation("GET", path, "token", self.function, {200: description}) for path in (function, version)),
            Operation(
                "PUT", f"{function}/traffic", "deploy", self.traffic, {200: json_body(TrafficShares)},
                request_body=json_body(TrafficShares), errors=(409, 507),
            ),
            *(
                Operation(
                    "DELETE", path, "deploy", self.remove, {200: json_body(Removed)}, errors=(409,)
                )
                for path in (function, version)
            ),
        ]  # fmt: skip

    async def missing(self, request: Request) -> Response:
        """Those of the given blocks that the tenant has to send."""
        tenant = tenant_of(request)
        body = await request.body(QUERY)
        blocks = request.caller.node.repository

        def missing() -> Sequence[Address]:
            # Decoding 16,384 addresses takes as long as a hundred requests, so the thread does it. It also reads the
            # clock, because the query may have waited for others.
            return blocks.missing(tenant, decode_json(_missing_decoder, body).addresses, clock.wall())

        query = self._queries.run(request.reservation.caller, tenant, missing)
        return json_response(MissingBlocks(tuple(await request.unless_disconnected(query))))

    async def put_block(self, request: Request) -> Response:
        """Store one block: 201 when it is new to the tenant, otherwise 200."""
        tenant = tenant_of(request)
        address = Address(request.path_params["address"])
        if not _is_address(address):
            raise CallerError(f"{address!r} is not a block's address: 64 hexadecimal digits in lower case")
        if request.headers.get("content-encoding", "identity") != "identity":
            raise MediaError("blocks are sent as they are, without a content-encoding")
        new = await self._uploads.receive(request, request.caller.node.repository, tenant, address)
        return json_response(StoredBlock(address, new), 201 if new else 200)

    async def register(self, request: Request) -> Response:
        """Register a new version of a function whose blocks the tenant has sent."""
        body = await request.body(self._manifest)
        kind = request.headers.get("content-type")
        read = partial(read_manifest, kind, body)
        manifest = await self._manifests.run(request.reservation.caller, tenant_of(request), read)
        check_manifest(request, manifest.tenant, f"the manifest of {manifest.name!r}")
        deployed = await request.caller.node.deploy(manifest)
        return json_response(RegisteredFunction(manifest.name, deployed.version, deployed.warning), 201)

    async def register_pipeline(self, request: Request) -> Response:
        """Register a pipeline of deployed functions."""
        tenant = tenant_of(request)
        body = await request.body(PIPELINE)
        check_floats(body)
        pipeline = decode_pipeline(body)
        deployed = await request.caller.node.deploy_pipeline(pipeline, tenant)
        return json_response(RegisteredPipeline(pipeline.name, deployed.version), 201)

    async def pipelines(self, request: Request) -> Response:
        """Every pipeline, with its description."""
        return await _listed(request, request.caller.node.pipelines())

    async def functions(self, request: Request) -> Response:
        """Every version of every function, with its description."""
        return await _listed(request, request.caller.node.functions())

    async def function(self, request: Request) -> Response:
        """One version of a function, by default the default version; or a pipeline."""
        return request.counted(await request.run(_described(request.caller.node.view(*function_of(request)))))

    async def traffic(self, request: Request) -> Response:
        """Set the shares of versions in the requests that name no version, in per cent; with no shares, the newest
        version gets all.
        """
        traffic = decode_json(_traffic_decoder, await request.body(TRAFFIC))
        check_shares(traffic.shares)
        name, _ = function_of(request)
        check_owner(request, name)
        await request.caller.node.set_traffic(name, traffic.shares)
        return json_response(traffic)

    async def remove(self, request: Request) -> Response:
        """Remove one version of a function, or all, or a pipeline."""
        name, version = function_of(request)
        check_owner(request, name)
        await request.caller.node.remove(name, version)
        return json_response(Removed(name, version))


def read_manifest(content_type: str | None, body: Buffer) -> Manifest:
    """Read a manifest from JSON (also without a Content-Type) or msgpack; raise CallerError, MediaError or
    TooLargeError.
    """
    kind = (content_type or JSON).split(";")[0].strip().lower()
    if kind == JSON:
        return _decode_bounded(bytes(body))
    if kind not in MSGPACK:
        raise MediaError(f"a manifest must be application/json or application/msgpack, not {kind!r}")
    if len(body) > MSGPACK_BYTES_MAX:
        raise TooLargeError(f"a manifest as msgpack may have at most {MSGPACK_BYTES_MAX} bytes: send it as JSON")
    try:
        # Only one decoder validates manifests, and it reads JSON.
        return _decode_bounded(msgspec.json.encode(msgspec.msgpack.decode(body, type=Manifest)))
    except (msgspec.MsgspecError, UnicodeError, RecursionError, TypeError, ValueError) as error:
        raise CallerError(f"the manifest is not valid msgpack: {error}") from error


def _decode_bounded(text: bytes) -> Manifest:
    """Decode a manifest; raise TooLargeError if it has too many parts or a part is too long, and CallerError if it is
    not valid.
    """
    for mark, most in MARKS_MAX.items():
        if text.count(mark) > most:
            raise TooLargeError(
                f"the manifest has more than {most} of the character {mark.decode()!r}: give the function fewer "
                "weights or tensors"
            )
    check_floats(text)
    try:
        outline = msgspec.json.decode(text, type=_Outline)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CallerError(f"the manifest is not valid: {error}") from None
    for parts, most, advice in (
        (("inputs", "outputs", "settings", "agreement"), DESCRIPTION_BYTES_MAX, "fewer tensors, or shorter names"),
        (("handler",), HANDLER_BYTES_MAX, "fewer assets, or shorter names"),
        (("samples",), SAMPLES_BYTES_MAX, "fewer samples, or smaller ones"),
    ):
        nbytes = sum(memoryview(getattr(outline, part)).nbytes for part in parts)
        if nbytes > most:
            raise TooLargeError(
                f"{', '.join(parts)} of the manifest are {nbytes} bytes of JSON, and at most {most} are allowed: "
                f"give the function {advice}"
            )
    # Decode the outline, not the text: a key may occur twice in the text, and only the last value, which is in the
    # outline, was checked.
    return decode_manifest(msgspec.json.encode(outline))


def _described(view: FunctionView) -> Steps[Response]:
    """Return the whole description, in one step that waits for its turn: a function may have thousands of blocks."""
    yield
    return json_response(view.info(True))


async def _listed(request: Request, views: Iterable[FunctionView]) -> Response:
    """Return the description of each view."""
    steps = listed(views, lambda view: view.info(), request.reservation)
    return Response(200, await request.run(steps), [JSON_TYPE])

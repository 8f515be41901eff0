"""The Open Inference Protocol v2 over HTTP: health, metadata, inference, and the repository of models."""

from collections.abc import Iterator, Sequence
from itertools import chain, groupby

import msgspec

from overwinter.api.answers import (
    ConfigParameter,
    ConfigTensor,
    IndexEntry,
    InstanceGroup,
    Live,
    ModelConfig,
    ModelMetadata,
    ModelReady,
    Models,
    Ready,
    ServerMetadata,
    TensorMetadata,
)
from overwinter.api.contract import check_outputs, raw_input
from overwinter.api.draining import Drain
from overwinter.api.exchange import JSON_TYPE, Request, Response, decode_json, json_response
from overwinter.api.listing import listed
from overwinter.api.node_interface import FunctionView
from overwinter.api.oip import Inference, InferRequest, InferResponse, decode_request, encode_reply
from overwinter.api.operations import Body, Operation, json_body
from overwinter.api.reading import BodyLimits
from overwinter.api.tenants import check_owner
from overwinter.api.writing import ElementWriter
from overwinter.core.call import Call, Result
from overwinter.core.config import RequestLimits
from overwinter.core.errors import CallerError, NotFoundError, TooLargeError
from overwinter.core.function import Settings
from overwinter.core.ids import FunctionName
from overwinter.core.tensor import BYTES, TensorSpec, check_inputs

EXTENSIONS = (
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
)
HEAD_LENGTH = "Inference-Header-Content-Length"
HEAD_LENGTH_KEY = HEAD_LENGTH.lower().encode()
BINARY_TYPE = (b"content-type", b"application/octet-stream")
HEAD_ABOUT = f"message as JSON, of as many bytes as {HEAD_LENGTH} says, and then the bytes of the tensors that have a "
BINARY_INPUT = Body(
    "application/octet-stream",
    about=f"An InferRequest {HEAD_ABOUT}binary_data_size, in order. If the header is 0: the bytes of the only input.",
)
BINARY_OUTPUT = Body("application/octet-stream", about=f"An InferResponse {HEAD_ABOUT}binary_data_size, in order.")
JSON_COST = 8
"""The bytes of memory that are reserved for each byte of JSON: for its text, and for the decoded elements."""
SHORT = BodyLimits(64 << 10)
"""The limit of short bodies, which contain no tensors."""
STARTS = {start: (b"overwinter-start", start.encode()) for start in ("warm", "bound", "host", "disk")}
"""The header that reports the kind of start."""


class IndexRequest(msgspec.Struct):
    """The filter of a listing."""

    ready: bool = False


class LoadRequest(msgspec.Struct):
    """The body of a load or unload; load takes no parameters, and those of unload have no effect."""

    parameters: dict[str, msgspec.Raw] = {}
    """Not decoded, because long numbers are slow to decode."""


_index_decoder = msgspec.json.Decoder(IndexRequest)
_load_decoder = msgspec.json.Decoder(LoadRequest)


class InferenceApi:
    """The handlers of the protocol's operations."""

    def __init__(self, limits: RequestLimits, product_version: str, drain: Drain) -> None:
        self._limits = limits
        self._drain = drain
        json_bytes_max = min(limits.json_bytes_max, limits.request_bytes_max)
        self._binary = BodyLimits(limits.request_bytes_max)
        self._json = BodyLimits(
            json_bytes_max, JSON_COST, " of JSON: send large tensors by the binary tensor extension"
        )
        self._server = ServerMetadata("overwinter", product_version, EXTENSIONS)

    def operations(self) -> list[Operation]:
        """Every operation of the protocol; the most frequent one comes first."""
        models = ("/models/{name}", "/models/{name}/versions/{version}")
        return [
            *(
                Operation(
                    "POST", f"/v2{path}/infer", "infer", self.infer, {200: (*json_body(InferResponse), BINARY_OUTPUT)},
                    request_body=(*json_body(InferRequest), BINARY_INPUT), headers=(HEAD_LENGTH,), errors=(504, 507),
                )
                for path in models
            ),
            Operation("GET", "/v2", "token", self.server, {200: json_body(ServerMetadata)}),
            Operation("GET", "/v2/health/live", "nothing", self.live, {200: json_body(Live), 400: json_body(Live)}),
            Operation("GET", "/v2/health/ready", "nothing", self.ready, {200: json_body(Ready), 400: json_body(Ready)}),
            Operation("GET", "/v2/models", "token", self.models, {200: json_body(Models)}, errors=(413,)),
            *(
                Operation("GET", f"/v2{path}{action}", "token", handler, answers)
                for path in models
                for action, handler, answers in (
                    ("", self.model, {200: json_body(ModelMetadata)}),
                    ("/ready", self.model_ready, {200: json_body(ModelReady), 400: json_body(ModelReady)}),
                    ("/config", self.model_config, {200: json_body(ModelConfig)}),
                )
            ),
            Operation(
                "POST", "/v2/repository/index", "token", self.index, {200: json_body(list[IndexEntry])},
                request_body=json_body(IndexRequest), is_body_optional=True,
            ),
            *(
                Operation(
                    "POST", f"/v2/repository{path}/{handler.__name__}", "deploy", handler, {200: ()},
                    request_body=json_body(LoadRequest), is_body_optional=True, errors=(409, 504, 507),
                )
                for path in models
                for handler in (self.load, self.unload)
            ),
        ]  # fmt: skip

    async def infer(self, request: Request) -> Response:
        """Run a function on the body's tensors."""
        name, version = function_of(request)
        # The body of a request for an unknown function is not read.
        request.caller.node.view(name, version)
        head_bytes = head_length(request)
        if head_bytes is not None and head_bytes > self._limits.json_bytes_max:
            raise TooLargeError(
                f"the request has {head_bytes} bytes of JSON, and at most {self._limits.json_bytes_max} are accepted: "
                "send large tensors as binary"
            )
        body = await request.body(self._json if head_bytes is None else self._binary)
        inference = None
        if head_bytes != 0:
            if head_bytes is not None:
                request.reservation.grow(head_bytes * JSON_COST)
            inference = await request.run(decode_request(body, head_bytes, self._limits.elements_max))
        # Another version may have become the default meanwhile. Nothing is awaited from here until the scheduler
        # chooses the version, so it is the one whose declaration is checked.
        view = request.caller.node.view(name, version)
        if inference is None:
            inference = Inference([raw_input(body, view.inputs)], binary=True)
        check_inputs(inference.inputs, view.inputs)
        check_outputs(inference.wanted, inference.binary, view.outputs)
        call = Call(
            name, version, inference.inputs, inference.timeout_s, inference.priority, reserve=request.reservation.grow
        )
        reply = await request.unless_disconnected(request.caller.node.infer(call))
        return await self._answer(request, reply, inference)

    async def _answer(self, request: Request, reply: Result, inference: Inference) -> Response:
        """Encode the reply in the requested format, and reserve the memory of its JSON; that of the outputs is already
        reserved.
        """
        inference.inputs.clear()
        writer = ElementWriter(self._limits.json_bytes_max, request.reservation.grow)
        head, tail = await request.run(encode_reply(reply.name, reply.version, reply.outputs, inference, writer))
        start = STARTS[reply.start]
        if not tail:
            return Response(200, head, [JSON_TYPE, start])
        return Response(200, head, [BINARY_TYPE, (HEAD_LENGTH_KEY, b"%d" % len(head)), start], tail=tail)

    async def server(self, request: Request) -> Response:
        """The name, version and protocol extensions of this server."""
        return json_response(self._server)

    async def live(self, request: Request) -> Response:
        """Whether the node works; 400 if not, as the protocol requires."""
        live = request.caller.node.live()
        return json_response(Live(live), 200 if live else 400)

    async def ready(self, request: Request) -> Response:
        """Whether the node answers new requests; a draining node does not."""
        ready = request.caller.node.ready() and not self._drain.begun
        return json_response(Ready(ready), 200 if ready else 400)

    async def models(self, request: Request) -> Response:
        """The names of all functions and pipelines (KServe's list)."""
        # The versions of a function follow each other in the list.
        names = (name for name, _ in groupby(view.name for view in _views(request)))
        return Response(200, b'{"models":%b}' % await request.run(listed(names, str, request.reservation)), [JSON_TYPE])

    async def model(self, request: Request) -> Response:
        """A function's inputs and outputs."""
        view = _view(request)
        versions = tuple(str(version) for version in request.caller.node.versions(view.name))
        return json_response(
            ModelMetadata(view.name, versions, view.platform, _tensors(view.inputs), _tensors(view.outputs))
        )

    async def model_ready(self, request: Request) -> Response:
        """Whether a function answers requests, with or without a worker."""
        view = _view(request)
        ready = view.state == "READY"
        return json_response(ModelReady(view.name, ready), 200 if ready else 400)

    async def model_config(self, request: Request) -> Response:
        """The description of a function in the format of Triton's model configuration."""
        view = _view(request)
        settings = msgspec.to_builtins(view.settings)
        # A pipeline has no workers.
        workers = view.settings.max_workers if isinstance(view.settings, Settings) else 0
        parameters = {key: ConfigParameter(str(value)) for key, value in settings.items() if value is not None}
        return json_response(
            ModelConfig(
                name=view.name,
                platform=view.platform,
                version_policy={"all": {}},
                input=_config_tensors(view.inputs),
                output=_config_tensors(view.outputs),
                instance_group=(InstanceGroup(view.name, "KIND_CPU", workers),),
                parameters=parameters,
            )
        )

    async def index(self, request: Request) -> Response:
        """Every version of every function, every pipeline, and their states."""
        body = await request.body(SHORT)
        ready_only = decode_json(_index_decoder, body).ready if body else False
        views = (view for view in _views(request) if view.state == "READY" or not ready_only)
        return Response(200, await request.run(listed(views, _indexed, request.reservation)), [JSON_TYPE])

    async def load(self, request: Request) -> Response:
        """Wake a function; one that was unloaded becomes available again."""
        body = await request.body(SHORT)
        if body and decode_json(_load_decoder, body).parameters:
            raise CallerError("load takes no parameters: to change a function, deploy a new version")
        name, version = function_of(request)
        check_owner(request, name)
        await request.unless_disconnected(request.caller.node.load(name, version))
        return Response(200, b"", [])

    async def unload(self, request: Request) -> Response:
        """Unload a function, which releases its memory."""
        body = await request.body(SHORT)
        if body:
            # The only parameter, unload_dependents, has no effect: only pipelines depend on functions, and they hold no
            # memory of their own.
            decode_json(_load_decoder, body)
        name, version = function_of(request)
        check_owner(request, name)
        await request.caller.node.unload(name, version)
        return Response(200, b"", [])


def function_of(request: Request) -> tuple[FunctionName, int | None]:
    """Return the name and the version in the path; raise NotFoundError if the version is not a number."""
    name = FunctionName(request.path_params["name"])
    version = request.path_params.get("version")
    if version is None:
        return name, None
    if not (version.isascii() and version.isdigit() and len(version) < 19):
        raise NotFoundError(f"function {name!r} has no version {version!r}: versions are whole numbers")
    return name, int(version)


def _view(request: Request) -> FunctionView:
    return request.caller.node.view(*function_of(request))


def _views(request: Request) -> Iterator[FunctionView]:
    return chain(request.caller.node.functions(), request.caller.node.pipelines())


def head_length(request: Request) -> int | None:
    """Return the length of the JSON before the binary tensors; None if the body is all JSON. Raises CallerError."""
    text = request.fields.get(HEAD_LENGTH_KEY)
    if text is None:
        return None
    if not text.isdigit() or len(text) > 18:
        raise CallerError(f"{HEAD_LENGTH} is not a number of bytes: {text.decode('latin-1')!r}")
    return int(text)


def _indexed(view: FunctionView) -> IndexEntry:
    return IndexEntry(view.name, str(view.version), view.state, view.reason)


def _tensors(specs: Sequence[TensorSpec]) -> tuple[TensorMetadata, ...]:
    return tuple(TensorMetadata(spec.name, spec.datatype, _dims(spec)) for spec in specs)


def _config_tensors(specs: Sequence[TensorSpec]) -> tuple[ConfigTensor, ...]:
    # In model configurations, Triton's name for BYTES is STRING.
    return tuple(
        ConfigTensor(spec.name, f"TYPE_{'STRING' if spec.datatype == BYTES else spec.datatype}", _dims(spec))
        for spec in specs
    )


def _dims(spec: TensorSpec) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) else -1 for size in spec.shape)

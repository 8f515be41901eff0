"""Decodes and encodes the bodies of the Open Inference Protocol, without sockets.

A body is JSON, or (the binary tensor extension) a JSON head followed by the bytes of those tensors that have
`binary_data_size`, in order.
"""

from collections.abc import Sequence
from math import prod
from typing import Annotated, Any

import msgspec

from overwinter.api.elements import parse_elements
from overwinter.api.steps import STEP_BYTES, Steps
from overwinter.api.writing import ElementWriter
from overwinter.core.errors import CallerError, TooLargeError, WorkerError
from overwinter.core.tensor import (
    BYTES,
    ELEMENTS_MAX,
    ELEMENTS_OF_STEP,
    RANK_MAX,
    TENSOR_NAME_MAX,
    TENSORS_MAX,
    Buffer,
    Tensor,
    check_steps,
)

SIZE_MAX = 2**63 - 1
ID_MAX = 1024
SIDE_BYTES_MAX = 1 << 20
"""The most bytes of a request's JSON without the elements of tensors."""
OBJECTS_MAX = 4 * TENSORS_MAX + 8
"""The most JSON objects in a request: tensors, their parameters, and a few more."""
OBJECT_STRINGS_MAX = 8
"""The most strings in such an object."""

Name = Annotated[str, msgspec.Meta(max_length=TENSOR_NAME_MAX)]

Count = Annotated[int, msgspec.Meta(ge=0, le=SIZE_MAX)]


class InputParameters(msgspec.Struct, frozen=True):
    """The parameters of an input; unknown ones are ignored, as the protocol requires."""

    binary_data_size: Count | None = None
    shared_memory_region: str | None = None


class RequestInput(msgspec.Struct):
    """One tensor of a request."""

    name: Name
    datatype: Name
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=RANK_MAX)]
    parameters: InputParameters | None = None
    data: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    """A flat list of the elements, or lists nested as the shape."""


class OutputParameters(msgspec.Struct, frozen=True):
    """The parameters of a requested output."""

    binary_data: bool | None = None
    classification: int = 0
    shared_memory_region: str | None = None


class RequestOutput(msgspec.Struct):
    """One requested output."""

    name: Name
    parameters: OutputParameters = OutputParameters()


class RequestParameters(msgspec.Struct, frozen=True):
    """The parameters of a request."""

    binary_data_output: bool = False
    priority: Count = 0
    timeout: Count = 0
    """The timeout in microseconds; 0: the function's timeout."""
    sequence_id: int | str = 0


class _InputOutline(msgspec.Struct):
    """One tensor of a request, with its elements still encoded."""

    data: msgspec.Raw = msgspec.Raw()


class _Outline(msgspec.Struct):
    """The parts of a request that may be long, still encoded."""

    inputs: list[_InputOutline] = []


class InferRequest(msgspec.Struct):
    """The JSON of a request."""

    inputs: Annotated[list[RequestInput], msgspec.Meta(max_length=TENSORS_MAX)]
    id: Annotated[str, msgspec.Meta(max_length=ID_MAX)] = ""
    outputs: Annotated[list[RequestOutput], msgspec.Meta(max_length=TENSORS_MAX)] = []
    parameters: RequestParameters = RequestParameters()


class Inference(msgspec.Struct):
    """A decoded request, and the requested format of its answer."""

    inputs: list[Tensor]
    id: str = ""
    timeout_s: float | None = None
    priority: int = 0
    binary: bool = False
    """Whether outputs are binary by default."""
    wanted: dict[str, bool] = {}
    """The requested outputs in order, each binary or not; empty: all outputs."""


class ResponseOutput(msgspec.Struct, omit_defaults=True):
    """One tensor of an answer: its elements, or its number of bytes in the body."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: dict[str, int] | None = None
    data: list[Any] | msgspec.Raw | None = None


class InferResponse(msgspec.Struct, omit_defaults=True):
    """The JSON of an answer."""

    model_name: str
    model_version: str
    outputs: list[ResponseOutput]
    id: str = ""


_decode = msgspec.json.Decoder(InferRequest).decode
_decode_outline = msgspec.json.Decoder(_Outline).decode
_encode = msgspec.json.Encoder().encode


def decode_request(body: Buffer, head_bytes: int | None, elements_max: int = ELEMENTS_MAX) -> Steps[Inference]:
    """Decode a request whose JSON is the first `head_bytes` of `body` (None: all of it), with at most `elements_max`
    elements of BYTES tensors. Raises CallerError or TooLargeError.
    """
    if head_bytes is not None and head_bytes > len(body):
        raise CallerError(f"Inference-Header-Content-Length is {head_bytes}, and the body has {len(body)} bytes")
    tail = memoryview(body)
    head = tail[:head_bytes]
    try:
        if len(head) > STEP_BYTES:
            # The first step is empty, because many requests may run their first step in one iteration of the event
            # loop.
            yield
            yield from _check_outline(bytes(head), elements_max)
        request = _decode(head)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        # Some JSON encoders, such as Python's, write NaN and infinity although JSON has neither.
        lacking = any(word in bytes(head) for word in (b"NaN", b"Infinity"))
        remedy = "; JSON cannot represent NaN and infinity: send them by the binary tensor extension" if lacking else ""
        raise CallerError(f"the body is not a valid inference request: {error}{remedy}") from error
    if request.parameters.sequence_id:
        raise CallerError("sequences are not supported: functions keep no state between requests")
    tail = tail[len(body) if head_bytes is None else head_bytes :]
    inputs = []
    nbytes = 0
    for given in request.inputs:
        nbytes += len(memoryview(given.data))
        if nbytes > STEP_BYTES:
            nbytes = 0
            yield
        tensor, used = yield from _read_input(given, tail, head_bytes is not None, elements_max)
        inputs.append(tensor)
        if tensor.datatype == BYTES:
            # A tensor that was accepted has at most this many elements.
            elements_max -= prod(tensor.shape)
            nbytes += prod(tensor.shape) * STEP_BYTES // ELEMENTS_OF_STEP
        tail = tail[used:]
    if tail:
        raise CallerError(f"the body has {len(tail)} bytes after the last binary tensor")
    parameters = request.parameters
    return Inference(
        inputs=inputs,
        id=request.id,
        timeout_s=parameters.timeout / 1e6 if parameters.timeout else None,
        priority=parameters.priority,
        binary=parameters.binary_data_output,
        wanted=_wanted(request) if request.outputs else {},
    )


def encode_reply(
    name: str, version: int, outputs: Sequence[Tensor], inference: Inference, writer: ElementWriter
) -> Steps[tuple[bytes, list[Buffer]]]:
    """Return the JSON of the answer, and the tensors whose bytes follow it."""
    tail: list[Buffer] = []
    described = []
    for tensor, binary in _select(outputs, inference):
        if binary:
            tail.append(tensor.data)
            described.append(
                ResponseOutput(tensor.name, tensor.datatype, tensor.shape, {"binary_data_size": len(tensor.data)})
            )
            continue
        elements = yield from writer.write(tensor)
        described.append(ResponseOutput(tensor.name, tensor.datatype, tensor.shape, None, elements))
    return _encode(InferResponse(name, str(version), described, inference.id)), tail


def _check_outline(head: bytes, elements_max: int) -> Steps[None]:
    """Raise CallerError if a request is long even without the tensors' elements, because only the elements are read in
    pieces; raise TooLargeError if it has too many strings for this check.
    """
    if head.count(b"{") > OBJECTS_MAX:
        yield
        # Exclude braces inside of strings.
        plain = head.replace(rb"\\", b"").replace(rb"\"", b"")
        yield
        strings, most = plain.count(b'"') // 2, elements_max + OBJECTS_MAX * OBJECT_STRINGS_MAX
        if strings > most:
            raise TooLargeError(
                f"the request has {strings} JSON strings, and at most {most} are accepted: send fewer elements of BYTES"
            )
        objects = b"".join(plain.split(b'"')[::2]).count(b"{")
        if objects > OBJECTS_MAX:
            raise CallerError(
                f"the request has {objects} JSON objects, more than {TENSORS_MAX} inputs and outputs need"
            )
    yield
    side = len(head) - sum(len(memoryview(each.data)) for each in _decode_outline(head).inputs)
    if side > SIDE_BYTES_MAX:
        raise CallerError(
            f"the request has {side} bytes of JSON besides its elements; at most {SIDE_BYTES_MAX} are accepted"
        )
    yield


def _read_input(given: RequestInput, tail: memoryview, has_tail: bool, elements_max: int) -> Steps[tuple[Tensor, int]]:
    """Return one input, and its number of bytes in `tail`."""
    size = None
    if given.parameters is not None:
        if given.parameters.shared_memory_region is not None:
            raise CallerError(f"input {given.name!r} asks for shared memory, which this node does not offer")
        size = given.parameters.binary_data_size
    listed = len(memoryview(given.data))
    if size is None:
        if not listed:
            raise CallerError(f"input {given.name!r} has neither data nor a binary_data_size")
        data = yield from parse_elements(given.name, given.datatype, given.shape, given.data, elements_max)
        return Tensor(given.name, given.datatype, given.shape, data), 0
    if listed:
        raise CallerError(f"input {given.name!r} has both data and a binary_data_size: send only one of them")
    if not has_tail:
        raise CallerError(f"input {given.name!r} is binary, and the Inference-Header-Content-Length header is missing")
    if size > len(tail):
        raise CallerError(f"input {given.name!r} announces {size} bytes, and the body has {len(tail)} left")
    tensor = Tensor(given.name, given.datatype, given.shape, tail[:size])
    yield from check_steps(tensor, elements_max)
    return tensor, size


def _wanted(request: InferRequest) -> dict[str, bool]:
    wanted: dict[str, bool] = {}
    for output in request.outputs:
        parameters = output.parameters
        if parameters.shared_memory_region is not None:
            raise CallerError(f"output {output.name!r} asks for shared memory, which this node does not offer")
        if parameters.classification:
            raise CallerError(f"output {output.name!r} asks for classification, which this node does not offer")
        if output.name in wanted:
            raise CallerError(f"output {output.name!r} is requested twice")
        binary = parameters.binary_data
        wanted[output.name] = request.parameters.binary_data_output if binary is None else binary
    return wanted


def _select(outputs: Sequence[Tensor], inference: Inference) -> list[tuple[Tensor, bool]]:
    if not inference.wanted:
        return [(tensor, inference.binary) for tensor in outputs]
    named = {tensor.name: tensor for tensor in outputs}
    missing = inference.wanted.keys() - named
    if missing:
        raise WorkerError(f"the function did not return its outputs {sorted(missing)}")
    return [(named[name], binary) for name, binary in inference.wanted.items()]

"""What do the bodies of the Open Inference Protocol say?

Bytes in, tensors out, and back; no sockets. A body is JSON, or (the binary tensor extension) a JSON head and then
the bytes of those tensors that say `binary_data_size`, in order.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from overwinter.api.elements import list_elements, parse_elements
from overwinter.core.errors import CallerError, WorkerError
from overwinter.core.tensor import Buffer, Tensor, check_size

RANK_MAX = 32
SIZE_MAX = 2**63 - 1

Count = Annotated[int, msgspec.Meta(ge=0, le=SIZE_MAX)]


class InputParameters(msgspec.Struct, frozen=True):
    """What a caller may say about an input; unknown words are left aside, as the protocol asks."""

    binary_data_size: Count | None = None
    shared_memory_region: str | None = None


class RequestInput(msgspec.Struct):
    """One tensor of a request."""

    name: str
    datatype: str
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=RANK_MAX)]
    parameters: InputParameters | None = None
    data: msgspec.Raw = msgspec.Raw()


class OutputParameters(msgspec.Struct, frozen=True):
    """What a caller may say about an output."""

    binary_data: bool | None = None
    classification: int = 0
    shared_memory_region: str | None = None


class RequestOutput(msgspec.Struct):
    """One output that the caller wants."""

    name: str
    parameters: OutputParameters = OutputParameters()


class RequestParameters(msgspec.Struct, frozen=True):
    """What a caller may say about a request."""

    binary_data_output: bool = False
    priority: Count = 0
    timeout: Count = 0
    """Microseconds; 0: the function's own."""
    sequence_id: int | str = 0


class InferRequest(msgspec.Struct):
    """The JSON of a request."""

    inputs: list[RequestInput]
    id: str = ""
    outputs: list[RequestOutput] = []
    parameters: RequestParameters = RequestParameters()


class Inference(msgspec.Struct):
    """A request as the node takes it, and how its answer is to look."""

    inputs: list[Tensor]
    id: str = ""
    timeout_s: float | None = None
    priority: int = 0
    binary: bool = False
    """Whether outputs travel as binary unless they say otherwise."""
    wanted: dict[str, bool] = {}
    """The wanted outputs in order, each binary or not; empty: all."""


class _ResponseOutput(msgspec.Struct, omit_defaults=True):
    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: dict[str, int] | None = None
    data: list[Any] | None = None


class _InferResponse(msgspec.Struct, omit_defaults=True):
    model_name: str
    model_version: str
    outputs: list[_ResponseOutput]
    id: str = ""


_decode = msgspec.json.Decoder(InferRequest).decode
_encode = msgspec.json.Encoder().encode


def decode_request(body: bytes, head_bytes: int | None) -> Inference:
    """Read a request whose JSON is the first `head_bytes` of `body` (None: all of it); CallerError."""
    if head_bytes is not None and head_bytes > len(body):
        raise CallerError(f"Inference-Header-Content-Length is {head_bytes}, and the body has {len(body)} bytes")
    tail = memoryview(body)
    head = tail[:head_bytes]
    try:
        request = _decode(head)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        # Clients that write JSON as Python does send them bare.
        lacking = any(word in bytes(head) for word in (b"NaN", b"Infinity"))
        way = "; JSON has no word for NaN and infinity: send them by the binary tensor extension" if lacking else ""
        raise CallerError(f"the body is not a valid inference request: {error}{way}") from error
    if request.parameters.sequence_id:
        raise CallerError("sequences are not supported: functions keep no state between requests")
    tail = tail[len(body) if head_bytes is None else head_bytes :]
    inputs = []
    for given in request.inputs:
        tensor, used = _read_input(given, tail, head_bytes is not None)
        inputs.append(tensor)
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


def encode_reply(name: str, version: int, outputs: Sequence[Tensor], inference: Inference) -> tuple[bytes, int | None]:
    """The body of the answer, and the length of its JSON head when bytes of tensors follow it."""
    parts: list[Buffer] = [b""]
    described = []
    for tensor, binary in _select(outputs, inference):
        if binary:
            parts.append(tensor.data)
            described.append(
                _ResponseOutput(tensor.name, tensor.datatype, tensor.shape, {"binary_data_size": len(tensor.data)})
            )
        else:
            described.append(_ResponseOutput(tensor.name, tensor.datatype, tensor.shape, None, list_elements(tensor)))
    head = _encode(_InferResponse(name, str(version), described, inference.id))
    if len(parts) == 1:
        return head, None
    parts[0] = head
    return b"".join(parts), len(head)


def _read_input(given: RequestInput, tail: memoryview, has_tail: bool) -> tuple[Tensor, int]:
    """One input and how many bytes of `tail` are its own."""
    size = None
    if given.parameters is not None:
        if given.parameters.shared_memory_region is not None:
            raise CallerError(f"input {given.name!r} asks for shared memory, which this node does not offer")
        size = given.parameters.binary_data_size
    listed = len(memoryview(given.data))
    if size is None:
        if not listed:
            raise CallerError(f"input {given.name!r} has neither data nor a binary_data_size")
        data = parse_elements(given.name, given.datatype, given.shape, given.data)
        return Tensor(given.name, given.datatype, given.shape, data), 0
    if listed:
        raise CallerError(f"input {given.name!r} has both data and a binary_data_size: send one of them")
    if not has_tail:
        raise CallerError(f"input {given.name!r} is binary, and the Inference-Header-Content-Length header is missing")
    if size > len(tail):
        raise CallerError(f"input {given.name!r} says {size} bytes, and the body has {len(tail)} left")
    tensor = Tensor(given.name, given.datatype, given.shape, tail[:size])
    check_size(tensor)
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
            raise CallerError(f"output {output.name!r} is asked for twice")
        binary = parameters.binary_data
        wanted[output.name] = request.parameters.binary_data_output if binary is None else binary
    return wanted


def _select(outputs: Sequence[Tensor], inference: Inference) -> list[tuple[Tensor, bool]]:
    if not inference.wanted:
        return [(tensor, inference.binary) for tensor in outputs]
    named = {tensor.name: tensor for tensor in outputs}
    missing = inference.wanted.keys() - named
    if missing:
        raise WorkerError(f"the function did not give its outputs {sorted(missing)}")
    return [(named[name], binary) for name, binary in inference.wanted.items()]

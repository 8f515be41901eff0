"""The client's side of the binary tensor extension: encodes a request and decodes its answer."""

import httpx
import msgspec

from overwinter.core.errors import MachineError
from overwinter.core.tensor import Tensor, check_size

HEAD_LENGTH = "inference-header-content-length"


class _Output(msgspec.Struct):
    """An output as the head of an answer describes it."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: dict[str, int]


class Head(msgspec.Struct):
    """The head of an answer."""

    model_version: str
    outputs: list[_Output]


def encode_request(tensors: list[Tensor], timeout_s: float | None) -> tuple[int, bytes]:
    """Return the length of the JSON head, and the body: the head, then the bytes of all tensors."""
    parameters: dict[str, bool | int] = {"binary_data_output": True}
    if timeout_s is not None:
        # The protocol counts microseconds, and 0 would mean the function's timeout.
        parameters["timeout"] = max(1, round(timeout_s * 1e6))
    described = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": tensor.shape,
            "parameters": {"binary_data_size": len(tensor.data)},
        }
        for tensor in tensors
    ]
    head = msgspec.json.encode({"inputs": described, "parameters": parameters})
    return len(head), b"".join([head, *(tensor.data for tensor in tensors)])


def decode_reply(response: httpx.Response) -> tuple[Head, list[Tensor]]:
    """Return the head and the tensors of an answer. Raises MachineError if it is not in the binary tensor format, and
    CallerError if the bytes of a tensor do not fit its shape.
    """
    try:
        head_bytes = int(response.headers[HEAD_LENGTH])
        head = msgspec.json.decode(response.content[:head_bytes], type=Head)
        sizes = [output.parameters["binary_data_size"] for output in head.outputs]
    except (KeyError, ValueError) as error:
        raise MachineError(f"the answer from {response.url} is not in the binary tensor format: {error!r}") from error
    tensors = []
    tail = memoryview(response.content)[head_bytes:]
    for output, size in zip(head.outputs, sizes, strict=True):
        tensors.append(Tensor(output.name, output.datatype, output.shape, tail[:size]))
        check_size(tensors[-1])
        tail = tail[size:]
    return head, tensors

"""What a handler may give becomes tensors of the wire."""

import pytest
import torch

from overwinter.core.errors import HandlerError
from overwinter.core.tensor import TensorMeta, pack_bytes
from overwinter.worker.handler import Handler
from overwinter.worker.values import Parcel

GIVES = "def postprocess(outputs, inputs, state):\n    return {'y': %s}\n"


@pytest.mark.parametrize(
    ("given", "shape"),
    [("[b'a', b'bc']", (2,)), ("[[b'a', b'bc'], [b'', b'd']]", (2, 2)), ("[]", (0,)), ("[[], []]", (2, 0))],
)
def test_bytes_of_one_and_two_ranks(given, shape):
    value = Handler(GIVES % given, {}).after({}, {})["y"]
    flat = [item for row in value for item in (row if isinstance(row, list) else [row])]
    assert Parcel("y", value).meta == TensorMeta("y", "BYTES", shape, len(pack_bytes(flat)))


@pytest.mark.parametrize("given", ["[b'a', [b'b']]", "[[b'a'], [b'b', b'c']]", "['text']", "[[1]]", "1"])
def test_what_is_no_tensor_is_refused(given):
    with pytest.raises(HandlerError, match="'y'"):
        Handler(GIVES % given, {}).after({"x": torch.zeros(1)}, {})

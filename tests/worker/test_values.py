"""What a handler may give becomes tensors of the wire."""

import pytest
import torch

from overwinter.core.errors import HandlerError
from overwinter.core.tensor import ANSWER_BYTES_MAX, ELEMENTS_MAX, TensorMeta, pack_bytes
from overwinter.worker.handler import Handler
from overwinter.worker.values import Parcel, parcels

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


def test_an_answer_is_bounded_in_elements_and_bytes():
    Parcel("y", [b""] * ELEMENTS_MAX)
    with pytest.raises(HandlerError, match=str(ELEMENTS_MAX)):
        Parcel("y", [b""] * (ELEMENTS_MAX + 1))
    wide = torch.zeros(1).expand(ANSWER_BYTES_MAX // 8)
    assert len(parcels({"y": wide, "z": wide})) == 2
    with pytest.raises(HandlerError, match=str(ANSWER_BYTES_MAX)):
        parcels({"y": wide, "z": wide, "one": torch.zeros(1)})

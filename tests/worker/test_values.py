"""Conversion of a handler's results to tensors."""

import pytest
import torch

from overwinter.core.errors import CallerError, HandlerError
from overwinter.core.tensor import ANSWER_BYTES_MAX, ELEMENTS_MAX, TensorMeta, pack_bytes
from overwinter.worker.handler import Code, Handler
from overwinter.worker.values import EncodedTensor, encode_outputs

GIVES = "def postprocess(outputs, inputs, state):\n    return {'y': %s}\n"


@pytest.mark.parametrize(
    ("given", "shape"),
    [("[b'a', b'bc']", (2,)), ("[[b'a', b'bc'], [b'', b'd']]", (2, 2)), ("[]", (0,)), ("[[], []]", (2, 0))],
)
def test_lists_of_bytes_become_tensors_of_rank_one_or_two(given, shape):
    value = Handler(Code(GIVES % given), {}).postprocess({}, {})["y"]
    flat = [item for row in value for item in (row if isinstance(row, list) else [row])]
    assert EncodedTensor("y", value).meta == TensorMeta("y", "BYTES", shape, len(pack_bytes(flat)))


@pytest.mark.parametrize("given", ["[b'a', [b'b']]", "[[b'a'], [b'b', b'c']]", "['text']", "[[1]]", "1"])
def test_what_is_no_tensor_is_refused(given):
    with pytest.raises(HandlerError, match="'y'"):
        Handler(Code(GIVES % given), {}).postprocess({"x": torch.zeros(1)}, {})


def test_an_answer_is_bounded_in_elements_and_bytes():
    EncodedTensor("y", [b""] * ELEMENTS_MAX)
    with pytest.raises(HandlerError, match=str(ELEMENTS_MAX)):
        EncodedTensor("y", [b""] * (ELEMENTS_MAX + 1))
    wide = torch.zeros(1).expand(ANSWER_BYTES_MAX // 8)
    assert len(encode_outputs({"y": wide, "z": wide})) == 2
    with pytest.raises(HandlerError, match=str(ANSWER_BYTES_MAX)):
        encode_outputs({"y": wide, "z": wide, "one": torch.zeros(1)})


def test_elements_of_type_bytes_are_counted_over_all_outputs() -> None:
    half = [b""] * (ELEMENTS_MAX // 2)
    assert len(encode_outputs({"y": half, "z": half})) == 2
    with pytest.raises(HandlerError, match=str(ELEMENTS_MAX + 1)):
        encode_outputs({"y": half, "z": half, "one": [b""]})


LIES = """
import torch

class Long(torch.Tensor):
    shape = property(lambda self: torch.Size([1 << 40]))
    dtype = property(lambda self: torch.int64)

class Wrapped(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise KeyError("this is not run")

class Heavy(bytes):
    def __len__(self):
        return 1 << 40

class Rows(list):
    def __iter__(self):
        raise MemoryError("none left")

class Name(str):
    def __hash__(self):
        return 7

class Guise:
    __class__ = torch.Tensor

class Names(dict):
    def keys(self):
        raise SystemExit("no names")
    __iter__ = keys

def wrapped():
    return torch.Tensor._make_wrapper_subclass(Wrapped, (4,), dtype=torch.float32)

%s
"""
WHOLE = {
    "subclass": "{'y': torch.ones(4).as_subclass(Long)}",
    "wrapper": "{'y': wrapped()}",
    "guise": "{'y': Guise()}",
    "bytes of another length": "{'y': [Heavy(b'ab')]}",
    "rows": "{'y': Rows([b'a'])}",
    "rows inside": "{'y': [Rows([b'a'])]}",
    "generator": "{'y': (item for item in [b'a'])}",
    "name": "{Name('y'): torch.ones(1)}",
    "names": "Names(y=torch.ones(1))",
    "meta": "{'y': torch.ones(4, device='meta')}",
    "sparse": "{'y': torch.ones(4).to_sparse()}",
    "sparse rows": "{'y': torch.ones(4, 4).to_sparse_csr()}",
    "quantized": "{'y': torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)}",
    "nested": "{'y': torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}",
    "complex": "{'y': torch.ones(4, dtype=torch.complex64)}",
    "small floats": "{'y': torch.ones(4).to(torch.float8_e4m3fn)}",
    "array": "{'y': torch.ones(4).numpy()}",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("given", WHOLE)
@pytest.mark.parametrize("step", ["preprocess", "postprocess"])
def test_names_and_values_that_are_not_plain_or_cannot_be_sent_are_refused(given, step):
    arguments = "inputs, state" if step == "preprocess" else "outputs, inputs, state"
    handler = Handler(Code(LIES % f"def {step}({arguments}):\n    return {WHOLE[given]}"), {})
    with pytest.raises(HandlerError):
        encode_outputs(
            handler.preprocess({"x": torch.ones(1)}) if step == "preprocess" else handler.postprocess({}, {})
        )


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(4, requires_grad=True),
        torch.nn.Parameter(torch.ones(4)),
        torch.ones(4, dtype=torch.complex64).conj().imag,
        torch.ones(1).expand(4),
        torch.arange(8.0)[::2],
        torch.arange(8.0).view(2, 4).t(),
        torch.empty(0, 3),
        torch.tensor(1.0),
    ],
)
def test_any_plain_tensor_is_sent_as_it_is(value):
    encoded = EncodedTensor("y", value)
    content = bytearray(encoded.meta.nbytes + 64)
    with torch.inference_mode():
        encoded.write(content, 64)
    if value.numel():
        assert torch.equal(torch.frombuffer(content, dtype=value.dtype, offset=64).view(value.shape), value.detach())
    assert encoded.meta.shape == tuple(value.shape)


def test_an_encoded_tensor_is_sent_as_described_even_if_the_tensor_object_changes_afterwards():
    value = torch.arange(4.0)
    encoded = EncodedTensor("y", value)
    value.t_().unsqueeze_(0)
    content = bytearray(16)
    encoded.write(content, 0)
    assert encoded.meta == TensorMeta("y", "FP32", (4,), 16)
    assert torch.equal(torch.frombuffer(content, dtype=torch.float32), torch.arange(4.0))


def test_an_error_of_the_caller_that_a_handler_raises_becomes_a_caller_error():
    refuse = (
        "from overwinter.core.errors import NotFoundError\ndef preprocess(inputs, state):\n    raise NotFoundError('x')"
    )
    with pytest.raises(CallerError) as caught:
        Handler(Code(refuse), {}).preprocess({})
    assert type(caught.value) is CallerError

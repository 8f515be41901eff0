import sys

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overwinter.api.arrays import from_tensor, to_tensor
from overwinter.core.datatypes import DATATYPES
from overwinter.core.errors import CallerError
from overwinter.core.tensor import BYTES, Tensor, TensorSpec, check_size, pack_bytes


def no_spec() -> TensorSpec:
    raise AssertionError("the value has a datatype of its own")


def listed(value: object, datatype: str) -> Tensor:
    return to_tensor("x", value, lambda: TensorSpec("x", datatype, ()))


@pytest.fixture
def no_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate an installation without NumPy."""
    monkeypatch.setitem(sys.modules, "numpy", None)


@pytest.mark.parametrize("dtype", DATATYPES)
def test_torch_tensors_keep_their_values_when_converted_and_converted_back(dtype: str) -> None:
    given = torch.tensor([[0, 1, 100], [7, 8, 9]]).to(getattr(torch, dtype))
    tensor = to_tensor("x", given.T, no_spec)
    assert (tensor.name, tensor.datatype, tensor.shape) == ("x", DATATYPES[dtype], (3, 2))
    check_size(tensor)
    back = from_tensor(tensor)
    assert (back == given.T.to(torch.float32 if dtype == "bfloat16" else given.dtype).numpy()).all()


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("dtype", [name for name in DATATYPES if name != "bfloat16"])
def test_numpy_arrays_keep_their_values_when_converted_and_converted_back(dtype: str, order: str) -> None:
    given = numpy.array([[0, 1, 100], [7, 8, 9]], dtype=numpy.dtype(dtype).newbyteorder(order))
    back = from_tensor(to_tensor("x", given[:, ::2], no_spec))
    assert back.dtype == numpy.dtype(dtype)
    assert (back == given[:, ::2]).all()


def test_numpy_strings_become_bytes() -> None:
    for array in (numpy.array(["é", "b"]), numpy.array(["é", "b"], dtype=object), numpy.array(["é".encode(), b"b"])):
        tensor = to_tensor("x", array, no_spec)
        assert (tensor.datatype, tensor.shape) == (BYTES, (2,))
        assert from_tensor(tensor).tolist() == ["é".encode(), b"b"]


@pytest.mark.parametrize(
    ("value", "shape"),
    [
        (3, ()),
        ([3, 4], (2,)),
        ([[3, 4], [5, 6], [7, 8]], (3, 2)),
        ([], (0,)),
        ([[], []], (2, 0)),
        (((1,), (2,)), (2, 1)),
    ],
)
@pytest.mark.usefixtures("no_numpy")
def test_lists_keep_their_values_when_converted_and_converted_back(value: object, shape: tuple[int, ...]) -> None:
    for datatype in ("INT64", "FP32", "FP16", "UINT8"):
        tensor = listed(value, datatype)
        check_size(tensor)
        assert tensor.shape == shape
        as_lists = [list(item) for item in value] if isinstance(value, tuple) else value
        assert from_tensor(tensor) == as_lists


@given(st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=2), max_size=4))
def test_lists_and_numpy_agree(value: list[list[int]]) -> None:
    tensor = listed(value, "INT32")
    assert bytes(tensor.data) == numpy.array(value, dtype="<i4").tobytes()


@pytest.mark.usefixtures("no_numpy")
def test_without_numpy_answers_are_lists() -> None:
    assert from_tensor(Tensor("y", BYTES, (2, 1), pack_bytes([b"a", b""]))) == [[b"a"], [b""]]
    assert from_tensor(to_tensor("y", torch.tensor([0.5, -3.0], dtype=torch.bfloat16), no_spec)) == [0.5, -3.0]
    assert from_tensor(to_tensor("y", torch.tensor(True), no_spec)) is True


@pytest.mark.parametrize(
    ("value", "datatype", "words"),
    [
        ([[1], [2, 3]], "FP32", "different lengths at depth 1"),
        ([[1], 2], "FP32", "different lengths"),
        (["a"], "FP32", "is not FP32"),
        ([300], "UINT8", "is not UINT8"),
        ([1.5], "INT32", "is not INT32"),
        ([1.0], "BF16", "pass a PyTorch tensor"),
        ([1], BYTES, "str and bytes, not int"),
    ],
)
def test_lists_that_are_no_tensor_are_refused(value: object, datatype: str, words: str) -> None:
    with pytest.raises(CallerError, match=words):
        listed(value, datatype)


def test_text_that_is_not_valid_unicode_is_refused() -> None:
    with pytest.raises(CallerError, match="not valid Unicode"):
        to_tensor("words", ["\ud800"], lambda: TensorSpec("words", BYTES, (1,)))


def test_arrays_of_unknown_types_are_refused() -> None:
    for value in (torch.zeros(1, dtype=torch.complex64), numpy.zeros(1, dtype="complex64")):
        with pytest.raises(CallerError, match="complex64"):
            to_tensor("x", value, no_spec)


@pytest.mark.parametrize("value", [["false", "no"], [None], [0.3], "false", {}, b"x", [2]])
def test_only_truth_values_become_bools(value: object) -> None:
    with pytest.raises(CallerError, match="'x' is BOOL"):
        listed(value, "BOOL")


@pytest.mark.parametrize(("value", "data"), [([True, False], b"\x01\x00"), ([0, 1], b"\x00\x01"), (False, b"\x00")])
def test_truth_values_and_their_numbers_become_bools(value: object, data: bytes) -> None:
    assert bytes(listed(value, "BOOL").data) == data


def test_a_torch_tensor_with_a_lazy_negation_is_converted_to_the_negated_values() -> None:
    value = torch.tensor([1 + 2j]).conj().imag
    assert value.is_neg()
    assert from_tensor(to_tensor("x", value, no_spec)).tolist() == [-2.0]

"""Bytes and shapes that do not match are the caller's error; valid tensors are unchanged by encoding and decoding."""

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overwinter.core.datatypes import DATATYPE_BYTES
from overwinter.core.errors import CallerError, TooLargeError
from overwinter.core.tensor import (
    BYTES,
    ELEMENTS_MAX,
    ELEMENTS_OF_STEP,
    RANK_MAX,
    TENSOR_NAME_MAX,
    Tensor,
    TensorSpec,
    check_inputs,
    check_size,
    check_steps,
    pack_bytes,
    unpack_bytes,
)


@given(st.lists(st.binary(max_size=50)))
def test_elements_of_bytes_are_unchanged_by_packing_and_unpacking(elements):
    packed = pack_bytes(elements)
    assert unpack_bytes(packed, len(elements)) == elements
    check_size(Tensor("t", BYTES, (len(elements),), packed))


@given(st.binary(max_size=40), st.integers(0, 10))
def test_any_bytes_are_elements_or_a_callers_error(data, count):
    try:
        elements = unpack_bytes(data, count)
    except CallerError:
        return
    assert pack_bytes(elements) == data


@pytest.mark.parametrize(("datatype", "nbytes"), DATATYPE_BYTES.items())
def test_every_datatype_has_its_size(datatype, nbytes):
    check_size(Tensor("t", datatype, (2, 3), bytes(6 * nbytes)))
    with pytest.raises(CallerError, match=f"needs {6 * nbytes} bytes"):
        check_size(Tensor("t", datatype, (2, 3), bytes(6 * nbytes - 1)))


def test_an_unknown_datatype_and_a_negative_size_are_named():
    with pytest.raises(CallerError, match="'FP99'"):
        check_size(Tensor("t", "FP99", (1,), b""))
    for shape in ((-1, -1), (1, -1)):
        with pytest.raises(CallerError, match="negative"):
            check_size(Tensor("t", "FP32", shape, bytes(4)))


@pytest.mark.parametrize("count", [1, ELEMENTS_MAX, 1 << 62])
def test_a_wrong_number_of_elements_is_refused(count):
    with pytest.raises(CallerError, match="ends inside"):
        unpack_bytes(bytes(3), count)


def test_the_elements_of_bytes_are_bounded():
    check_size(Tensor("t", BYTES, (ELEMENTS_MAX,), bytes(4 * ELEMENTS_MAX)))
    with pytest.raises(TooLargeError, match="elements-max"):
        check_size(Tensor("t", BYTES, (ELEMENTS_MAX + 1,), bytes(4 * (ELEMENTS_MAX + 1))))


def error_of(call):
    try:
        call()
    except CallerError as error:
        return str(error)
    return None


@given(st.lists(st.binary(max_size=3), max_size=20), st.integers(-1, 1), st.integers(-1, 1))
def test_a_check_in_steps_finds_what_decoding_finds(elements, more_elements, more_bytes):
    data, count = pack_bytes(elements), max(0, len(elements) + more_elements)
    data = data[:more_bytes] if more_bytes < 0 else data + bytes(more_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("overwinter.core.tensor.ELEMENTS_OF_STEP", 4)
        found = error_of(lambda: check_size(Tensor("t", BYTES, (count,), data)))
    assert found == error_of(lambda: unpack_bytes(data, count))


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_step_of_a_check_reads_a_limited_number_of_elements(steps):
    for count in (steps * ELEMENTS_OF_STEP + 1, (steps + 1) * ELEMENTS_OF_STEP):
        assert len(list(check_steps(Tensor("t", BYTES, (count,), bytes(4 * count))))) == steps


def test_the_sizes_of_a_shape_are_counted_before_they_are_multiplied():
    with pytest.raises(CallerError, match=str(RANK_MAX)):
        check_size(Tensor("t", "FP32", (1 << 62,) * 1_000_000, b""))
    with pytest.raises(CallerError, match="needs"):
        check_size(Tensor("t", "FP32", ((1 << 63) - 1,) * RANK_MAX, b""))


@pytest.mark.parametrize(
    "spec",
    [
        {"name": "x", "datatype": "FP32", "shape": [1] * (RANK_MAX + 1)},
        {"name": "x" * (TENSOR_NAME_MAX + 1), "datatype": "FP32", "shape": [1]},
        {"name": "x", "datatype": "FP32", "shape": ["s" * (TENSOR_NAME_MAX + 1)]},
    ],
)
def test_a_spec_that_is_sent_is_bounded(spec):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(spec, TensorSpec)


@pytest.mark.parametrize("result", ["y\x1b[31m", "a\nb", "end\n", "bell\x07", "\x9b2J"])
def test_names_have_no_control_characters(result):
    for spec in ({"name": result, "shape": [1]}, {"name": "y", "shape": [result]}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({"datatype": "FP32", **spec}, TensorSpec)
    assert msgspec.convert({"name": "größe 1", "datatype": "FP32", "shape": ["n"]}, TensorSpec).name == "größe 1"


@pytest.mark.parametrize("shape", [(0, 1 << 62, 4), (1 << 62, 1 << 62, 0), (0, 1 << 60)])
def test_an_empty_shape_that_no_tensor_can_have_is_refused(shape):
    spec = TensorSpec("x", "FP32", tuple(f"size{at}" for at in range(len(shape))))
    with pytest.raises(CallerError, match="'x'.*impossible"):
        check_inputs([Tensor("x", "FP32", shape, b"")], [spec])


@given(st.lists(st.one_of(st.sampled_from([0, 1, 3]), st.integers(0, 1 << 62)), max_size=5), st.integers(0, 5))
def test_every_accepted_shape_without_elements_can_be_made(sizes, at):
    shape = (*sizes[:at], 0, *sizes[at:])
    spec = TensorSpec("x", "FP64", tuple(f"size{number}" for number in range(len(shape))))
    try:
        check_inputs([Tensor("x", "FP64", shape, b"")], [spec])
    except CallerError:
        assert max(shape) > 3
    else:
        assert torch.empty(shape, dtype=torch.float64).numel() == 0

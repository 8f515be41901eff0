"""Bytes and shapes that do not fit are the caller's error; what fits survives the wire."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overwinter.core.errors import CallerError
from overwinter.core.tensor import BYTES, ITEM_BYTES, Tensor, check_size, pack_bytes, unpack_bytes


@given(st.lists(st.binary(max_size=50)))
def test_bytes_elements_survive(elements):
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


@pytest.mark.parametrize(("datatype", "nbytes"), ITEM_BYTES.items())
def test_every_datatype_has_its_size(datatype, nbytes):
    check_size(Tensor("t", datatype, (2, 3), bytes(6 * nbytes)))
    with pytest.raises(CallerError, match=f"needs {6 * nbytes} bytes"):
        check_size(Tensor("t", datatype, (2, 3), bytes(6 * nbytes - 1)))


def test_an_unknown_datatype_and_a_negative_size_are_named():
    with pytest.raises(CallerError, match="'FP99'"):
        check_size(Tensor("t", "FP99", (1,), b""))
    with pytest.raises(CallerError, match="negative"):
        check_size(Tensor("t", "FP32", (-1, -1), bytes(4)))

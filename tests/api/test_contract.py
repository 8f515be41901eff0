import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overwinter.api.contract import check_outputs, raw_input
from overwinter.api.reading import Gathered
from overwinter.core.errors import CallerError
from overwinter.core.tensor import BYTES, Tensor, TensorSpec, check_inputs, check_size, pack_bytes

SPECS = (TensorSpec("a", "FP32", ("batch", 3)), TensorSpec("b", "INT64", ("batch", "n")))


def tensor(name: str, datatype: str, *shape: int) -> Tensor:
    return Tensor(name, datatype, shape, b"")


@given(st.integers(0, 5), st.integers(0, 5))
def test_inputs_that_fit_are_accepted(batch: int, n: int) -> None:
    check_inputs([tensor("b", "INT64", batch, n), tensor("a", "FP32", batch, 3)], SPECS)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([tensor("a", "FP32", 2, 3)], "'b' is missing"),
        ([], "'a' is missing"),
        ([tensor("c", "FP32", 2, 3)], "unknown or repeated input 'c'; the inputs are 'a', 'b'"),
        ([tensor("a", "FP32", 2, 3), tensor("a", "FP32", 2, 3)], "repeated input 'a'"),
        ([tensor("a", "FP64", 2, 3)], "'a' is FP32, not FP64"),
        ([tensor("a", "FP32", 2, 4)], r"shape \[2, 4\]; the function takes \['batch', 3\]"),
        ([tensor("a", "FP32", 3)], r"shape \[3\]"),
        ([tensor("a", "FP32", 2, 3), tensor("b", "INT64", 1, 3)], r"'b' has shape \[1, 3\].*'batch' is 2 in input 'a'"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(inputs: list[Tensor], words: str) -> None:
    with pytest.raises(CallerError, match=words):
        check_inputs(inputs, SPECS)


def test_outputs_must_exist() -> None:
    check_outputs({"b": False, "a": True}, False, SPECS)
    with pytest.raises(CallerError, match="unknown output 'c'; the outputs are 'a', 'b'"):
        check_outputs({"c": True}, False, SPECS)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_outputs_of_16_bit_floats_are_refused_as_json(datatype: str) -> None:
    specs = [TensorSpec("y", datatype, (1,))]
    check_outputs({}, True, specs)
    check_outputs({"y": True}, False, specs)
    for wanted in ({}, {"y": False}):
        with pytest.raises(CallerError, match="no JSON form"):
            check_outputs(wanted, False, specs)


@pytest.mark.parametrize(
    ("shape", "nbytes", "expected"),
    [
        ((2, 2), 16, (2, 2)),
        (("batch", 2), 24, (3, 2)),
        ((2, "n"), 24, (2, 3)),
        (("batch", "n"), 12, (1, 3)),
        (("batch", 0), 0, (0, 0)),
        ((), 4, ()),
    ],
)
def test_the_length_of_a_raw_body_determines_a_size_that_is_not_fixed(
    shape: tuple[int | str, ...], nbytes: int, expected: tuple[int, ...]
) -> None:
    made = raw_input(bytes(nbytes), [TensorSpec("x", "FP32", shape)])
    assert (made.name, made.datatype, made.shape, len(made.data)) == ("x", "FP32", expected, nbytes)
    check_size(made)


def test_a_raw_body_of_bytes_is_one_element() -> None:
    made = raw_input(b"hello", [TensorSpec("x", BYTES, ("batch", 1))])
    assert (made.shape, made.data) == ((1, 1), pack_bytes([b"hello"]))


@pytest.mark.parametrize("nbytes", [0, 1, 70_000])
def test_a_raw_body_of_bytes_is_not_copied(nbytes: int) -> None:
    gathered = Gathered(nbytes)
    gathered.add(bytes(range(256)) * (nbytes // 256) + bytes(nbytes % 256))
    body = gathered.view()
    plain = bytes(body)
    tracemalloc.start()
    made = raw_input(body, [TensorSpec("x", BYTES, (1,))])
    assert tracemalloc.get_traced_memory()[1] < 10_000
    tracemalloc.stop()
    check_size(made)
    assert isinstance(made.data, memoryview)
    assert (made.shape, bytes(made.data), made.data.readonly) == ((1,), pack_bytes([plain]), True)
    assert made.data.obj is body.obj
    assert body == plain


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        (SPECS, "one input; this one has 2"),
        ((), "this one has 0"),
        ((TensorSpec("x", BYTES, (2,)),), "one BYTES element"),
        ((TensorSpec("x", "FP32", ("b", "n", "m")),), "does not determine the sizes"),
        ((TensorSpec("x", "FP32", ("b", 2)),), "needs 8 bytes, got 10"),
        ((TensorSpec("x", "FP32", (4,)),), "needs 16 bytes, got 10"),
    ],
)
def test_a_raw_body_that_does_not_fit_the_inputs_is_refused(specs: tuple[TensorSpec, ...], words: str) -> None:
    with pytest.raises(CallerError, match=words):
        raw_input(bytes(10), specs)

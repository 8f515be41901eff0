"""Command-line values become the right inputs, or a clear error."""

import io
import json
from math import inf, isnan
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overwinter.cli.inputs import read_assignments, read_document, shown_number
from overwinter.core.errors import CallerError
from overwinter.core.tensor import TensorSpec

SPECS = {
    "x": TensorSpec("x", "FP32", ("batch", 2)),
    "text": TensorSpec("text", "BYTES", ("batch",)),
    "scalar": TensorSpec("scalar", "INT64", ()),
}


def read(name: str, text: str) -> Any:
    return read_assignments([(name, text)], SPECS)[name]


def document(text: str) -> io.BytesIO:
    file = io.BytesIO(text.encode())
    file.name = "request.json"
    return file


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("x", "[[1, 2], [3, 4]]", [[1, 2], [3, 4]]),
        ("x", "[1, 2]", [[1, 2]]),
        ("x", "1", [[1]]),
        ("x", "[]", [[]]),
        ("scalar", "3", 3),
        ("text", "some words", ["some words"]),
        ("text", '"quoted"', ["quoted"]),
        ("text", '["a", "b"]', ["a", "b"]),
        ("text", "42", ["42"]),
        ("text", "null", ["null"]),
        ("text", "", [""]),
    ],
)
def test_a_literal_becomes_the_value_of_an_input(name: str, text: str, value: object) -> None:
    assert read(name, text) == value


@pytest.mark.parametrize("text", ['["NaN", "-Infinity"]', "[NaN, -Infinity]"])
def test_nan_and_infinities_are_read_with_and_without_quotes(text: str, tmp_path: Path) -> None:
    """With quotes as in the JSON of protocol buffers, without as Python writes them."""
    (tmp_path / "x.json").write_text(text)
    document_of = read_document(document(f'{{"x": {text}}}'), SPECS)
    for value in (read("x", text), read("x", f"@{tmp_path}/x.json"), document_of["x"]):
        [[first, second]] = value
        assert isnan(first)
        assert second == -inf
    assert read("text", '["NaN"]') == ["NaN"]


@given(st.floats())
def test_a_number_that_is_shown_is_read_back(value: float) -> None:
    shown = json.dumps([[shown_number(value), 0.0]], allow_nan=False)
    [[again, _]] = read("x", shown)
    assert again == value or (isnan(again) and isnan(value))


@given(st.lists(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=2), min_size=1))
def test_a_value_of_full_depth_is_left_alone(value: list[list[float]]) -> None:
    assert read("x", repr(value)) == value


def test_json_files_numpy_files_and_other_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[1, 2]")
    assert read("x", f"@{tmp_path}/x.json") == [[1, 2]]
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8")
    assert read("text", f"@{tmp_path}/photo.jpg") == [b"\xff\xd8"]
    numpy.save(tmp_path / "x.npy", numpy.ones(2, dtype="float32"))
    array = read("x", f"@{tmp_path}/x.npy")
    assert (array.shape, array.dtype.name) == ((1, 2), "float32")


def test_an_array_that_would_need_pickle_is_refused(tmp_path: Path) -> None:
    numpy.save(tmp_path / "x.npy", numpy.array([{}]), allow_pickle=True)
    with pytest.raises(CallerError, match="pickle"):
        read("x", f"@{tmp_path}/x.npy")


def _npy(header: bytes) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x05\x06" + bytes(18),
        _npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 1024)}"),
        _npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}"),
        _npy(b"{'descr': __import__('os'), 'fortran_order': False, 'shape': (2,)}"),
        _npy(b"((("),
    ],
)
def test_a_file_that_is_no_array_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(CallerError, match=r"x\.npy"):
        read("x", f"@{tmp_path}/x.npy")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [("y", "1", "unknown input 'y'; the inputs are x, text, scalar"), ("x", "abc", "is FP32, and 'abc' is not JSON")],
)
def test_an_unknown_input_and_text_for_numbers_are_refused(name: str, text: str, words: str) -> None:
    with pytest.raises(CallerError, match=words):
        read(name, text)


def test_a_long_value_that_is_no_json_is_refused_as_such() -> None:
    with pytest.raises(CallerError, match="is not JSON"):
        read("x", "[" + 300 * "1 ")


def test_the_name_of_a_file_without_an_at_sign_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(b"")
    with pytest.raises(CallerError, match=f"write x=@{tmp_path}/x.npy"):
        read("x", f"{tmp_path}/x.npy")


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b"\xff")
    with pytest.raises(CallerError, match="not JSON"):
        read("x", f"@{tmp_path}/x.json")
    (tmp_path / "x.bin").write_bytes(b"1")
    with pytest.raises(CallerError, match=r"must be a \.json or a \.npy file"):
        read("x", f"@{tmp_path}/x.bin")
    with pytest.raises(FileNotFoundError):
        read("x", f"@{tmp_path}/none.json")


def test_an_input_given_twice_is_refused() -> None:
    with pytest.raises(CallerError, match="twice"):
        read_assignments([("scalar", "1"), ("scalar", "2")], SPECS)


def test_a_document_of_values_by_name_is_read() -> None:
    assert read_document(document('{"x": [1, 2], "text": "a", "z": 1}'), SPECS) == {
        "x": [[1, 2]],
        "text": ["a"],
        "z": 1,
    }


def test_a_document_with_a_request_of_the_open_inference_protocol_is_read() -> None:
    request = '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3, 4]}]}'
    assert read_document(document(request), SPECS)["x"].tolist() == [[1, 2], [3, 4]]


def test_a_document_for_an_input_called_inputs_is_read_by_name() -> None:
    specs = {"inputs": TensorSpec("inputs", "INT64", ("batch", 1))}
    assert read_document(document('{"inputs": [3]}'), specs) == {"inputs": [[3]]}


@pytest.mark.parametrize("text", ["[1]", "{", "\ud800".encode("utf-8", "surrogatepass").decode("latin-1")])
def test_a_file_that_is_not_a_json_object_is_refused(text: str) -> None:
    with pytest.raises(CallerError, match=r"request\.json"):
        read_document(document(text), SPECS)

import contextlib
import json
import struct
from collections.abc import Iterator
from itertools import chain
from math import prod
from typing import NoReturn

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overwinter.api import elements
from overwinter.api.steps import STEP_BYTES, Steps, finish
from overwinter.api.writing import ElementWriter
from overwinter.core.datatypes import FORMATS
from overwinter.core.errors import CallerError, TooLargeError
from overwinter.core.tensor import BYTES, ELEMENTS_MAX, Tensor, pack_bytes

LONG = 1 << 16


def parse_elements(name: str, datatype: str, shape: tuple[int, ...], raw: msgspec.Raw) -> bytes:
    return bytes(finish(elements.parse_elements(name, datatype, shape, raw)))


def list_elements(tensor: Tensor) -> list:
    return msgspec.json.decode(finish(ElementWriter(1 << 30, int).write(tensor)))


def elements_of(datatype: str) -> st.SearchStrategy:
    if datatype == BYTES:
        return st.text()
    if datatype == "BOOL":
        return st.booleans()
    if datatype.startswith("FP"):
        return st.floats(allow_nan=False, allow_infinity=False, width=32 if datatype == "FP32" else 64)
    bits = int(datatype.lstrip("UINT"))
    low, high = (0, 2**bits) if datatype[0] == "U" else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    return st.integers(low, high - 1)


def nest(values: list, shape: tuple[int, ...]) -> list:
    for size in reversed(shape[1:]):
        values = [values[at : at + size] for at in range(0, len(values), size)]
    return values


@st.composite
def tensors(draw: st.DrawFn) -> tuple[str, tuple[int, ...], list]:
    datatype = draw(st.sampled_from([*FORMATS, BYTES]))
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    count = prod(shape)
    return datatype, shape, draw(st.lists(elements_of(datatype), min_size=count, max_size=count))


@given(tensors(), st.booleans())
def test_elements_are_unchanged_by_reading_and_writing_json(
    tensor: tuple[str, tuple[int, ...], list], nested: bool
) -> None:
    datatype, shape, values = tensor
    raw = msgspec.Raw(msgspec.json.encode(nest(values, shape) if nested else values))
    data = parse_elements("x", datatype, shape, raw)
    if datatype == BYTES:
        assert data == pack_bytes([value.encode() for value in values])
    else:
        assert data == struct.pack(f"<{len(values)}{FORMATS[datatype]}", *values)
    assert list_elements(Tensor("x", datatype, shape, data)) == values


@given(
    st.sampled_from([*FORMATS, BYTES, "FP16", "nothing"]),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner, max_size=4)
    ),
)
def test_any_json_gives_the_right_bytes_or_a_caller_error(datatype: str, shape: tuple[int, ...], value: object) -> None:
    try:
        data = parse_elements("x", datatype, shape, msgspec.Raw(msgspec.json.encode(value)))
    except CallerError:
        return
    flat = value
    for _ in shape[1:]:
        if flat and isinstance(flat[0], list):
            flat = list(chain.from_iterable(flat))
    assert list_elements(Tensor("x", datatype, shape, data)) == pytest.approx(flat, rel=1e-6, abs=1e-30)


@given(st.sampled_from([*FORMATS, BYTES]), st.lists(st.integers(0, 3), max_size=3).map(tuple), st.binary(max_size=40))
def test_any_bytes_give_bytes_or_a_caller_error(datatype: str, shape: tuple[int, ...], raw: bytes) -> None:
    with contextlib.suppress(CallerError):
        assert isinstance(parse_elements("x", datatype, shape, msgspec.Raw(raw)), bytes)


@pytest.mark.parametrize(
    ("datatype", "shape", "text", "words"),
    [
        ("FP32", (2,), "[1.0]", "1 elements"),
        ("FP32", (2, 2), "[[1,2,3],[4]]", "length is not 2"),
        ("FP32", (2, 2), "[[1,2],[3,4],[5,6]]", "6 elements"),
        ("FP32", (4,), "[[1,2],[3,4]]", "nested 2 deep"),
        ("FP32", (1,), "1.0", "nested 0 deep"),
        ("FP32", (1,), "[1e39]", "range of FP32"),
        ("FP32", (1,), "[true]", "not a list of FP32"),
        ("FP32", (1,), "[NaN]", "not a list of FP32"),
        ("FP32", (1,), '["1"]', "not a list of FP32"),
        ("INT8", (1,), "[128]", "range of INT8"),
        ("UINT64", (1,), "[-1]", "range of UINT64"),
        ("INT64", (1,), "[1.5]", "not a list of INT64"),
        ("BOOL", (1,), "[1]", "not a list of BOOL"),
        ("BYTES", (1,), "[7]", "not a list of BYTES"),
        ("FP16", (1,), "[1.0]", "binary tensor extension"),
        ("BF16", (1,), "[1.0]", "binary tensor extension"),
        ("FLOAT", (1,), "[1.0]", "unknown datatype 'FLOAT'"),
        ("FP32", (1,) * 9, "[" * 9 + "1" + "]" * 9, "at most 8 deep"),
        ("FP32", (1,), "[" * 10_000, "nested 10000 deep"),
    ],
)
def test_the_error_for_an_invalid_list_names_the_input_and_what_is_wrong(
    datatype: str, shape: tuple[int, ...], text: str, words: str
) -> None:
    with pytest.raises(CallerError, match=words) as caught:
        parse_elements("pixels", datatype, shape, msgspec.Raw(text.encode()))
    assert "'pixels'" in str(caught.value)


def test_lists_may_be_spread_over_lines() -> None:
    assert parse_elements("x", "UINT8", (1, 2), msgspec.Raw(b"[\n    [\n        1, 2 ] ]")) == b"\1\2"


def test_a_tensor_of_rank_zero_is_one_flat_element() -> None:
    assert parse_elements("x", "UINT8", (), msgspec.Raw(b"[7]")) == b"\7"


@pytest.mark.parametrize("shape", [(LONG,), (2, LONG // 2), (LONG // 2, 2), (LONG, 1), (4, 8, LONG // 32)])
@pytest.mark.parametrize("datatype", ["BOOL", "UINT8", "INT64", "FP32", "FP64"])
def test_long_json_is_read_in_steps(datatype: str, shape: tuple[int, ...]) -> None:
    values = [index % 2 == 0 for index in range(LONG)] if datatype == "BOOL" else [*range(100)] * (LONG // 100 + 1)
    values = values[:LONG]
    text = msgspec.json.encode(nest(values, shape)).replace(b",", b" ,\n")
    steps = elements.parse_elements("x", datatype, shape, msgspec.Raw(text))
    assert sum(1 for _ in _each(steps)) > len(text) // STEP_BYTES
    assert parse_elements("x", datatype, shape, msgspec.Raw(text)) == struct.pack(
        f"<{LONG}{FORMATS[datatype]}", *values
    )


def _each(steps: Steps[object]) -> Iterator[None]:
    yield from steps


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        (b"[" + b"1," * LONG + b"1]", (LONG,)),
        (b"[" + b"1," * (LONG - 2) + b"1]", (LONG,)),
        (b"[" + b"1," * (LONG - 1) + b"]", (LONG,)),
        (b"[" + b"1," * (LONG - 1) + b"[]]", (LONG,)),
        (b"[" + b"1," * (LONG - 1) + b'"1"]', (LONG,)),
        (b"[" + b"1," * (LONG - 1) + b'"],["]', (LONG,)),
        (b"[" + b"1," * (LONG - 1) + b"1e99]", (LONG,)),
        (b"[" + b"1," * (LONG - 1) + b"null]", (LONG,)),
        (b"[" + b"1," * (LONG - 1) + b"1]", (1 << 62,)),
        (b"[" + b"[1]," * (LONG - 1) + b"[]]", (LONG, 1)),
        (b"[" + b"[]," * (LONG - 1) + b"[1]]", (LONG, 0)),
        (b"[" + b"[1,1]," * (LONG - 1) + b"[1,1,1]]", (LONG, 2)),
        (b"[" + b"[1,1]," * (LONG - 1) + b"[1,1]]", (2, LONG)),
        (b"[" + b" " * LONG + b"1" + b"0" * LONG + b"]", (1,)),
    ],
)
def test_long_json_of_another_shape_is_refused(text: bytes, shape: tuple[int, ...]) -> None:
    with pytest.raises(CallerError, match="'x'"):
        parse_elements("x", "FP32", shape, msgspec.Raw(text))


def test_long_json_without_elements_is_read_as_no_bytes() -> None:
    text = b"[" + b"[]," * (LONG - 1) + b"[]]"
    assert parse_elements("x", "FP32", (LONG, 0), msgspec.Raw(text)) == b""


def test_sizes_after_a_size_of_zero_cost_nothing() -> None:
    text = b"[[[1" + b" " * STEP_BYTES + b",2]]]"
    with pytest.raises(CallerError, match="not nested as"):
        parse_elements("x", "FP32", (2, 0, 1 << 62), msgspec.Raw(text))


@pytest.mark.parametrize("count", [elements.LISTS_MAX + 1, LONG])
@pytest.mark.parametrize("datatype", [BYTES, "INT8", "FP64"])
@pytest.mark.parametrize("depth", [2, 8])
def test_lists_without_elements_are_never_made(
    depth: int, datatype: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object) -> NoReturn:
        raise AssertionError("lists were made")

    monkeypatch.setattr(elements, "_parse_whole", refuse)
    row = b"[" * (depth - 1) + b"]" * (depth - 1)
    text = b"[" + b",".join([row] * count) + b"]"
    assert parse_elements("x", datatype, (count, *(1,) * (depth - 2), 0), msgspec.Raw(text)) == b""
    with pytest.raises(CallerError, match="not nested as"):
        parse_elements("x", datatype, (0,) * depth, msgspec.Raw(text))


def test_brackets_in_strings_are_no_lists() -> None:
    said = '["\\' * (4 * ELEMENTS_MAX)
    assert parse_elements("x", BYTES, (1,), msgspec.Raw(msgspec.json.encode([said]))) == pack_bytes([said.encode()])


@pytest.mark.parametrize("shape", [(LONG,), (2, LONG // 2), (LONG // 2, 2), (LONG, 1), (4, 8, LONG // 32)])
def test_long_strings_are_read_in_steps(shape: tuple[int, ...]) -> None:
    values = ['[{"\\', "\\", "", '"', "\n\0\1\x7f", "ä€😀", "],["] * (LONG // 7 + 1)
    values = values[:LONG]
    text = msgspec.json.encode(nest(values, shape)).replace(b'","', b'" ,\n"')
    steps = elements.parse_elements("x", BYTES, shape, msgspec.Raw(text))
    assert sum(1 for _ in _each(steps)) > len(text) // STEP_BYTES
    packed = pack_bytes([value.encode() for value in values])
    assert parse_elements("x", BYTES, shape, msgspec.Raw(text)) == packed


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        (b"[" + b'"a",' * (LONG - 2) + b'"a"]', (LONG,)),
        (b"[" + b'"a",' * (LONG - 1) + b"]", (LONG,)),
        (b"[" + b'"a",' * (LONG - 1) + b"7]", (LONG,)),
        (b"[" + b'"a",' * (LONG - 1) + b'"a" 7]', (LONG,)),
        (b"[" + b'"a",' * (LONG - 2) + b'"a""a",]', (LONG,)),
        (b"[" + b'"a",' * (LONG - 1) + b'"a"]"', (LONG,)),
        (b"[" + b'"a",' * (LONG - 1) + b'"a\\"]', (LONG,)),
        (b"[" + b'"a",' * (LONG - 1) + b'"\0"]', (LONG,)),
        (b"[" + b'"a",' * (LONG - 1) + b'"\n"]', (LONG,)),
        (b"[" + b'"a",' * (LONG - 1) + b'"\xff"]', (LONG,)),
        (b"[" + b'"a",' * (LONG - 1) + b'"\\ud800"]', (LONG,)),
        (b"[" + b'["a"],' * (LONG - 1) + b"[]]", (LONG, 1)),
        (b"[" + b'["a","a"],' * (LONG // 2 - 1) + b'["a","a"]]', (2, LONG // 2)),
    ],
)
def test_long_strings_of_another_shape_are_refused(text: bytes, shape: tuple[int, ...]) -> None:
    with pytest.raises(CallerError, match="'x'"):
        parse_elements("x", BYTES, shape, msgspec.Raw(text))


SLOW = [1e308, 5e-324, -1.7976931348623157e308, 1e-308, 2.2250738585072011e-308, 1e23, 0.5, 1.0]


@pytest.mark.parametrize("shape", [(16,), (4, 4), (LONG,), (2, LONG // 2)])
@pytest.mark.parametrize("spelt", [(b"e", b"e"), (b"e", b"E"), (b"e+", b"E+00"), (b"e-", b"e-000")])
def test_slow_numbers_are_left_to_the_standard_library(
    shape: tuple[int, ...], spelt: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    decode = elements.decode_slow
    monkeypatch.setattr(elements, "decode_slow", lambda text: (read.append(len(text)), decode(text))[1])
    values = SLOW * (prod(shape) // len(SLOW))
    text = json.dumps(nest(values, shape)).encode().replace(*spelt)
    assert parse_elements("x", "FP64", shape, msgspec.Raw(text)) == struct.pack(f"<{len(values)}d", *values)
    assert sum(read) > len(text) / 2
    assert max(read) <= elements.EXPONENTS_STEP_BYTES + 2


@pytest.mark.parametrize(
    "bad", ["NaN", "Infinity", "-Infinity", "1e400", "true", "null", '"1"', "{}", "01", ".5", "1.", "1_0", "+1", "ä"]
)
def test_slow_numbers_are_read_as_strictly_as_others(bad: str) -> None:
    with pytest.raises(CallerError, match="'x'"):
        parse_elements("x", "FP64", (2,), msgspec.Raw(f"[1e308,{bad}]".encode()))


def test_numbers_with_exponents_are_read_in_small_steps() -> None:
    text = b"[" + b"1e23," * (LONG - 1) + b"1e23]"
    assert sum(1 for _ in _each(elements.parse_elements("x", "FP64", (LONG,), msgspec.Raw(text)))) >= (
        len(text) // elements.EXPONENTS_STEP_BYTES
    )


def test_strings_are_counted_before_they_are_made() -> None:
    many = b"[" + b'"",' * (2 * ELEMENTS_MAX + 1) + b'""]'
    with pytest.raises(TooLargeError, match=str(ELEMENTS_MAX)):
        parse_elements("x", BYTES, (2 * ELEMENTS_MAX + 2,), msgspec.Raw(many))
    with pytest.raises(TooLargeError, match=str(ELEMENTS_MAX)):
        parse_elements("x", BYTES, (1,), msgspec.Raw(many))
    quotes = msgspec.json.encode(['"\\' * (4 * ELEMENTS_MAX)])
    assert parse_elements("x", BYTES, (1,), msgspec.Raw(quotes)) == pack_bytes([b'"\\' * (4 * ELEMENTS_MAX)])

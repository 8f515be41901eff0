import contextlib
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overwinter.api import oip
from overwinter.api.oip import Inference
from overwinter.api.steps import STEP_BYTES, finish
from overwinter.api.writing import ElementWriter
from overwinter.core.errors import CallerError, TooLargeError, WorkerError
from overwinter.core.tensor import BYTES, ELEMENTS_MAX, TENSORS_MAX, Tensor, check_size, pack_bytes

FLOATS = Tensor("f", "FP32", (2,), struct.pack("<2f", 0.5, -1.0))
WORDS = Tensor("w", BYTES, (2,), pack_bytes([b"one", b""]))
HALVES = Tensor("h", "BF16", (3,), b"abcdef")
LISTED = {"f": [0.5, -1.0], "w": ["one", ""]}


def decode_request(body: bytes, head: int | None) -> Inference:
    return finish(oip.decode_request(body, head))


def encode_reply(name: str, version: int, outputs: list[Tensor], inference: Inference) -> tuple[bytes, int | None]:
    """Return the whole answer, and the length of its JSON if bytes of tensors follow it."""
    head, tail = finish(oip.encode_reply(name, version, outputs, inference, ElementWriter(1 << 30, int)))
    return b"".join([head, *tail]), len(head) if tail else None


def body_of(tensors: list[Tensor], binary: list[bool], **more: object) -> tuple[bytes, int]:
    """Return a request and the length of its head."""
    inputs = []
    tail = b""
    for tensor, as_binary in zip(tensors, binary, strict=True):
        entry: dict[str, object] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if as_binary:
            entry["parameters"] = {"binary_data_size": len(tensor.data)}
            tail += bytes(tensor.data)
        else:
            entry["data"] = LISTED[tensor.name]
        inputs.append(entry)
    head = msgspec.json.encode({"inputs": inputs, **more})
    return head + tail, len(head)


def plain(tensors: list[Tensor]) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    return [(tensor.name, tensor.datatype, tensor.shape, bytes(tensor.data)) for tensor in tensors]


@given(st.booleans(), st.booleans())
def test_json_and_binary_inputs_mix(first: bool, second: bool) -> None:
    tensors = [FLOATS, HALVES, WORDS]
    body, head = body_of(tensors, [first, True, second])
    assert plain(decode_request(body, head).inputs) == plain(tensors)


def test_a_body_of_json_alone_needs_no_length() -> None:
    body, head = body_of([FLOATS, WORDS], [False, False], id="seven")
    for given_head in (None, head):
        inference = decode_request(body, given_head)
        assert plain(inference.inputs) == plain([FLOATS, WORDS])
        assert (inference.id, inference.timeout_s, inference.priority) == ("seven", None, 0)


def test_timeouts_are_microseconds() -> None:
    body, _ = body_of([FLOATS], [False], parameters={"timeout": 1_500_000, "priority": 3, "anything": "else"})
    inference = decode_request(body, None)
    assert (inference.timeout_s, inference.priority) == (1.5, 3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"inputs": None}, "inputs"),
        ({"id": 7}, r"\$\.id"),
        ({"parameters": {"timeout": -1}}, "timeout"),
        ({"parameters": {"timeout": "soon"}}, "timeout"),
        ({"parameters": {"priority": -1}}, "priority"),
        ({"parameters": {"sequence_id": 4}}, "sequences are not supported"),
        ({"outputs": [{"name": "y"}, {"name": "y"}]}, "twice"),
        ({"outputs": [{"name": "y", "parameters": {"classification": 3}}]}, "classification"),
        ({"outputs": [{"name": "y", "parameters": {"shared_memory_region": "r"}}]}, "shared memory"),
        ({"outputs": [{"name": "y", "parameters": {"binary_data": 1}}]}, "bool"),
    ],
)
def test_what_is_wrong_with_a_request_is_named(change: dict[str, object], words: str) -> None:
    body = msgspec.json.decode(body_of([FLOATS], [False])[0])
    with pytest.raises(CallerError, match=words):
        decode_request(msgspec.json.encode(body | change), None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shape": [-1]}, "shape"),
        ({"shape": [2**63]}, "shape"),
        ({"shape": [1] * 65}, "shape"),
        ({"shape": [3]}, "has 2 elements"),
        ({"data": None}, "nested 0 deep"),
        ({"parameters": {"binary_data_size": 8}}, "both data and"),
        ({"parameters": {"shared_memory_region": "r"}}, "shared memory"),
    ],
)
def test_what_is_wrong_with_an_input_is_named(change: dict[str, object], words: str) -> None:
    body = msgspec.json.decode(body_of([FLOATS], [False])[0])
    body["inputs"][0] |= change
    with pytest.raises(CallerError, match=words):
        decode_request(msgspec.json.encode(body), None)


@pytest.mark.parametrize(
    ("tail", "binary", "words"),
    [
        ({"binary_data_size": 8}, b"1234567", "has 7 left"),
        ({"binary_data_size": 7}, b"1234567", "needs 8 bytes"),
        ({"binary_data_size": 8}, b"123456789", "1 bytes after"),
        ({"binary_data_size": -8}, b"12345678", "binary_data_size"),
        ({}, b"", "neither data nor"),
    ],
)
def test_binary_sizes_must_be_exact(tail: dict[str, int], binary: bytes, words: str) -> None:
    entry = {"name": "f", "datatype": "FP32", "shape": [2], "parameters": tail}
    head = msgspec.json.encode({"inputs": [entry]})
    with pytest.raises(CallerError, match=words):
        decode_request(head + binary, len(head))


def test_a_binary_input_needs_the_length_of_the_head() -> None:
    entry = {"name": "f", "datatype": "FP32", "shape": [0], "parameters": {"binary_data_size": 0}}
    with pytest.raises(CallerError, match="Inference-Header-Content-Length"):
        decode_request(msgspec.json.encode({"inputs": [entry]}), None)


def test_a_head_longer_than_the_body_is_refused() -> None:
    with pytest.raises(CallerError, match="has 2 bytes"):
        decode_request(b"{}", 3)


def test_deep_nesting_is_the_callers_fault() -> None:
    with pytest.raises(CallerError):
        decode_request(b'{"inputs":' + b"[" * 100_000, None)


@given(st.binary(max_size=200).filter(lambda body: b"inputs" not in body), st.none() | st.integers(0, 250))
def test_bytes_without_inputs_are_no_request(body: bytes, head: int | None) -> None:
    is_short = head is not None and head > len(body)
    words = f"Length is {head}, and the body has {len(body)} bytes" if is_short else "not a valid inference request"
    with pytest.raises(CallerError, match=words):
        decode_request(body, head)


WHOLE, HEAD = body_of([FLOATS, HALVES, WORDS], [False, True, True])
PLACES = st.integers(0, len(WHOLE) - 1) | st.integers(HEAD, len(WHOLE) - 1)


@given(st.dictionaries(PLACES, st.integers(0, 255), min_size=1, max_size=4))
def test_a_damaged_request_is_the_callers_fault_or_has_all_of_its_bytes(changes: dict[int, int]) -> None:
    damaged = bytearray(WHOLE)
    for place, byte in changes.items():
        damaged[place] = byte
    try:
        inputs = decode_request(bytes(damaged), HEAD).inputs
    except CallerError:
        return
    for tensor in inputs:
        check_size(tensor)
    assert b"".join(bytes(tensor.data) for tensor in inputs[1:]) == damaged[HEAD:]


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("first", [None, False, True])
def test_answers_are_binary_where_asked(everything: bool, first: bool | None) -> None:
    wanted = [
        {"name": "w", **({} if first is None else {"parameters": {"binary_data": first}})},
        {"name": "h", "parameters": {"binary_data": True}},
    ]
    body, _ = body_of([FLOATS], [False], id="7", outputs=wanted, parameters={"binary_data_output": everything})
    answer, head = encode_reply("f", 2, [FLOATS, HALVES, WORDS], decode_request(body, None))
    assert head is not None
    binary = everything if first is None else first
    assert msgspec.json.decode(answer[:head]) == {
        "model_name": "f",
        "model_version": "2",
        "id": "7",
        "outputs": [
            {
                "name": "w",
                "datatype": "BYTES",
                "shape": [2],
                **({"parameters": {"binary_data_size": 11}} if binary else {"data": ["one", ""]}),
            },
            {"name": "h", "datatype": "BF16", "shape": [3], "parameters": {"binary_data_size": 6}},
        ],
    }
    assert answer[head:] == (bytes(WORDS.data) if binary else b"") + bytes(HALVES.data)


def test_an_answer_without_binary_is_json_alone() -> None:
    body, _ = body_of([FLOATS], [False])
    answer, head = encode_reply("f", 1, [FLOATS], decode_request(body, None))
    assert head is None
    assert msgspec.json.decode(answer) == {
        "model_name": "f",
        "model_version": "1",
        "outputs": [{"name": "f", "datatype": "FP32", "shape": [2], "data": [0.5, -1.0]}],
    }


def test_an_output_that_the_function_did_not_return_is_an_error_of_the_worker() -> None:
    body, _ = body_of([FLOATS], [False], outputs=[{"name": "h"}])
    with pytest.raises(WorkerError, match="'h'"):
        encode_reply("f", 1, [FLOATS], decode_request(body, None))


@pytest.mark.parametrize(
    "text",
    [
        b'{"inputs":[' + b"{}," * 100_000 + b"{}]}",
        b'{"inputs":[' + b'{"name":"","datatype":"FP32","shape":[]},' * TENSORS_MAX + b"{}]}",
        b'{"inputs":[{"name":"x","datatype":"FP32","shape":[' + b"1," * 1_000_000 + b"1]}]}",
        b'{"inputs":[],"outputs":[' + b'{"name":"' + b"y" * 300 + b'"},' + b'{"name":"y"}]}',
        b'{"inputs":[],"id":"' + b"i" * 2000 + b'"}',
        b'{"inputs":[{"name":"' + b"x" * 2_000_000 + b'","datatype":"FP32","shape":[]}]}',
        b'{"inputs":[' + b'"",' * 1_000_000 + b'""]}',
        b'{"inputs":[],"more":' + b'{"a":' * 500 + b"1" + b"}" * 500 + b',"other":"' + b"{" * 100_000 + b'"' + b"}" * 9,
        b'{"inputs":[],"parameters":{' + b",".join(b'"p%d":{}' % n for n in range(100_000)) + b"}}",
    ],
)  # fmt: skip
def test_a_request_that_is_long_without_elements_is_refused(text: bytes) -> None:
    with pytest.raises(CallerError):
        decode_request(text, None)


def test_texts_may_hold_what_json_is_made_of() -> None:
    text = '{"[{,' * 20_000 + "\\"
    body = msgspec.json.encode({"inputs": [{"name": "t", "datatype": BYTES, "shape": [1], "data": [text]}]})
    assert plain(decode_request(body, None).inputs) == [("t", BYTES, (1,), pack_bytes([text.encode()]))]


@pytest.mark.parametrize(
    ("datatype", "data"), [("FP64", b"1e308"), ("FP64", b"0.25"), ("INT8", b"1"), (BYTES, b'"a word"')]
)
def test_many_short_inputs_are_read_in_steps(datatype: str, data: bytes) -> None:
    count = 20_000 // (len(data) + 1)
    entry = b'{"name":"x","datatype":"%s","shape":[%d],"data":[%s]}'
    entry %= (datatype.encode(), count, b",".join([data] * count))
    body = b'{"inputs":[%s]}' % b",".join([entry] * 16)
    assert sum(1 for _ in oip.decode_request(body, None)) > len(body) // STEP_BYTES


def test_elements_of_all_inputs_together_are_bounded() -> None:
    half = Tensor("w", BYTES, (ELEMENTS_MAX // 2 + 1,), bytes(4 * (ELEMENTS_MAX // 2 + 1)))
    entry = {"name": "w", "datatype": BYTES, "shape": half.shape, "parameters": {"binary_data_size": len(half.data)}}
    for count, fits in ((1, True), (2, False)):
        head = msgspec.json.encode({"inputs": [entry] * count})
        with contextlib.nullcontext() if fits else pytest.raises(TooLargeError, match="elements-max"):
            decode_request(head + half.data * count, len(head))


def test_the_elements_of_all_outputs_share_the_bound_of_json() -> None:
    output = Tensor("y", "FP32", (1000,), bytes(4000))
    with pytest.raises(TooLargeError, match="binary_data"):
        finish(oip.encode_reply("f", 1, [output, output], Inference([]), ElementWriter(6000, int)))

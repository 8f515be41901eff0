"""Answers in JSON are written in short steps, within a limit, and each of their bytes is reserved."""

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overwinter.api import oip
from overwinter.api.budget import Budget, Reservation
from overwinter.api.oip import Inference
from overwinter.api.steps import STEP_BYTES, Steps, finish
from overwinter.api.writing import STEP_ELEMENTS, ElementWriter
from overwinter.core.errors import CallerError, OverloadedError, TooLargeError
from overwinter.core.tensor import BYTES, ELEMENTS_MAX, TENSORS_MAX, Tensor, pack_bytes

LONG = 1 << 16
ESCAPED = 6
"""The bytes of JSON that a control character takes."""


def list_elements(tensor: Tensor, bytes_max: int = 1 << 30) -> list:
    return msgspec.json.decode(finish(ElementWriter(bytes_max, int).write(tensor)))


def strings(*values: bytes) -> Tensor:
    return Tensor("said", BYTES, (len(values),), pack_bytes(list(values)))


class Answer:
    """An answer that is written: the bytes reserved in each of its steps."""

    def __init__(self, *outputs: Tensor, bytes_max: int = 1 << 30) -> None:
        self.reserved = [0]
        steps = oip.encode_reply("f", 1, outputs, Inference([]), ElementWriter(bytes_max, self._grow))
        self.text = self._run(steps)

    def _grow(self, nbytes: int) -> None:
        self.reserved[-1] += nbytes

    def _run(self, steps: Steps[tuple[bytes, list]]) -> bytes:
        while True:
            try:
                next(steps)
            except StopIteration as done:
                return done.value[0]
            self.reserved.append(0)

    def elements(self) -> list:
        return [output["data"] for output in msgspec.json.decode(self.text)["outputs"]]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_json_lacks_are_refused(value: float) -> None:
    with pytest.raises(CallerError, match="binary_data"):
        list_elements(Tensor("y", "FP32", (2,), struct.pack("<2f", 1.0, value)))


def test_large_doubles_whose_sum_overflows_are_not_infinite() -> None:
    values = [1.7e308, 1.7e308]
    assert list_elements(Tensor("y", "FP64", (2,), struct.pack("<2d", *values))) == values


def test_bytes_that_are_not_text_are_refused_in_json() -> None:
    with pytest.raises(CallerError, match="not UTF-8"):
        list_elements(Tensor("y", BYTES, (1,), pack_bytes([b"\xff"])))


def test_long_lists_of_numbers_are_written_in_steps_and_bounded() -> None:
    values = [index / 4 for index in range(LONG)]
    tensor = Tensor("y", "FP64", (LONG,), struct.pack(f"<{LONG}d", *values))
    answer = Answer(tensor)
    assert answer.elements() == [values]
    assert len(answer.reserved) == LONG // STEP_ELEMENTS
    with pytest.raises(TooLargeError, match="binary_data"):
        list_elements(tensor, LONG)
    with pytest.raises(TooLargeError, match="binary_data"):
        list_elements(Tensor("y", "UINT8", (LONG,), b"\xff" * LONG), 2 * LONG)


@pytest.mark.parametrize("character", ["\x01", "a", "é", "€", "😀"])
@pytest.mark.parametrize("prefix", ["", "x", "xx"])
def test_a_long_string_is_written_in_steps_that_reserve_what_it_takes_in_json(character: str, prefix: str) -> None:
    text = prefix + character * (LONG * 10 // len(character.encode()))
    answer = Answer(strings(b"short", text.encode(), b""))
    assert answer.elements() == [["short", text, ""]]
    assert len(answer.reserved) >= 10
    assert max(answer.reserved) <= ESCAPED * STEP_BYTES + 64
    assert sum(answer.reserved) >= len(msgspec.json.encode(text))


def test_a_long_string_that_is_not_text_is_refused() -> None:
    for end in (b"\xff", "é".encode()[:1]):
        with pytest.raises(CallerError, match="not UTF-8"):
            list_elements(strings(b"a" * LONG + end))


def test_many_short_strings_are_written_in_steps() -> None:
    values = [b"%d" % number for number in range(ELEMENTS_MAX)]
    answer = Answer(strings(*values))
    assert answer.elements() == [[value.decode() for value in values]]
    assert len(answer.reserved) >= ELEMENTS_MAX // STEP_ELEMENTS


def test_many_outputs_are_written_in_steps_and_share_the_limit() -> None:
    outputs = [Tensor("y", "INT8", (STEP_ELEMENTS,), b"\x80" * STEP_ELEMENTS)] * TENSORS_MAX
    answer = Answer(*outputs)
    assert answer.elements() == [[-128] * STEP_ELEMENTS] * TENSORS_MAX
    assert len(answer.reserved) == TENSORS_MAX
    with pytest.raises(TooLargeError, match="binary_data"):
        Answer(*outputs, bytes_max=8 << 20)


def test_the_limit_counts_what_strings_take_in_json() -> None:
    tensor = strings(b"\x01" * LONG)
    assert list_elements(tensor, ESCAPED * LONG + 8) == ["\x01" * LONG]
    with pytest.raises(TooLargeError, match="binary_data"):
        list_elements(tensor, ESCAPED * LONG)


def test_short_answers_are_written_in_one_step() -> None:
    half = Tensor("y", "FP32", (STEP_ELEMENTS // 2,), bytes(2 * STEP_ELEMENTS))
    for outputs in ([half, half], [strings(*[b"word"] * 100)], [strings()], []):
        assert len(Answer(*outputs).reserved) == 1


def test_an_answer_is_not_written_beyond_the_memory_of_its_caller() -> None:
    reservation = Reservation(Budget(8 * LONG, 0.5, 1.0), "somebody")
    with pytest.raises((OverloadedError, TooLargeError), match="memory"):
        finish(ElementWriter(1 << 30, reservation.grow).write(strings(b"\x01" * LONG)))
    assert reservation.nbytes <= 4 * LONG


@given(st.lists(st.text()))
def test_strings_are_written_as_they_are(values: list[str]) -> None:
    assert list_elements(strings(*(value.encode() for value in values))) == values

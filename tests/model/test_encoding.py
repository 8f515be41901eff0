"""Programs are decoded in steps of a bounded number of bytes, whatever is in them."""

import sys

import msgspec
import pytest

from overwinter.core.errors import ProgramError
from overwinter.model.encoding import (
    MAX_ALL_TERMS,
    MAX_CALLS,
    MAX_DIMENSIONS,
    MAX_PARTS,
    MAX_TENSORS,
    MAX_VALUES,
    MAX_WEIGHTS,
    SPEC_STEP_BYTES,
    STEP_BYTES,
    decode_program,
    encode_program,
)
from overwinter.model.program import Call, Layer, Slot, Term, Value, Weight
from tests.model.tiny import chain, make_program

SPEC = {"name": "x", "datatype": "FP32", "shape": [4]}


def document(**fields):
    """Return the bytes of a program with these fields, of any types, instead of its own."""
    return msgspec.msgpack.encode(msgspec.msgpack.decode(encode_program(chain())) | fields)


def decode_counting_steps(data):
    """Decode a program; return it and the number of steps."""
    steps = 0

    def count(frame, event, function):
        nonlocal steps
        steps += event == "c_call" and function.__name__ == "decode"

    sys.setprofile(count)
    try:
        program = decode_program(data)
    finally:
        sys.setprofile(None)
    return program, steps


def long_program():
    """Return a program whose calls, values, weights, layers and inputs all take more than one step."""
    count = 10_000
    chained = make_program([Call("aten.cos.default", (Slot(at),), {}, (at + 1,)) for at in range(1, count)])
    return msgspec.structs.replace(
        chained,
        inputs=(msgspec.structs.replace(chained.inputs[0], name="x" * 200),) * 100,
        weights=tuple([Weight(f"layers.{at}.weight", "float32", (4, 4)) for at in range(count)]),
        values=tuple([Value("float32", (Term(4.0, (1,)),), -1, (at, 4)) for at in range(count)]),
        layers=tuple([Layer(f"layers.{at}", at, at + 1, 1 << 40, 0, 0) for at in range(count)]),
    )


def test_a_long_list_is_decoded_entry_by_entry():
    program = long_program()
    lists = (program.inputs, program.weights, program.calls, program.values, program.layers)
    decoded, steps = decode_counting_steps(encode_program(program))
    assert decoded == program
    assert steps >= sum(map(len, lists))


def test_a_short_program_is_decoded_field_by_field():
    assert decode_counting_steps(encode_program(chain()))[1] == len(chain().__struct_fields__)


def test_a_field_that_is_given_twice_is_decoded_once():
    data = bytearray(encode_program(chain()))
    data[0] += 1
    data[1:1] = msgspec.msgpack.encode("calls") + msgspec.msgpack.encode(["no call"] * MAX_CALLS)
    decoded, steps = decode_counting_steps(bytes(data))
    assert decoded == chain()
    assert steps == len(chain().__struct_fields__)


LONG = {
    "inputs": ([SPEC], MAX_TENSORS),
    "outputs": ([SPEC], MAX_TENSORS),
    "weights": ([["w", "float32", [4]]], MAX_WEIGHTS),
    "calls": ([["aten.cos.default", [], {}, []]], MAX_CALLS),
    "values": ([[""]], MAX_VALUES),
    "output_slots": ([0], MAX_TENSORS),
    "layers": ([["", 0, 1, 0, 0, 0]], MAX_CALLS),
}


@pytest.mark.parametrize("field", LONG)
def test_a_list_with_too_many_entries_is_not_decoded(field):
    entries, most = LONG[field]
    with pytest.raises(ProgramError, match=f"{field}: .*{most}"):
        decode_program(document(**{field: [*entries * most, "no entry"]}))


@pytest.mark.parametrize("field", ["dimensions", "example"])
def test_too_many_dimensions_are_not_decoded(field):
    with pytest.raises(ProgramError, match=f"{field}: .*{MAX_DIMENSIONS}"):
        decode_program(document(**{field: {str(number): None for number in range(MAX_DIMENSIONS + 1)}}))


HEAVY = {
    "inputs": (SPEC | {"unknown": [""] * SPEC_STEP_BYTES}, SPEC_STEP_BYTES),
    "outputs": (SPEC | {"unknown": [""] * SPEC_STEP_BYTES}, SPEC_STEP_BYTES),
    "weights": (["w", "float32", [4], [0] * STEP_BYTES], STEP_BYTES),
    "calls": (["aten.cat.default", [[None] * STEP_BYTES], {}, [2]], STEP_BYTES),
    "values": (["float32", [[0, []]] * (STEP_BYTES // 3)], STEP_BYTES),
    "layers": (["x" * STEP_BYTES, 0, 1, 0, 0, 0], STEP_BYTES),
}


@pytest.mark.parametrize("field", HEAVY)
def test_an_entry_of_too_many_bytes_is_not_decoded(field):
    entry, limit = HEAVY[field]
    with pytest.raises(ProgramError, match=f"{field}: entry 0 has .*{limit}"):
        decode_program(document(**{field: [entry]}))


def test_calls_after_too_many_parts_are_not_decoded():
    call = ["aten.cat.default", [[{"k": "s", "n": 1}] * 9_000], {}, [2]]
    with pytest.raises(ProgramError, match=f"calls: .* parts, .*{MAX_PARTS}"):
        decode_program(document(calls=[*[call] * (MAX_PARTS // 9_000 + 1), "no call"]))


def test_values_after_too_many_terms_are_not_decoded():
    value = ["float32", [[1.0, [1]]] * 64]
    with pytest.raises(ProgramError, match=f"values: .* parts, .*{MAX_ALL_TERMS}"):
        decode_program(document(values=[*[value] * (MAX_ALL_TERMS // 64 + 1), "no value"]))

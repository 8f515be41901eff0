"""Decoding of any bytes gives a valid program or a ProgramError."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overwinter.core.errors import ProgramError
from overwinter.core.tensor import TensorSpec
from overwinter.model.compile import compile_program
from overwinter.model.encoding import MAX_ALL_TERMS, MAX_PARTS
from overwinter.model.liveness import peak_activation_bytes
from overwinter.model.program import (
    MAX_TERMS,
    Call,
    Device,
    Dtype,
    Layer,
    MemoryFormat,
    Slot,
    Term,
    Value,
    Weight,
    decode_program,
    encode_program,
    validate,
)
from tests.model.tiny import BATCH_BY_4, chain, make_program


def changed(program, **fields):
    return msgspec.structs.replace(program, **fields)


def with_call(program, index, **fields):
    calls = list(program.calls)
    calls[index] = msgspec.structs.replace(calls[index], **fields)
    return changed(program, calls=tuple(calls))


def test_a_program_is_the_same_after_encoding_and_decoding():
    arguments = (None, True, -3, 0.5, float("inf"), "none", Slot(1), Dtype("int64"), MemoryFormat("channels_last"))
    program = make_program(
        [Call("aten.full.default", ((2, Slot(1)), *arguments, Device()), {"device": Device()}, (2,))]
    )
    assert decode_program(encode_program(program)) == program
    assert encode_program(decode_program(encode_program(program))) == encode_program(program)


def test_valid_program_passes():
    validate(chain())


def test_program_without_calls_is_valid():
    validate(make_program([], outputs=(1,), layers=()))


FAULTS = {
    "version": (lambda p: changed(p, version=99), "format 99"),
    "operator": (lambda p: with_call(p, 0, operator="aten.from_file.default"), "aten.from_file.default"),
    "set_": (lambda p: with_call(p, 0, operator="aten.set_.source_Tensor"), "aten.set_.source_Tensor"),
    "uninitialised": (lambda p: with_call(p, 0, operator="aten.empty.memory_format"), "aten.empty.memory_format"),
    "random": (lambda p: with_call(p, 0, operator="aten.rand.default"), "aten.rand.default"),
    "undefined slot": (lambda p: with_call(p, 0, args=(Slot(3), Slot(0))), "reads slot 3"),
    "negative slot": (lambda p: with_call(p, 0, args=(Slot(-1), Slot(0))), "reads slot -1"),
    "slot in a list": (lambda p: with_call(p, 0, args=((Slot(9),),)), "reads slot 9"),
    "slot in kwargs": (lambda p: with_call(p, 0, kwargs={"alpha": Slot(9)}), "reads slot 9"),
    "freed slot": (lambda p: with_call(p, 0, frees=(2,)), "reads slot 2"),
    "freed twice": (lambda p: with_call(p, 1, frees=(2, 2)), "frees slot 2"),
    "freed weight": (lambda p: with_call(p, 0, frees=(0,)), "frees slot 0"),
    "freed output": (lambda p: with_call(p, 2, frees=(3, 4)), "output slot 4"),
    "wrong result slot": (lambda p: with_call(p, 0, outputs=(7,)), "next free slots"),
    "no result": (lambda p: changed(with_call(p, 2, outputs=()), values=p.values[:2]), "1 to 10000 results"),
    "argument name": (lambda p: with_call(p, 0, kwargs={"a=1, b": 1}), "argument name"),
    "keyword": (lambda p: with_call(p, 0, kwargs={"lambda": 1}), "argument name"),
    "type": (lambda p: with_call(p, 0, kwargs={"dtype": Dtype("__class__")}), "__class__"),
    "memory format": (lambda p: with_call(p, 0, kwargs={"m": MemoryFormat("load")}), "memory format"),
    "text": (lambda p: with_call(p, 0, kwargs={"mode": "a\n"}), "printable"),
    "number": (lambda p: with_call(p, 0, args=(Slot(1), 1 << 63)), "64 bits"),
    "output count": (lambda p: changed(p, output_slots=(4, 4)), "one slot"),
    "output slot": (lambda p: changed(p, output_slots=(3,)), "output slot 3"),
    "value count": (lambda p: changed(p, values=p.values[1:]), "values are described"),
    "value type": (lambda p: changed(p, values=(Value("object"), *p.values[1:])), "unknown type"),
    "value base": (lambda p: changed(p, values=(Value("float32", (), 2), *p.values[1:])), "share memory"),
    "value size": (lambda p: changed(p, values=(Value("float32", (Term(1.0, ()),)), *p.values[1:])), "malformed"),
    "value nan": (
        lambda p: changed(p, values=(Value("bool", (Term(float("nan"), (1,)),)), *p.values[1:])),
        "malformed",
    ),
    "value kind": (lambda p: changed(p, values=(Value("symint"), *p.values[1:])), "cannot give a symint"),
    "weight type": (lambda p: changed(p, weights=(Weight("w", "object", (4,)),)), "unknown type"),
    "weight size": (lambda p: changed(p, weights=(Weight("w", "float32", (-1,)),)), "impossible shape"),
    "weight bytes": (lambda p: changed(p, weights=(Weight("w", "float32", (1 << 40, 2)),)), "impossible shape"),
    "input type": (lambda p: changed(p, inputs=(TensorSpec("x", "BYTES", (1,)),)), "datatype"),
    "input size": (lambda p: changed(p, inputs=(TensorSpec("x", "FP32", ("rows",)),)), "'rows'"),
    "input name": (lambda p: changed(p, inputs=(TensorSpec("", "FP32", (1,)),)), "names"),
    "dimension name": (lambda p: changed(p, dimensions={"a b": (1, 2)}, example={"a b": 1}), "identifier"),
    "dimension range": (lambda p: changed(p, dimensions={"batch": (2, 1)}), "not within"),
    "dimension limit": (lambda p: changed(p, dimensions={"batch": (1, 1 << 41)}), "up to 2199023255552, the limit"),
    "example": (lambda p: changed(p, example={}), "example"),
    "weight order": (lambda p: changed(p, weights=(Weight("w", "float32", (4,), (0, 0)),)), "order does not list"),
    "layer gap": (lambda p: changed(p, layers=(Layer("", 1, 3, 0, 0, 0),)), "does not begin"),
    "layer end": (lambda p: changed(p, layers=(Layer("", 0, 2, 0, 0, 0),)), "cover 2 of 3"),
    "layer count": (lambda p: changed(p, layers=(Layer("", 0, 3, -1, 0, 0),)), "negative"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_named(fault):
    damage, message = FAULTS[fault]
    with pytest.raises(ProgramError, match=message):
        validate(damage(chain()))


def numbers(*calls):
    """Return a program whose first calls compute numbers from the input's size."""
    read = Call("aten.sym_size.int", (Slot(1), 0), {}, (2,))
    shape = Call("aten.full.default", ((Slot(2 + len(calls)),), 1.0), {}, (3 + len(calls),))
    kinds = [Value("symint") for _ in range(len(calls) + 1)]
    return make_program([read, *calls, shape], values=(*kinds, Value("float32", BATCH_BY_4)))


def test_ordinary_calls_may_compute_numbers_from_sizes():
    validate(numbers(Call("operator.mul", (Slot(2), 3), {}, (3,))))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("a", 3), "numbers only"),
        (((1, 2), 3), "numbers only"),
        ((Slot(1), 3), "holds no number"),
        ((None,), "numbers only"),
    ],
)
def test_functions_over_numbers_take_only_numbers(args, message):
    with pytest.raises(ProgramError, match=message):
        validate(numbers(Call("operator.mul", args, {}, (3,))))


def test_numbers_cannot_be_squared_without_end():
    squares = [Call("operator.mul", (Slot(slot), Slot(slot)), {}, (slot + 1,)) for slot in range(2, 40)]
    with pytest.raises(ProgramError, match="bits"):
        validate(numbers(*squares))


REFUSED_ARGUMENTS = {
    "aten.batch_norm.default": (
        (Slot(1), None, None, Slot(0), Slot(0), True, 0.1, 1e-5, False),
        "training must be False",
    ),
    "aten.scaled_dot_product_attention.default": ((Slot(1), Slot(1), Slot(1), None, 0.5), "dropout_p must be 0.0"),
    "aten.instance_norm.default": (
        (Slot(1), None, None, Slot(0), Slot(0), True, 0.1, 1e-5, False),
        "running_mean must be None",
    ),
    "aten.lstm.input": ((Slot(1), (Slot(1),), (Slot(0),), True, 1, 0.5, True, False, False), "train must be False"),
}


@pytest.mark.parametrize("operator", REFUSED_ARGUMENTS)
def test_arguments_that_make_an_operator_random_or_mutating_are_refused(operator):
    args, message = REFUSED_ARGUMENTS[operator]
    with pytest.raises(ProgramError, match=message):
        validate(make_program([Call(operator, args, {}, (2,))]))


@pytest.mark.parametrize("training", [0, None, Slot(0), "False"])
def test_a_required_argument_must_be_the_literal_itself(training):
    args = (Slot(1), None, None, Slot(0), Slot(0), training, 0.1, 1e-5, False)
    with pytest.raises(ProgramError, match="training must be False"):
        validate(make_program([Call("aten.batch_norm.default", args, {}, (2,))]))


WRITES = {
    "weight": [Call("aten.add_.Tensor", (Slot(0), 1), {}, (2,))],
    "input": [Call("aten.relu_.default", (Slot(1),), {}, (2,))],
    "view of a weight": [
        Call("aten.view.default", (Slot(0), (2, 2)), {}, (2,)),
        Call("aten.select.int", (Slot(2), 0, 0), {}, (3,)),
        Call("aten.zero_.default", (Slot(3),), {}, (4,)),
    ],
    "hidden view of a weight": [
        Call("aten.einsum.default", ("i->i", (Slot(0),)), {}, (2,)),
        Call("aten.zero_.default", (Slot(2),), {}, (3,)),
    ],
    "copy into a weight": [Call("aten.copy_.default", (Slot(0), Slot(1)), {}, (2,))],
}


@pytest.mark.parametrize("what", WRITES)
def test_writes_to_weights_and_inputs_are_refused_with_the_operator_named(what):
    with pytest.raises(ProgramError, match=WRITES[what][-1].operator):
        validate(make_program(WRITES[what]))


def test_a_write_whose_target_is_not_the_first_positional_argument_is_refused():
    with pytest.raises(ProgramError, match="first argument"):
        validate(make_program([Call("aten.relu_.default", (), {"self": Slot(0)}, (2,))]))


def test_writes_to_values_that_the_program_computed_are_allowed():
    validate(
        make_program(
            [
                Call("aten.clone.default", (Slot(0),), {}, (2,)),
                Call("aten.select.int", (Slot(2), 0, 0), {}, (3,)),
                Call("aten.copy_.default", (Slot(3), Slot(0)), {}, (4,)),
            ],
            outputs=(2,),
        )
    )


def survives(data):
    """Do everything that a node does with bytes from outside before it runs a program; only ProgramError may be
    raised.
    """
    try:
        program = decode_program(data)
        validate(program)
        peak_activation_bytes(program)
        compile_program(program)
    except ProgramError:
        pass


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_cleanly(data):
    survives(data)


@pytest.mark.parametrize(
    "data", [b"\x91" * 100_000, b"\x81\xa7version" + b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b""]
)
def test_deep_or_oversized_bytes_are_refused_cleanly(data):
    with pytest.raises(ProgramError):
        decode_program(data)


def test_more_parts_of_arguments_than_there_may_be_are_refused():
    call = Call("aten.cat.default", (tuple([None] * 9_000),), {}, (2,))
    many = msgspec.structs.replace(chain(), calls=(call,) * (MAX_PARTS // 9_000 + 1))
    with pytest.raises(ProgramError, match=str(MAX_PARTS)):
        validate(many)


def test_more_terms_of_a_size_than_there_may_be_are_refused():
    values = tuple(msgspec.structs.replace(each, nbytes=each.nbytes * (MAX_TERMS + 1)) for each in chain().values)
    with pytest.raises(ProgramError, match=str(MAX_TERMS)):
        validate(msgspec.structs.replace(chain(), values=values))


def test_more_terms_of_all_sizes_than_there_may_be_are_refused():
    value = msgspec.structs.replace(chain().values[0], nbytes=chain().values[0].nbytes * MAX_TERMS)
    with pytest.raises(ProgramError, match=str(MAX_ALL_TERMS)):
        validate(msgspec.structs.replace(chain(), values=(value,) * (MAX_ALL_TERMS // MAX_TERMS + 1)))


RICH = encode_program(
    msgspec.structs.replace(
        numbers(Call("operator.mul", (Slot(2), 3), {}, (3,)), Call("operator.floordiv", (Slot(3), 2), {}, (4,))),
    )
)
SAMPLES = [RICH, encode_program(chain()), encode_program(make_program(WRITES["view of a weight"]))]


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(SAMPLES),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=6),
    st.integers(0, 2),
)
def test_mutated_bytes_are_refused_cleanly_or_still_valid(sample, changes, kind):
    data = bytearray(sample)
    for place, byte in changes:
        at = int(place * (len(data) - 1))
        match kind:
            case 0:
                data[at] = byte
            case 1:
                del data[at]
            case _:
                data.insert(at, byte)
    survives(bytes(data))


leaves = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=8)
trees = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(SAMPLES), st.data())
def test_programs_with_any_part_replaced_are_refused_cleanly_or_still_valid(sample, data):
    document = msgspec.msgpack.decode(sample)
    place, key = document, data.draw(st.sampled_from(sorted(document)))
    while isinstance(place[key], list | dict) and place[key] and data.draw(st.booleans()):
        inner = place[key]
        keys = sorted(inner) if isinstance(inner, dict) else range(len(inner))
        place, key = inner, data.draw(st.sampled_from(keys))
    place[key] = data.draw(trees)
    survives(msgspec.msgpack.encode(document))

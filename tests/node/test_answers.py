"""The node accepts a worker's answer only if its outputs are as declared and lie in the buffer; otherwise it refuses
all of it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from overwinter.core.datatypes import DATATYPE_BYTES
from overwinter.core.errors import MESSAGE_MAX
from overwinter.core.tensor import BYTES, ELEMENTS_MAX, ELEMENTS_OF_STEP, Tensor, TensorMeta, TensorSpec, pack_bytes
from overwinter.node.answers import ERRORS, AnswerCheck, check_contents, copied_tensors
from overwinter.node.packed_answers import PackedAnswer, Received, decode_outcome
from overwinter.worker.buffer import FIRST_BYTES, SharedBuffer
from overwinter.worker.messages import Answer, Failure, Outputs

SPECS = (TensorSpec("y", "FP32", ("batch", 2)), TensorSpec("said", BYTES, ("n",)))
TEXT = pack_bytes([b"a", b"bc"])
RIGHT = (TensorMeta("y", "FP32", (3, 2), 24), TensorMeta("said", BYTES, (2,), len(TEXT)))


@pytest.fixture(scope="module")
def buffer() -> Iterator[SharedBuffer]:
    made = right_buffer()
    yield made
    made.close()


def right_buffer() -> SharedBuffer:
    """Return a buffer with the contents of RIGHT."""
    made = SharedBuffer.make("test")
    made.view[:24] = bytes(range(24))
    made.view[64 : 64 + len(TEXT)] = TEXT
    return made


def answer(*metas: TensorMeta) -> Answer:
    return Answer(1, (Outputs(metas),))


def outputs_of(specs: Sequence[TensorSpec], result: Answer, buffer: SharedBuffer) -> list[list[Tensor] | Failure]:
    outcomes = AnswerCheck(specs).outcomes_of(result)
    placed = [outcome for outcome in outcomes if not isinstance(outcome, Failure)]
    tensors = copied_tensors(placed, buffer)
    for _ in check_contents(tensors):
        pass
    copied = iter(tensors)
    return [outcome if isinstance(outcome, Failure) else next(copied) for outcome in outcomes]


def test_declared_outputs_are_accepted(buffer: SharedBuffer) -> None:
    [[y, said]] = outputs_of(SPECS, answer(*RIGHT), buffer)
    assert (y.meta, said.meta) == RIGHT
    assert (bytes(y.data), bytes(said.data)) == (bytes(range(24)), TEXT)


def test_elements_of_type_bytes_are_counted_over_all_outputs(buffer: SharedBuffer) -> None:
    two = [TensorSpec(name, BYTES, ("n",)) for name in "ab"]
    half = ELEMENTS_MAX // 2 + 1
    metas = [TensorMeta(name, BYTES, (half,), 4 * half) for name in "ab"]
    with pytest.raises(ValueError, match=f"{ELEMENTS_MAX} elements of BYTES"):
        outputs_of(two, answer(*metas), buffer)


def test_the_elements_of_all_outputs_are_checked_in_steps() -> None:
    few = [Tensor(f"t{number}", BYTES, (ELEMENTS_OF_STEP // 4,), bytes(ELEMENTS_OF_STEP)) for number in range(12)]
    assert len(list(check_contents([few[:5], few[5:]]))) == 3


def test_accepted_outputs_do_not_change_with_the_buffer(buffer: SharedBuffer) -> None:
    [[y, _]] = outputs_of(SPECS, answer(*RIGHT), buffer)
    buffer.view[0] = 99
    assert bytes(y.data) == bytes(range(24))
    buffer.view[0] = 0


Y, TEXTS = RIGHT
LIES = {
    "missing": (Y,),
    "more": (Y, TEXTS, TEXTS),
    "other name": (msgspec.structs.replace(Y, name="z"), TEXTS),
    "other order": (TEXTS, Y),
    "other type": (msgspec.structs.replace(Y, datatype="INT32"), TEXTS),
    "no type": (msgspec.structs.replace(Y, datatype="OBJECT"), TEXTS),
    "other rank": (msgspec.structs.replace(Y, shape=(6,)), TEXTS),
    "other size": (msgspec.structs.replace(Y, shape=(2, 3)), TEXTS),
    "negative sizes": (msgspec.structs.replace(Y, shape=(-3, 2), nbytes=-24), TEXTS),
    "more bytes than elements": (msgspec.structs.replace(Y, nbytes=32), TEXTS),
    "more elements than bytes": (msgspec.structs.replace(Y, shape=(4, 2)), TEXTS),
    "all elements there are": (msgspec.structs.replace(Y, shape=(1 << 62, 2)), TEXTS),
    "all bytes there are": (msgspec.structs.replace(Y, nbytes=1 << 62), TEXTS),
    "more texts": (Y, msgspec.structs.replace(TEXTS, shape=(3,))),
    "fewer texts": (Y, msgspec.structs.replace(TEXTS, shape=(1,))),
    "texts without end": (Y, msgspec.structs.replace(TEXTS, shape=(1 << 62,))),
    "half a text": (Y, msgspec.structs.replace(TEXTS, nbytes=len(TEXT) - 1)),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_answer_unlike_the_declared_outputs_is_refused(buffer: SharedBuffer, lie: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        outputs_of(SPECS, answer(*LIES[lie]), buffer)


def test_an_answer_of_impossible_size_is_not_mapped(buffer: SharedBuffer) -> None:
    wide = TensorMeta("y", "FP32", ((1 << 40) // 8, 2), 1 << 40)
    with pytest.raises(ValueError, match="cannot have"):
        outputs_of(SPECS[:1], answer(wide), buffer)
    assert buffer.nbytes == FIRST_BYTES


def test_a_worker_can_report_only_errors_of_the_caller_of_the_author_and_of_itself(buffer: SharedBuffer) -> None:
    kinds = ["StoreError", "OverloadedError", "NoSpaceError", "NotFoundError", "nonsense", "", *sorted(ERRORS)]
    result = Answer(1, tuple(Failure(kind, "x" * (1 << 16)) for kind in kinds))
    failures = outputs_of(SPECS, result, buffer)
    assert [failure.error for failure in failures] == ["WorkerError"] * 6 + sorted(ERRORS)
    assert all(len(failure.message) == MESSAGE_MAX for failure in failures)


def test_an_answer_is_unpacked_as_it_was_sent(buffer: SharedBuffer) -> None:
    sent = Answer(1, (Outputs(RIGHT), Failure("HandlerError", "none"), Outputs(RIGHT)), 7, 5, True, 0.5, "broken")
    packed = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Received)
    assert isinstance(packed, PackedAnswer)
    check = AnswerCheck(SPECS)
    assert tuple(check.unpacked(each) for each in packed.outcomes) == sent.outcomes
    named = {name: getattr(sent, name) for name in Answer.__struct_fields__ if name != "outcomes"}
    assert {name: getattr(packed, name) for name in PackedAnswer.__struct_fields__ if name != "outcomes"} == named


@pytest.mark.parametrize("metas", [(), RIGHT[:1], RIGHT * 2])
def test_an_outcome_with_another_number_of_tensors_than_declared_is_refused(metas: tuple[TensorMeta, ...]) -> None:
    with pytest.raises(ValueError, match="2 are declared"):
        AnswerCheck(SPECS).unpacked(msgspec.Raw(msgspec.msgpack.encode(Outputs(metas))))
    # Nobody reads the outputs of a worker that is measured.
    check = AnswerCheck((), counted=False)
    assert check.unpacked(msgspec.Raw(msgspec.msgpack.encode(Outputs(metas)))) == Outputs(metas)


ARRAY = b"\xdd" + (1 << 20).to_bytes(4)
"""The head of a list of 2^20 items in msgpack, without the items."""


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        (Outputs, ["Outputs"]),
        (Outputs, ["Outputs", [["y", "FP32"]]]),
        (Received, ["Answer", 1]),
        (Received, ["Measured", 1]),
        (Received, ["PoolCall", 1, "f@1", 0]),
    ],
)
def test_a_long_list_is_refused_before_its_items_are_decoded(kind: Any, head: list) -> None:
    packet = msgspec.msgpack.encode(head)
    innermost = head
    while isinstance(innermost[-1], list):
        innermost = innermost[-1]
    open_ended = msgspec.msgpack.encode(innermost)
    longer = bytes([open_ended[0] + 1]) + open_ended[1:] + ARRAY
    assert packet.endswith(open_ended)
    with pytest.raises(msgspec.ValidationError, match="length"):
        msgspec.msgpack.decode(packet.removesuffix(open_ended) + longer, type=kind)


SIZES = st.one_of(st.integers(-4, 8), st.integers(-(1 << 63), (1 << 63) - 1))
METAS = st.builds(
    TensorMeta,
    st.sampled_from(["y", "said", "", "\x00"]),
    st.sampled_from([*DATATYPE_BYTES, BYTES, "", "FP31"]),
    st.lists(SIZES, max_size=70).map(tuple),
    SIZES,
)
OUTCOMES = st.one_of(st.builds(Failure, st.text(), st.text()), st.builds(Outputs, st.lists(METAS).map(tuple)))


@settings(max_examples=50)
@given(st.lists(OUTCOMES, max_size=3).map(tuple), st.lists(st.one_of(METAS, st.sampled_from(RIGHT))).map(tuple))
@example((), RIGHT)
@example((Failure("HandlerError", "none"),), RIGHT)
@example((Outputs(RIGHT),), RIGHT[:1])
def test_an_answer_is_accepted_as_a_whole_or_refused(outcomes: tuple, metas: tuple) -> None:
    result = Answer(1, (*outcomes, Outputs(metas)))
    outputs = [outcome.metas for outcome in result.outcomes if isinstance(outcome, Outputs)]
    buffer = right_buffer()
    try:
        packed = msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=Received)
        assert tuple(map(decode_outcome, packed.outcomes)) == result.outcomes
        accepted = [each for each in outputs_of(SPECS, result, buffer) if not isinstance(each, Failure)]
    except ValueError:
        assert outputs != [RIGHT]
    else:
        assert [tuple(tensor.meta for tensor in tensors) for tensors in accepted] == outputs
        assert all([meta.name for meta in metas] == ["y", "said"] for metas in outputs)
    finally:
        buffer.close()

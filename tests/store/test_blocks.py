from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overwinter.core.datatypes import DTYPE_BYTES
from overwinter.core.errors import CallerError
from overwinter.core.tensor import RANK_MAX
from overwinter.store.blocks import (
    LENGTH_BYTES,
    MAX_LAYOUT_BYTES,
    WEIGHTS_MAX,
    address_of,
    build_block,
    check_address,
    layout_bytes,
    layout_text,
    name_block,
    parse_layout,
)
from overwinter.store.packing import ALIGNMENT_BYTES, PACK_BYTES, pack, plan_block, weight_bytes
from tests.store.family import Shape, values

small_weights = st.lists(
    st.builds(Shape, st.sampled_from(sorted(DTYPE_BYTES)), st.lists(st.integers(0, 9), max_size=3).map(tuple)),
    min_size=1,
    max_size=20,
)


def parse_block(data):
    """The layout of a whole block file."""
    stop = max(len(data) - LENGTH_BYTES, 0)
    body_stop = stop - layout_bytes(data[stop:], len(data))
    return parse_layout(data[body_stop:stop], body_stop)


@given(small_weights, st.integers(0, 9))
def test_a_block_gives_back_what_it_was_built_from(weights, seed):
    tensors = values(weights, seed)
    for plan in pack(weights):
        data = build_block(plan, tensors)
        found = parse_block(data)
        assert [(piece.dtype, piece.shape) for piece in found.pieces] == [
            (piece.dtype, piece.shape) for piece in plan.pieces
        ]
        for piece, held in zip(plan.pieces, found.pieces, strict=True):
            assert data[held.offset : held.offset + held.nbytes] == tensors[piece.weight]


@given(small_weights, st.integers(0, 9))
def test_the_address_of_a_block_is_the_hash_of_its_file(weights, seed):
    tensors = values(weights, seed)
    for plan in pack(weights):
        data = build_block(plan, tensors)
        block = name_block(plan, tensors)
        assert (block.address, block.nbytes) == (address_of(data), len(data))
        assert [(piece.weight, piece.offset, piece.nbytes) for piece in block.pieces] == [
            (piece.weight, piece.offset, piece.nbytes) for piece in plan.pieces
        ]


@given(small_weights, st.integers(0, 400))
def test_a_cut_block_is_refused_or_fits_its_layout(weights, kept):
    (plan, *_) = pack(weights)
    data = build_block(plan, values(weights, 0))[:kept]
    try:
        found = parse_block(data)
    except CallerError:
        return
    text = layout_text(found)
    assert found.nbytes + len(text) + LENGTH_BYTES == len(data)


@given(st.binary(max_size=200), st.integers(0, 220))
def test_any_bytes_are_parsed_or_refused(body, length):
    data = body + length.to_bytes(LENGTH_BYTES, "little")
    with suppress(CallerError):
        assert parse_block(data).nbytes <= len(body)


@pytest.mark.parametrize(
    "text",
    [
        b"float32[2,3]",
        b"float32[6]\n\n",
        b"float32[6]\nx",
        b"\nfloat32[6]\n",
        b"float32[2,03]\n",
        b"float32[2,-3]\n",
        b"float31[6]\n",
        b"float32[ 6]\n",
        b"float32[7]\n",
        b"\xff[6]\n",
        b"float32[" + b"9" * 5000 + b"]\n",
    ],
)
def test_a_layout_text_that_is_invalid_or_not_canonical_is_refused(text):
    sound = b"float32[6]\n"
    assert parse_block(bytes(24) + sound + len(sound).to_bytes(4, "little")).nbytes == 24
    with pytest.raises(CallerError, match="layout"):
        parse_block(bytes(24) + text + len(text).to_bytes(4, "little"))


def test_the_address_of_a_block_depends_on_dtypes_and_shapes():
    data = [bytes(24)]
    names = {
        name_block(plan_block([(0, shape)]), data).address
        for shape in (Shape("float32", (6,)), Shape("int32", (6,)), Shape("float32", (2, 3)), Shape("float32", (3, 2)))
    }
    assert len(names) == 4


def test_the_address_of_a_block_does_not_depend_on_the_number_of_a_weight_in_its_program():
    weight = Shape("float32", (6,))
    first = name_block(plan_block([(0, weight)]), [bytes(24)])
    other = name_block(plan_block([(1, weight)]), [b"", bytes(24)])
    assert first.address == other.address


def test_buffers_of_any_shape_give_the_same_block():
    weight = Shape("float32", (2, 3))
    flat = bytes(range(24))
    shaped = memoryview(flat).cast("f", (2, 3))
    plan = plan_block([(0, weight)])
    assert build_block(plan, [shaped]) == build_block(plan, [flat])


def test_a_tensor_of_the_wrong_size_is_refused():
    weight = Shape("float32", (6,))
    with pytest.raises(CallerError, match=r"float32 \[6\] needs 24 bytes, got 20"):
        build_block(plan_block([(0, weight)]), [bytes(20)])
    assert weight_bytes(weight) == 24


@pytest.mark.parametrize("text", ["", "a" * 63, "a" * 65, "A" * 64, "a" * 64 + "\n", "../" + "a" * 61, "g" * 64])
def test_what_is_not_an_address_is_refused(text):
    with pytest.raises(CallerError, match="not a block address"):
        check_address(text)


@pytest.mark.parametrize("sizes", [RANK_MAX + 1, 1000, 50_000])
def test_a_layout_with_more_dimensions_than_a_tensor_may_have_is_refused(sizes):
    text = b"uint8[%s]\n" % b",".join([b"999999999999999999"] * sizes)
    with pytest.raises(CallerError, match=f"more than {RANK_MAX} dimensions"):
        parse_block(text + len(text).to_bytes(LENGTH_BYTES, "little"))


def test_a_layout_of_more_weights_than_a_block_may_have_is_refused():
    def block(weights: int) -> bytes:
        text = b"uint8[0]\n" * weights
        return text + len(text).to_bytes(LENGTH_BYTES, "little")

    assert len(parse_block(block(WEIGHTS_MAX)).pieces) == WEIGHTS_MAX
    with pytest.raises(CallerError, match=str(WEIGHTS_MAX)):
        parse_block(block(WEIGHTS_MAX + 1))


def test_a_layout_that_is_longer_than_any_valid_one_is_refused():
    text = b"\n" * (MAX_LAYOUT_BYTES + 1)
    with pytest.raises(CallerError, match="not a block"):
        parse_block(text + len(text).to_bytes(LENGTH_BYTES, "little"))
    weight = Shape("complex128", (1,) * RANK_MAX)
    scalars = plan_block((number, weight) for number in range(PACK_BYTES // ALIGNMENT_BYTES))
    assert len(layout_text(scalars)) < MAX_LAYOUT_BYTES

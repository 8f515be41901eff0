from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overwinter.core.datatypes import DTYPE_BYTES
from overwinter.core.errors import ProgramError
from overwinter.store.packing import (
    ALIGNMENT_BYTES,
    LARGE_BYTES,
    PACK_BYTES,
    SPAN_BYTES,
    aligned,
    pack,
    weight_bytes,
)
from tests.store.family import Shape, base, head_variant, norm_variant

sizes = st.one_of(
    st.integers(0, 300),
    st.integers(0, LARGE_BYTES + 100),
    st.sampled_from([0, 1, 63, 64, 65, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 1, SPAN_BYTES, 2 * SPAN_BYTES]),
    st.integers(LARGE_BYTES, SPAN_BYTES),
)
weights_of_bytes = st.lists(sizes, max_size=120).map(lambda many: [Shape("uint8", (size,)) for size in many])
any_weights = st.lists(
    st.builds(Shape, st.sampled_from(sorted(DTYPE_BYTES)), st.lists(st.integers(0, 40), max_size=4).map(tuple)),
    max_size=60,
)


@given(st.one_of(weights_of_bytes, any_weights))
def test_every_weight_lies_in_exactly_one_block_whole_and_aligned(weights):
    pieces = [piece for plan in pack(weights) for piece in plan.pieces]
    assert sorted(piece.weight for piece in pieces) == list(range(len(weights)))
    for piece in pieces:
        assert (piece.dtype, piece.shape) == weights[piece.weight]
        assert piece.nbytes == weight_bytes(weights[piece.weight])
        assert piece.offset % ALIGNMENT_BYTES == 0


@given(weights_of_bytes)
def test_pieces_of_a_block_follow_each_other_and_fill_it(weights):
    for plan in pack(weights):
        assert plan.pieces[0].offset == 0
        assert plan.pieces[-1].offset + plan.pieces[-1].nbytes == plan.nbytes
        for one, next_one in pairwise(plan.pieces):
            assert next_one.offset == aligned(one.offset + one.nbytes)


@given(weights_of_bytes)
def test_large_weights_are_alone_in_their_blocks_and_packs_are_bounded(weights):
    for plan in pack(weights):
        if any(piece.nbytes >= LARGE_BYTES for piece in plan.pieces):
            assert len(plan.pieces) == 1
            continue
        assert plan.nbytes <= PACK_BYTES
        numbers = [piece.weight for piece in plan.pieces]
        assert numbers == sorted(numbers)
        assert sum(map(weight_bytes, weights[numbers[0] : numbers[-1] + 1])) <= SPAN_BYTES


@given(weights_of_bytes)
def test_a_pack_closes_only_at_a_bound(weights):
    packs = [plan for plan in pack(weights) if plan.pieces[0].nbytes < LARGE_BYTES]
    for one, next_one in pairwise(packs):
        joining = next_one.pieces[0]
        size_with_it = aligned(one.nbytes) + joining.nbytes
        span_with_it = sum(map(weight_bytes, weights[one.pieces[0].weight : joining.weight + 1]))
        assert size_with_it > PACK_BYTES or span_with_it > SPAN_BYTES


@given(weights_of_bytes)
def test_blocks_come_in_first_use_order(weights):
    firsts = [plan.pieces[0].weight for plan in pack(weights)]
    assert firsts == sorted(firsts)


@given(weights_of_bytes)
def test_boundaries_depend_on_sizes_only(weights):
    other = [Shape("int8", (1, weight.shape[0])) for weight in weights]
    spans = [[(piece.weight, piece.offset, piece.nbytes) for piece in plan.pieces] for plan in pack(weights)]
    assert spans == [[(piece.weight, piece.offset, piece.nbytes) for piece in plan.pieces] for plan in pack(other)]


@given(weights_of_bytes, st.lists(sizes, max_size=3), st.lists(sizes, max_size=3))
def test_other_weights_at_the_end_change_no_earlier_block_except_one_pack(weights, head, other_head):
    def untouched(tail):
        every = weights + [Shape("uint8", (size,)) for size in tail]
        return [plan for plan in pack(every) if plan.pieces[-1].weight < len(weights)]

    ours, theirs = untouched(head), untouched(other_head)
    common = {plan.pieces[0].weight: plan for plan in theirs}
    # A pack left open at the end may take in the head or not; every other block is the same in both.
    differing = [plan for plan in ours if common.get(plan.pieces[0].weight) != plan]
    assert len(differing) <= 1
    assert all(piece.nbytes < LARGE_BYTES for plan in differing for piece in plan.pieces)


def test_small_weights_of_a_cnn_share_few_blocks():
    layer = [Shape("float32", (64, 64, 3, 3)), *[Shape("float32", (64,))] * 4, Shape("int64", ())]
    plans = pack(layer * 50)
    assert len([plan for plan in plans if len(plan.pieces) > 1]) <= 3
    assert len(plans) <= 53


@pytest.mark.parametrize(
    ("nbytes", "in_a_pack"), [(1, PACK_BYTES // ALIGNMENT_BYTES), (LARGE_BYTES - 1, 32), (20_000, 52)]
)
def test_a_pack_is_filled_up_to_its_bound_padding_included(nbytes, in_a_pack):
    plans = pack([Shape("uint8", (nbytes,))] * (in_a_pack + 1))
    assert [len(plan.pieces) for plan in plans] == [in_a_pack, 1]


@pytest.mark.parametrize("weight", [Shape("float31", (2,)), Shape("float32", (-1,))])
def test_a_weight_with_an_unknown_dtype_or_a_negative_size_is_refused(weight):
    with pytest.raises(ProgramError, match=r"float31|negative"):
        pack([weight])


@pytest.mark.parametrize("classes", [10, 3, 200])
def test_a_variant_with_another_head_shares_all_but_the_heads_blocks(classes):
    one, other = base(), head_variant("other", seed=1, classes=classes)
    known = {block.address for block in one.manifest.blocks}
    head = {len(one.weights) - 2, len(one.weights) - 1}
    new = [block for block in other.manifest.blocks if block.address not in known]
    assert new
    for block in new:
        assert head & {piece.weight for piece in block.pieces}


def test_a_variant_with_other_norms_shares_every_large_weight():
    one, other = base(), norm_variant("other", seed=1)
    known = {block.address for block in one.manifest.blocks}
    large = [block for block in other.manifest.blocks if block.pieces[0].nbytes >= LARGE_BYTES]
    assert large
    assert all(block.address in known for block in large)
    assert not all(block.address in known for block in other.manifest.blocks)

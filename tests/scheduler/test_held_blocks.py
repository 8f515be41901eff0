"""What a store holds is counted as if it were computed anew from its holders, in whatever order they come and go."""

from hypothesis import given
from hypothesis import strategies as st

from overwinter.scheduler.held_blocks import HeldBlocks

SIZES = {"a": 100, "b": 7, "c": 4096, "d": 1}
NEEDS = st.sets(st.sampled_from(sorted(SIZES))).map(lambda addresses: {a: SIZES[a] for a in sorted(addresses)})


@given(steps=st.lists(st.tuples(st.sampled_from("xyz"), NEEDS), max_size=30))
def test_the_counts_are_those_of_the_present_holders(steps):
    blocks, holding = HeldBlocks(), {}
    for function, sizes in steps:
        if function in holding:
            released = holding.pop(function)
            blocks.release(function, released)
            others = set().union(*holding.values())
            assert set(blocks.remove_unused(set(released))) == released.keys() - others
        else:
            blocks.hold(function, sizes)
            holding[function] = sizes
        held = {address: nbytes for each in holding.values() for address, nbytes in each.items()}
        assert (blocks.sizes, blocks.nbytes) == (held, sum(held.values()))
        assert blocks.references == sum(map(len, holding.values()))
        for address in SIZES:
            holders = [each for each in holding if address in holding[each]]
            assert blocks.holders[address] == len(holders)
            assert blocks.sole_holder(address) == (holders[0] if len(holders) == 1 else None)
        for each in "xyz":
            own = [a for a in holding.get(each, {}) if blocks.sole_holder(a) == each]
            assert blocks.exclusive(each) == sum(SIZES[address] for address in own)

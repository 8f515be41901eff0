"""Blocks in an arena never overlap, none is lost, and consolidation keeps what they hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overwinter.device.arena import Arena
from overwinter.device.cached import CachedAllocator
from overwinter.device.partitioned import PartitionedAllocator
from overwinter.device.partitions import GRANULE_BYTES, rounded

PARTITION = 16 * GRANULE_BYTES
ARENA = 8 * PARTITION
ALLOCATORS = {
    "partitioned": lambda: PartitionedAllocator(ARENA, PARTITION),
    "cached": lambda: CachedAllocator(ARENA),
}
KIB = GRANULE_BYTES // 4

sizes = st.sampled_from([0, 1, KIB, 3 * KIB, 9 * KIB, 12 * KIB, 20 * KIB, 40 * KIB, 64 * KIB, 65 * KIB, 150 * KIB])
BLOCKS = st.lists(sizes, min_size=40, max_size=40).map(
    lambda many: {f"{at:064x}": size for at, size in enumerate(many)}
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("hold"), st.integers(0, 5), st.lists(st.integers(0, 39), min_size=1, max_size=12)),
        st.tuples(st.just("evict"), st.integers(0, 5), st.just([])),
        st.tuples(st.just("consolidate"), st.just(0), st.lists(st.integers(0, 39), max_size=4)),
    ),
    max_size=40,
)


class Memory:
    """What the device's memory would hold: the address of the block in each granule."""

    def __init__(self, arena, blocks):
        self.arena = arena
        self.blocks = blocks
        self.granules = [""] * (ARENA // GRANULE_BYTES)
        self.holders = {}
        self.offsets = {}

    def span(self, address):
        offset, nbytes = self.arena.extent(address)
        assert nbytes == self.blocks[address]
        return slice(offset // GRANULE_BYTES, (offset + rounded(nbytes)) // GRANULE_BYTES)

    def hold(self, holder, wanted):
        before = set().union(*self.holders.values())
        new = self.arena.hold(holder, wanted)
        if new is None:
            return
        assert new == tuple(address for address in wanted if address not in before)
        self.holders.setdefault(holder, set()).update(wanted)
        for address in new:
            span = self.span(address)
            self.granules[span] = [address] * (span.stop - span.start)

    def evict(self, holder):
        gone = self.holders.pop(holder, set())
        kept = set().union(*self.holders.values())
        assert set(self.arena.evict(holder)) == gone - kept

    def consolidate(self, wanted):
        steps = 0
        while moves := self.arena.consolidate(wanted):
            steps += 1
            assert steps <= 2 * ARENA // PARTITION
            self.move(moves)

    def move(self, moves):
        for source, target, nbytes in moves:
            moved = self.granules[source // GRANULE_BYTES : (source + nbytes) // GRANULE_BYTES]
            self.granules[target // GRANULE_BYTES : (target + nbytes) // GRANULE_BYTES] = moved

    def check(self):
        held = set().union(*self.holders.values())
        taken = 0
        for address, nbytes in self.blocks.items():
            assert (address in self.arena.missing({address: nbytes})) == (address not in held)
            if address in held:
                span = self.span(address)
                assert 0 <= span.start < span.stop <= len(self.granules)
                assert set(self.granules[span]) == {address}
                taken += rounded(nbytes)
        assert self.arena.free_bytes == ARENA - taken
        for holder, addresses in self.holders.items():
            offsets = {address: self.arena.extent(address).offset for address in addresses}
            assert self.offsets.setdefault((holder, self.arena.placement_version(holder)), offsets) == offsets


@pytest.mark.parametrize("allocator", ALLOCATORS)
@given(blocks=BLOCKS, steps=STEPS)
def test_blocks_keep_their_bytes_and_all_memory_is_free_at_the_end(allocator, blocks, steps):
    arena = Arena(ALLOCATORS[allocator]())
    memory = Memory(arena, blocks)
    names = list(blocks)
    for step, holder, numbers in steps:
        wanted = {names[at]: blocks[names[at]] for at in numbers}
        match step:
            case "hold":
                memory.hold(f"f{holder}", wanted)
            case "evict":
                memory.evict(f"f{holder}")
            case "consolidate":
                memory.consolidate(wanted)
        memory.check()
    for holder in list(memory.holders):
        memory.evict(holder)
    memory.check()
    assert arena.hold("last", {"f" * 64: ARENA}) == ("f" * 64,)


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_what_does_not_fit_changes_nothing(allocator):
    arena = Arena(ALLOCATORS[allocator]())
    assert arena.hold("a", {"1": PARTITION, "2": ARENA}) is None
    assert arena.free_bytes == ARENA
    assert arena.missing({"1": PARTITION})


def test_a_shared_block_is_freed_with_its_last_holder():
    arena = Arena(PartitionedAllocator(ARENA, PARTITION))
    assert arena.hold("a", {"trunk": 100, "head-a": 10}) == ("trunk", "head-a")
    assert arena.missing({"trunk": 100, "head-b": 10}) == {"head-b": 10}
    assert arena.hold("b", {"trunk": 100, "head-b": 10}) == ("head-b",)
    assert arena.evict("a") == ("head-a",)
    assert set(arena.evict("b")) == {"trunk", "head-b"}


def test_a_function_without_blocks_has_a_placement():
    arena = Arena(PartitionedAllocator(ARENA, PARTITION))
    assert arena.hold("a", {}) == ()
    version = arena.placement_version("a")
    assert arena.hold("b", {"1": 100}) == ("1",)
    assert arena.placement_version("a") == version
    assert arena.evict("a") == ()


def test_the_eviction_of_a_function_frees_whole_partitions():
    allocator = PartitionedAllocator(ARENA, PARTITION)
    arena = Arena(allocator)
    for name in "abcd":
        assert arena.hold(name, {f"{name}{at}": 3 * GRANULE_BYTES for at in range(10)}) is not None
    assert allocator.place([PARTITION]) is None
    for freed, name in enumerate("abcd", start=1):
        arena.evict(name)
        [offset] = allocator.place([2 * freed * PARTITION])
        allocator.free([offset])


def test_blocks_of_the_same_size_are_placed_without_gaps_between_them():
    arena = Arena(PartitionedAllocator(ARENA, PARTITION))
    # Aligned to powers of two, as buddies are, only four of five would fit into a partition.
    assert arena.hold("a", {str(at): 3 * GRANULE_BYTES for at in range(40)}) is not None


def test_blocks_that_fit_only_without_slots_are_placed():
    arena = Arena(PartitionedAllocator(3 * PARTITION, PARTITION))
    # As in MiniLM: the embedding takes adjacent partitions, and slots for the layers would waste what is left.
    sizes = {"embedding": 31, "layer0": 5, "layer1": 5, "head": 3}
    assert arena.hold("a", {name: size * GRANULE_BYTES for name, size in sizes.items()}) is not None


def test_the_blocks_of_a_function_are_placed_one_behind_the_other():
    arena = Arena(PartitionedAllocator(ARENA, PARTITION))
    sizes = {"1": 3, "2": 5, "3": 2}
    assert arena.hold("a", {name: size * GRANULE_BYTES for name, size in sizes.items()}) is not None
    assert [arena.extent(name).offset // GRANULE_BYTES for name in sizes] == [0, 3, 8]


def test_blocks_that_do_not_fit_one_behind_the_other_fill_separate_ranges():
    arena = Arena(PartitionedAllocator(PARTITION, PARTITION))
    sizes = {name: size * GRANULE_BYTES for name, size in {"a": 3, "b": 2, "c": 5, "d": 6}.items()}
    assert arena.hold("all", sizes) is not None
    assert arena.hold("kept", {name: sizes[name] for name in "bd"}) == ()
    assert set(arena.evict("all")) == {"a", "c"}
    blocks = dict.fromkeys("efg", 2 * GRANULE_BYTES)
    assert arena.hold("new", blocks) is not None
    assert arena.free_bytes == 2 * GRANULE_BYTES


def test_a_block_may_take_several_adjacent_chunks():
    arena = Arena(PartitionedAllocator(PARTITION, PARTITION))
    assert arena.hold("a", {"large": 9 * GRANULE_BYTES, "rest": 7 * GRANULE_BYTES}) is not None
    assert arena.free_bytes == 0
    arena.evict("a")
    assert arena.hold("b", {"whole": PARTITION}) is not None


def test_the_rest_behind_the_slots_holds_other_blocks():
    arena = Arena(PartitionedAllocator(2 * PARTITION, PARTITION))
    slots = {f"large{at}": 6 * GRANULE_BYTES for at in range(4)}
    assert arena.hold("a", {**slots, **{f"small{at}": 2 * GRANULE_BYTES for at in range(4)}}) is not None
    assert arena.free_bytes == 0


def test_consolidation_makes_room_for_a_block_of_several_partitions():
    arena = Arena(PartitionedAllocator(ARENA, PARTITION))
    for at in range(8):
        assert arena.hold(f"f{at}", {str(at): 9 * GRANULE_BYTES, f"{at}s": 4 * GRANULE_BYTES}) is not None
    for at in range(8):
        arena.evict(f"f{at}") if at % 2 else arena.hold("kept", {str(at): 9 * GRANULE_BYTES})
    large = {"large": 3 * PARTITION + 1}
    assert arena.hold("large", large) is None
    assert arena.consolidate(large)
    assert arena.hold("large", large) == ("large",)


def test_a_cache_allocates_again_only_for_sizes_that_it_does_not_have():
    allocator = CachedAllocator(ARENA)
    arena = Arena(allocator)
    for _ in range(5):
        assert arena.hold("a", {"1": 5000, "2": 9000}) is not None
        arena.evict("a")
    assert allocator.native_calls == 2
    assert arena.hold("b", {"3": ARENA}) is not None
    assert allocator.native_calls == 5

"""A copy that another process makes of a block in a device's memory has the bytes of that block, or is void."""

import ctypes
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from threading import Event

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overwinter.device.interface import Copy, CopyPath, FoundBlocks
from overwinter.device.link import Link
from overwinter.device.partitioned import PartitionedAllocator
from overwinter.device.partitions import GRANULE_BYTES
from overwinter.device.peer import PeerMemory
from overwinter.device.shared import forbid_writing, shared_memory
from overwinter.device.virtual import VirtualDevice
from overwinter.store.mapping import map_read_only, unmap

PARTITION = 4 * GRANULE_BYTES
MEMORY = 8 * PARTITION
NAMES = tuple(f"{at:064x}" for at in range(12))
SMALL = tuple(f"{at:064x}" for at in range(20, 36))
LARGE = f"{60:064x}"
BLOCKS = {name: (at % 5 + 1) * GRANULE_BYTES - at for at, name in enumerate(NAMES)}
BLOCKS |= dict.fromkeys(SMALL, 2 * GRANULE_BYTES) | {LARGE: 2 * PARTITION}
SETS = st.lists(st.integers(0, len(NAMES) - 1), min_size=1, max_size=4)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("hold"), st.integers(0, 3), SETS),
        st.tuples(st.just("evict"), st.integers(0, 3), st.just([])),
        st.tuples(st.just("find"), st.just(0), SETS),
        st.tuples(st.just("copy"), st.just(0), st.just([])),
    ),
    max_size=40,
)


def mprotect(address, nbytes, protection):
    return ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), protection)


def content(address):
    return torch.full((BLOCKS[address],), int(address, 16) + 1, dtype=torch.uint8)


@contextmanager
def opened(fd):
    """Close a descriptor at the end."""
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def shared(nbytes=MEMORY):
    with opened(shared_memory(nbytes)) as fd:
        device, memory = VirtualDevice("a", PartitionedAllocator(nbytes, PARTITION), fd), PeerMemory(fd)
    with closing(device):
        yield device, memory


def bring(device, holder, wanted):
    """Hold these blocks, and copy their bytes; return whether they fit."""
    new = device.hold(holder, "ada", {address: BLOCKS[address] for address in wanted})
    if new is None:
        return False
    link = Link(1e12, time.perf_counter, time.sleep)
    path = CopyPath(FoundBlocks({address: content(address) for address in new}), link)
    device.copy([Copy(address, 0, BLOCKS[address]) for address in new], [path]).wait()
    return True


def wanted(numbers):
    return {NAMES[at]: BLOCKS[NAMES[at]] for at in numbers}


@given(STEPS)
def test_a_valid_copy_has_the_bytes_of_its_block(steps):
    with shared() as (device, memory):
        lent, copied, held = [], [], {}
        for step, holder, numbers in steps:
            match step:
                case "hold":
                    if bring(device, f"f{holder}", wanted(numbers)):
                        held.setdefault(holder, set()).update(wanted(numbers))
                case "evict":
                    device.evict(f"f{holder}")
                    held.pop(holder, None)
                case "find":
                    found = memory.find(wanted(numbers))
                    assert set(found.blocks) == set(wanted(numbers)) & set().union(*held.values())
                    lent.append(found)
                case "copy":
                    copied += [
                        (found, address, data.clone()) for found in lent for address, data in found.blocks.items()
                    ]
            for found, address, data in copied:
                assert found.has_changed(address) or torch.equal(data, content(address))


def test_copies_of_blocks_that_are_moved_are_void_and_the_blocks_can_be_copied_again():
    with shared() as (device, memory):
        for name in SMALL:
            assert bring(device, name, [name])
        kept = SMALL[::2]
        for name in set(SMALL) - set(kept):
            device.evict(name)
        found = memory.find({name: BLOCKS[name] for name in kept})
        assert set(found.blocks) == set(kept)
        assert bring(device, "large", [LARGE])
        moved = {name for name in kept if found.has_changed(name)}
        assert 0 < len(moved) < len(kept)
        again = memory.find(BLOCKS).blocks
        assert set(again) == {*kept, LARGE}
        assert all(torch.equal(data, content(name)) for name, data in again.items())


def test_a_descriptor_for_reading_gives_no_device_and_the_size_of_the_memory_is_fixed():
    with opened(shared_memory(MEMORY)) as fd, opened(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)) as readable:
        with pytest.raises(PermissionError):
            VirtualDevice("a", PartitionedAllocator(MEMORY, PARTITION), readable)
        PeerMemory(readable)
        for nbytes in (0, 2 * MEMORY):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, nbytes)


def test_more_memory_than_the_machine_has_is_refused():
    with pytest.raises(OSError, match="less memory"):
        shared_memory(1 << 60)


def test_a_process_that_may_read_the_memory_cannot_write_to_it():
    with ExitStack() as stack:
        fd = stack.enter_context(opened(shared_memory(MEMORY)))
        device = stack.enter_context(closing(VirtualDevice("a", PartitionedAllocator(MEMORY, PARTITION), fd)))
        forbid_writing(fd)
        forbid_writing(fd)
        readable = stack.enter_context(opened(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)))
        memory = PeerMemory(readable)
        # The kernel lets every user open it again, also for writing.
        again = stack.enter_context(opened(os.open(f"/proc/self/fd/{readable}", os.O_RDWR)))
        with pytest.raises(PermissionError):
            os.write(again, b"x")
        with pytest.raises(PermissionError):
            mmap.mmap(again, MEMORY)
        address = map_read_only(again, MEMORY)
        stack.callback(unmap, address, MEMORY)
        assert mprotect(address, MEMORY, mmap.PROT_READ | mmap.PROT_WRITE) == -1
        bring(device, "f", NAMES[:2])
        assert torch.equal(memory.find(BLOCKS).blocks[NAMES[1]], content(NAMES[1]))


def test_no_valid_copy_has_a_wrong_byte_while_the_owner_changes_its_memory():
    with shared() as (device, memory), ThreadPoolExecutor(1) as threads:
        enough, rounds = Event(), 0

        def work():
            nonlocal rounds
            while not enough.is_set():
                device.evict(f"f{rounds % 3}")
                bring(device, f"f{rounds % 3}", [NAMES[rounds % 12], NAMES[rounds * 5 % 12]])
                rounds += 1

        owner = threads.submit(work)
        wrong, valid = [], 0
        while not owner.done() and (rounds < 1000 or not valid):
            for address, data in (found := memory.find(BLOCKS)).blocks.items():
                taken = data.clone()
                if not found.has_changed(address):
                    valid += 1
                    wrong += [] if torch.equal(taken, content(address)) else [address]
        enough.set()
        owner.result()
        assert wrong == []

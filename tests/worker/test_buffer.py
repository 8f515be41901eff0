"""A buffer is mapped as far as it is used, its file has a fixed size, and it releases memory between runs."""

import fcntl
import mmap
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overwinter.core.tensor import TensorMeta
from overwinter.worker.buffer import ALIGNMENT, FILE_BYTES, FIRST_BYTES, KEPT_BYTES, LARGE_BYTES, SharedBuffer, offsets


@given(st.lists(st.integers(0, 5000)))
def test_tensors_never_overlap_and_are_aligned(sizes):
    metas = [TensorMeta(str(n), "UINT8", (size,), size) for n, size in enumerate(sizes)]
    *places, stop = offsets(metas)
    assert all(place % ALIGNMENT == 0 for place in places)
    assert all(a + size <= b for a, size, b in zip(places, sizes, [*places, stop][1:], strict=True))


def test_what_one_side_writes_the_other_reads_also_after_growth():
    ours = SharedBuffer.make("test")
    theirs = SharedBuffer.open(os.dup(ours.fd))
    ours.view[:5] = b"first"
    assert bytes(theirs.view[:5]) == b"first"
    ours.grow(FIRST_BYTES * 3)
    ours.view[-4:] = b"last"
    theirs.grow(ours.nbytes)
    assert theirs.nbytes == ours.nbytes
    assert bytes(theirs.view[-4:]) == b"last"
    assert bytes(theirs.view[:5]) == b"first"
    ours.close()
    theirs.close()


@pytest.mark.parametrize("nbytes", [0, 1, LARGE_BYTES, 3 * LARGE_BYTES + 1])
def test_taken_bytes_are_a_copy_of_what_was_put(nbytes):
    buffer = SharedBuffer.make("test")
    data = bytes(range(251)) * (nbytes // 251 + 1)
    buffer.put(64, memoryview(data)[:nbytes])
    assert bytes(buffer.view[64 : 64 + nbytes]) == data[:nbytes]
    taken = buffer.take(64, nbytes)
    buffer.view[64 : 64 + nbytes] = bytes(nbytes)
    assert bytes(taken) == data[:nbytes]
    buffer.close()


def test_a_buffer_takes_no_memory_for_what_was_not_written():
    buffer = SharedBuffer.make("test")
    assert bytes(buffer.take(64 * LARGE_BYTES, 2 * LARGE_BYTES)) == bytes(2 * LARGE_BYTES)
    assert os.fstat(buffer.fd).st_blocks == 0
    buffer.put(FIRST_BYTES, b"x")
    assert os.fstat(buffer.fd).st_blocks * 512 == mmap.PAGESIZE
    buffer.close()


@pytest.mark.parametrize("nbytes", [10, 2 * FILE_BYTES])
def test_no_process_can_change_the_size(nbytes):
    buffer = SharedBuffer.make("test")
    with pytest.raises(PermissionError):
        os.ftruncate(buffer.fd, nbytes)
    buffer.close()


def test_no_process_can_keep_another_from_writing():
    buffer = SharedBuffer.make("test")
    with pytest.raises(PermissionError):
        fcntl.fcntl(buffer.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    buffer.close()


def test_released_memory_is_zero_for_both_processes_and_can_be_written_again():
    ours = SharedBuffer.make("test")
    ours.grow(16 * KEPT_BYTES)
    theirs = SharedBuffer.open(os.dup(ours.fd))
    theirs.grow(16 * KEPT_BYTES)
    ours.view[:] = b"x" * len(ours.view)
    assert os.fstat(ours.fd).st_blocks * 512 == 16 * KEPT_BYTES
    assert len(list(ours.release())) > 1
    assert os.fstat(ours.fd).st_blocks * 512 == KEPT_BYTES
    assert bytes(theirs.view[KEPT_BYTES - 1 : KEPT_BYTES + 1]) == b"x\0"
    theirs.view[-1:] = b"y"
    assert bytes(ours.view[-1:]) == b"y"
    ours.close()
    theirs.close()


def test_a_small_buffer_keeps_its_memory():
    buffer = SharedBuffer.make("test")
    buffer.view[-4:] = b"kept"
    assert not list(buffer.release())
    assert bytes(buffer.view[-4:]) == b"kept"
    buffer.close()


@pytest.mark.parametrize("nbytes", [FILE_BYTES + 1, 1 << 63, 1 << 64, 1 << 300])
def test_growing_a_buffer_beyond_its_file_is_an_os_error(nbytes):
    buffer = SharedBuffer.make("test")
    with pytest.raises(OSError, match="too large"):
        buffer.grow(nbytes)
    buffer.grow(2 * FIRST_BYTES)
    assert len(buffer.view) == 2 * FIRST_BYTES
    buffer.close()

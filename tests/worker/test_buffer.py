"""A buffer grows or is replaced in both of its processes, cannot be shrunk, and releases memory between runs."""

import fcntl
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overwinter.core.tensor import TensorMeta
from overwinter.worker.buffer import ALIGNMENT, FIRST_BYTES, KEPT_BYTES, LARGE_BYTES, SharedBuffer, offsets


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
    theirs.follow(ours.nbytes)
    assert bytes(theirs.view[-4:]) == b"last"
    assert bytes(theirs.view[:5]) == b"first"
    ours.close()
    theirs.close()


def test_what_one_side_writes_to_a_new_file_the_other_reads():
    ours = SharedBuffer.make("test")
    theirs = SharedBuffer.open(os.dup(ours.fd))
    ours.view[:3] = b"old"
    closed = []
    before = ours.fd
    ours.replace(FIRST_BYTES + 1, closed.append)
    assert closed == [before]
    assert ours.nbytes == len(ours.view) == 2 * FIRST_BYTES
    theirs.take_over(os.dup(ours.fd))
    assert theirs.nbytes == ours.nbytes
    assert bytes(theirs.view[:3]) == bytes(3)
    theirs.grow(5 * FIRST_BYTES)
    theirs.view[-4:] = b"last"
    ours.follow(theirs.nbytes)
    assert bytes(ours.view[-4:]) == b"last"
    os.close(before)
    ours.close()
    theirs.close()


def test_a_buffer_that_cannot_be_replaced_keeps_its_file():
    buffer = SharedBuffer.make("test")
    buffer.view[:4] = b"kept"
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="memory"):
        buffer.replace((1 << 63) - 1)
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert bytes(buffer.view[:4]) == b"kept"
    buffer.close()


@pytest.mark.parametrize("nbytes", [0, 1, LARGE_BYTES, 3 * LARGE_BYTES + 1])
def test_what_is_put_is_there_to_be_taken(nbytes):
    buffer = SharedBuffer.make("test")
    buffer.grow(nbytes + 100)
    data = bytes(range(251)) * (nbytes // 251 + 1)
    buffer.put(64, memoryview(data)[:nbytes])
    assert bytes(buffer.view[64 : 64 + nbytes]) == data[:nbytes]
    taken = buffer.take(64, nbytes)
    buffer.view[64 : 64 + nbytes] = bytes(nbytes)
    assert bytes(taken) == data[:nbytes]
    buffer.close()


def test_what_is_not_there_is_not_taken():
    buffer = SharedBuffer.make("test")
    with pytest.raises(ValueError, match="do not fit"):
        buffer.take(0, 2 * LARGE_BYTES)
    buffer.close()


def test_no_process_can_take_the_memory_away():
    buffer = SharedBuffer.make("test")
    with pytest.raises(PermissionError):
        os.ftruncate(buffer.fd, 10)
    buffer.close()


@pytest.mark.parametrize("seal", [fcntl.F_SEAL_GROW, fcntl.F_SEAL_WRITE])
def test_no_process_can_keep_another_from_using_it(seal):
    buffer = SharedBuffer.make("test")
    with pytest.raises(PermissionError):
        fcntl.fcntl(buffer.fd, fcntl.F_ADD_SEALS, seal)
    buffer.close()


def test_memory_that_is_given_back_is_gone_for_both_and_comes_again():
    ours = SharedBuffer.make("test")
    ours.grow(16 * KEPT_BYTES)
    theirs = SharedBuffer.open(os.dup(ours.fd))
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


def test_a_size_that_is_not_there_is_not_believed():
    buffer = SharedBuffer.make("test")
    with pytest.raises(ValueError, match="said to hold"):
        buffer.follow(FIRST_BYTES * 100)
    buffer.close()


@pytest.mark.parametrize("nbytes", [1 << 63, 1 << 64, 1 << 300])
def test_a_size_that_no_file_can_have_is_an_error_of_the_system(nbytes):
    buffer = SharedBuffer.make("test")
    with pytest.raises(OSError, match="too large"):
        buffer.grow(nbytes)
    buffer.grow(2 * FIRST_BYTES)
    assert len(buffer.view) == 2 * FIRST_BYTES
    buffer.close()

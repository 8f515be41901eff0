"""A tray grows under both its processes and can be shrunk by neither."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overwinter.core.tensor import TensorMeta
from overwinter.worker.tray import ALIGNMENT, FIRST_BYTES, Tray, offsets


@given(st.lists(st.integers(0, 5000)))
def test_tensors_never_overlap_and_are_aligned(sizes):
    metas = [TensorMeta(str(n), "UINT8", (size,), size) for n, size in enumerate(sizes)]
    *places, stop = offsets(metas)
    assert all(place % ALIGNMENT == 0 for place in places)
    assert all(a + size <= b for a, size, b in zip(places, sizes, [*places, stop][1:], strict=True))


def test_what_one_side_writes_the_other_reads_also_after_growth():
    ours = Tray.make("test")
    theirs = Tray.open(os.dup(ours.fd))
    ours.view[:5] = b"first"
    assert bytes(theirs.view[:5]) == b"first"
    ours.hold(FIRST_BYTES * 3)
    ours.view[-4:] = b"last"
    theirs.follow(ours.nbytes)
    assert bytes(theirs.view[-4:]) == b"last"
    assert bytes(theirs.view[:5]) == b"first"
    ours.close()
    theirs.close()


def test_nobody_can_take_the_memory_away():
    tray = Tray.make("test")
    with pytest.raises(PermissionError):
        os.ftruncate(tray.fd, 10)
    tray.close()


def test_a_size_that_is_not_there_is_not_believed():
    tray = Tray.make("test")
    with pytest.raises(ValueError, match="said to hold"):
        tray.follow(FIRST_BYTES * 100)
    tray.close()

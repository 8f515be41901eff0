"""Failures for lack of memory are distinguished from other failures, whatever library reports them."""

import errno
import mmap

import pytest
import torch

from overwinter.core.errors import HandlerError
from overwinter.worker.shortage import lacks_memory

MUCH = 1 << 50
"""More than any system has."""


@pytest.mark.parametrize(
    "take",
    [lambda: bytearray(MUCH), lambda: mmap.mmap(-1, MUCH), lambda: torch.empty(MUCH)],
    ids=["heap", "map", "torch"],
)
def test_an_error_of_a_too_large_allocation_is_recognized_as_a_lack_of_memory(take):
    with pytest.raises((MemoryError, OSError, RuntimeError)) as raised:
        take()
    assert lacks_memory(raised.value)
    wrapped = HandlerError("it failed")
    wrapped.__cause__ = raised.value
    assert lacks_memory(wrapped)


def test_another_error_is_not_recognized_as_a_lack_of_memory():
    with pytest.raises(RuntimeError) as raised:
        torch.zeros(2) @ torch.zeros(3)
    assert not any(map(lacks_memory, [raised.value, OSError(errno.EPERM, "no"), ValueError("memory")]))

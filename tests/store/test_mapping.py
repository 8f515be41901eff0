"""A mapped file has the content of the file, whatever its size."""

import ctypes
import os
from pathlib import Path

import pytest

from overwinter.core.errors import StoreError
from overwinter.store.mapping import HUGE_BYTES, collapse_pages, map_read_only, unmap

SIZES = [1, 4096, HUGE_BYTES - 1, HUGE_BYTES, HUGE_BYTES + 4097, 3 * HUGE_BYTES + 5]


@pytest.fixture
def shm():
    path = Path("/dev/shm") / f"overwinter-test-mapping-{os.getpid()}"
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_mapping_has_the_bytes_of_the_file_before_and_after_its_pages_are_collapsed(shm, nbytes):
    content = os.urandom(nbytes)
    shm.write_bytes(content)
    with shm.open("rb") as file:
        address = map_read_only(file.fileno(), nbytes)
        assert ctypes.string_at(address, nbytes) == content
        collapsed = collapse_pages(file.fileno(), nbytes)
        assert ctypes.string_at(address, nbytes) == content
        unmap(address, nbytes)
    assert not (collapsed and nbytes < HUGE_BYTES)
    assert shm.read_bytes() == content


def test_large_files_are_mapped_at_addresses_aligned_for_huge_pages(shm):
    shm.write_bytes(bytes(2 * HUGE_BYTES))
    with shm.open("rb") as file:
        address = map_read_only(file.fileno(), 2 * HUGE_BYTES)
    assert address % HUGE_BYTES == 0
    unmap(address, 2 * HUGE_BYTES)


def test_an_error_says_that_a_file_could_not_be_mapped():
    with pytest.raises(StoreError, match="could not be mapped"):
        map_read_only(-1, 4096)

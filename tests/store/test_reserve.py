"""The reserve file when the disk fails; full_disk.py tests it on a full disk."""

import errno

import pytest

from overwinter.store import reserve as reserve_module
from overwinter.store.reserve import Reserve

NBYTES = 8192


def failing(_path):
    raise OSError(errno.EIO, "the disk fails")


@pytest.mark.parametrize("fault", ["the free space is unknown", "the file cannot be deleted"])
def test_the_space_is_reserved_again_after_it_could_not_be_released(fault, tmp_path, monkeypatch):
    path = tmp_path / "reserve"
    reserve = Reserve(path, NBYTES)
    operations = 0
    with monkeypatch.context() as patched:
        patched.setattr(reserve_module, "free_bytes", failing if "unknown" in fault else lambda _path: 0)
        if "deleted" in fault:
            path.mkdir()
        with reserve.released():
            operations += 1
    if "deleted" in fault:
        path.rmdir()
    with reserve.released():
        operations += 1
    assert path.stat().st_size == NBYTES
    assert operations == 2

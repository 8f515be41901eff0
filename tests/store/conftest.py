"""Repositories, host stores and small disks for the tests of the store."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from overwinter.store.host import HostStore
from overwinter.store.repository import Repository

SMALL_DISK_BYTES = 1 << 20


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    """An empty repository."""
    opened = Repository(tmp_path / "repository")
    yield opened
    opened.close()


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in a tmpfs."""
    path = Path(tempfile.mkdtemp(prefix="overwinter-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def host(memory: Path, repository: Repository) -> HostStore:
    """An empty host store over the repository."""
    return HostStore(memory / "host", repository)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MiB of its own."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small tmpfs needs root")
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_BYTES},mode=700", "tmpfs", str(path)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"mounting a small tmpfs is not allowed here: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)

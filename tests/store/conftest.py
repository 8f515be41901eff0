"""Fixtures: repositories and host stores for the tests of the store."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from overwinter.store.host import HostStore
from overwinter.store.repository import Repository


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    """Yield an empty repository."""
    opened = Repository(tmp_path / "repository")
    yield opened
    opened.close()


@pytest.fixture
def memory() -> Iterator[Path]:
    """Yield a directory in a tmpfs."""
    path = Path(tempfile.mkdtemp(prefix="overwinter-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def host(memory: Path, repository: Repository) -> HostStore:
    """Return an empty host store over the repository."""
    return HostStore(memory / "host", repository)

"""Locks are granted in the order in which callers ask, and nobody holds the repository's lock during a slow wait."""

import fcntl
import os
import stat
import threading
from pathlib import Path

import pytest

from overwinter.store.blocks import address_of
from overwinter.store.locking import Lock
from overwinter.store.repository import Repository
from tests.store.family import missing, put

BLOCK = b"a block"
ADDRESS = address_of(BLOCK)


def is_free(path: Path) -> bool:
    """Whether nobody holds the lock of this file."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def test_shared_holders_hold_the_lock_together_and_it_is_free_after_an_exclusive_one(tmp_path: Path) -> None:
    with Lock(tmp_path).shared():
        with Lock(tmp_path).shared():
            assert not is_free(tmp_path / "lock")
        assert not is_free(tmp_path / "lock")
    with Lock(tmp_path).exclusive():
        assert not is_free(tmp_path / "lock")
    assert is_free(tmp_path / "lock")
    assert is_free(tmp_path / "turn")


def test_a_shared_holder_waits_for_an_exclusive_one_that_asked_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, held = Lock(tmp_path), list[str]()
    waits, flock = threading.Event(), fcntl.flock

    def asking(descriptor: int, kind: int) -> None:
        try:
            flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            waits.set()
            flock(descriptor, kind)

    def hold(kind: str) -> None:
        with getattr(lock, kind)():
            held.append(kind)
        waits.set()

    exclusive, shared = (threading.Thread(target=hold, args=[kind]) for kind in ("exclusive", "shared"))
    monkeypatch.setattr(fcntl, "flock", asking)
    with lock.shared():
        for each in (exclusive, shared):
            each.start()
            assert waits.wait(10)
            waits.clear()
        assert held == []
    for each in (exclusive, shared):
        each.join(10)
    assert held == ["exclusive", "shared"]


def test_a_query_that_waits_for_the_catalog_does_not_hold_the_lock(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch, free = repository._holdings.touch, list[bool]()

    def touching(*arguments: object) -> object:
        free.append(is_free(repository.root / "lock"))
        return touch(*arguments)

    monkeypatch.setattr(repository._holdings, "touch", touching)
    assert missing(repository, [ADDRESS]) == [ADDRESS]
    assert free == [True]


def test_an_upload_that_waits_for_the_disk_does_not_hold_the_lock(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, free = os.fsync, list[bool]()

    def syncing(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            free.append(is_free(repository.root / "lock"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", syncing)
    assert put(repository, ADDRESS, BLOCK)
    assert free == [True]
    assert repository.read(ADDRESS) == BLOCK

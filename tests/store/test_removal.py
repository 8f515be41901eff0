"""Files of dropped blocks are removed by a thread, while the store is used."""

import threading

import pytest

from overwinter.core.errors import NoSpaceError, StoreError
from overwinter.store import host as host_module
from overwinter.store.blocks import address_of
from overwinter.store.disk import free_bytes
from overwinter.store.host import PAGE_BYTES, HostStore
from overwinter.store.hosts import HostStores
from overwinter.store.manifest import Blob
from overwinter.store.removal import Removals
from tests.store.family import names, put, stored

DATA = b"block" * 1000
BLOB = Blob(address_of(DATA), len(DATA))


@pytest.fixture
def removals():
    return Removals()


@pytest.fixture
def host(memory, repository, removals):
    return HostStore(memory / "host", repository, removals=removals)


def in_thread(work):
    results = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    return thread, results


def test_a_dropped_block_cannot_be_used_and_is_removed_later(repository, host, removals):
    put(repository, BLOB.address, DATA)
    host.load([BLOB])
    assert host.begin_drop([BLOB.address, BLOB.address]) == len(DATA)
    assert not host.holds(BLOB.address)
    assert names(host) == {BLOB.address}
    assert removals.sizes == (len(DATA),)
    with pytest.raises(StoreError, match=BLOB.address):
        host.open([BLOB.address])
    removals.remove()
    assert names(host) == set()
    assert removals.sizes == ()
    assert host.begin_drop([BLOB.address]) == 0


def test_a_load_waits_for_the_removal_of_the_same_block(repository, host, removals):
    put(repository, BLOB.address, DATA)
    host.load([BLOB])
    host.begin_drop([BLOB.address])
    thread, added = in_thread(lambda: host.load([BLOB]))
    thread.join(0.05)
    assert thread.is_alive()
    removals.remove()
    thread.join()
    removals.remove()
    assert added == [len(DATA)]
    assert host.holds(BLOB.address)
    assert names(host) == {BLOB.address}


def test_a_load_waits_for_the_room_that_removals_make_in_any_store(repository, memory, monkeypatch):
    first, second, third = stored(repository, 3)
    hosts = HostStores(memory / "hosts", repository)
    shared, own = hosts.store(""), hosts.store("ada")
    shared.load([first])

    def free_bytes(root):
        files = [path for path in hosts.root.glob("**/*") if path.is_file()]
        return 2 * PAGE_BYTES - sum(path.stat().st_blocks * 512 for path in files)

    pages = -(-first.nbytes // PAGE_BYTES)
    assert pages == 2
    monkeypatch.setattr(host_module, "free_bytes", free_bytes)
    shared.begin_drop([first.address])
    assert hosts.capacity_bytes() is None
    with pytest.raises(NoSpaceError):
        own.load([second, third])
    thread, added = in_thread(lambda: own.load([second]))
    thread.join(0.05)
    assert thread.is_alive()
    hosts.removals.remove()
    thread.join()
    assert added == [second.nbytes]
    assert hosts.capacity_bytes() is not None


@pytest.mark.parametrize("begins", ["before", "meanwhile"])
def test_the_capacity_is_unknown_if_a_removal_ends_while_it_is_measured(repository, memory, monkeypatch, begins):
    put(repository, BLOB.address, DATA)
    hosts = HostStores(memory / "hosts", repository)
    host = hosts.store("")
    host.load([BLOB])
    if begins == "before":
        host.begin_drop([BLOB.address])

    def free_bytes_before_the_end(root):
        free = free_bytes(root)
        host.begin_drop([BLOB.address])
        hosts.removals.remove()
        return free

    with monkeypatch.context() as patch:
        patch.setattr("overwinter.store.hosts.free_bytes", free_bytes_before_the_end)
        assert hosts.capacity_bytes() is None
    assert hosts.capacity_bytes() is not None


def test_a_sweep_neither_keeps_nor_counts_what_is_being_removed(repository, host, removals):
    kept, dropped = stored(repository, 2)
    host.load([kept, dropped])
    host.begin_drop([dropped.address])
    assert host.sweep([kept, dropped]).kept == 1
    assert host.resident() == {kept.address: kept.nbytes}
    removals.remove()
    assert names(host) == {kept.address}


def test_a_file_that_cannot_be_removed_does_not_block_a_load(repository, host, removals):
    put(repository, BLOB.address, DATA)
    host.load([BLOB])
    host.begin_drop([BLOB.address])
    path = host.root / BLOB.address
    path.unlink()
    path.mkdir()
    with pytest.raises(OSError):
        removals.remove()
    assert removals.sizes == ()
    path.rmdir()
    assert host.load([BLOB]) == len(DATA)


def test_the_files_after_one_that_cannot_be_removed_are_removed(repository, host, removals):
    blobs = stored(repository, 4)
    host.load(blobs)
    host.begin_drop([blob.address for blob in blobs])
    failing = [host.root / blob.address for blob in blobs[:2]]
    for path in failing:
        path.unlink()
        path.mkdir()
    with pytest.raises(OSError, match=blobs[0].address):
        removals.remove()
    assert removals.sizes == ()
    assert names(host) == set()


def test_closing_the_stores_removes_what_was_dropped(repository, memory):
    put(repository, BLOB.address, DATA)
    hosts = HostStores(memory / "hosts", repository)
    hosts.store("").load([BLOB])
    hosts.store("").begin_drop([BLOB.address])
    hosts.close()
    assert not hosts.root.exists()

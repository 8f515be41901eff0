import errno
import mmap
import os
import shutil
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from overwinter.core.errors import CallerError, NoSpaceError, StoreError
from overwinter.node.memory import directory_memory
from overwinter.store import host as host_module
from overwinter.store.blocks import address_of
from overwinter.store.host import PAGE_BYTES, HostStore, page_bytes
from overwinter.store.hosts import HostStores
from overwinter.store.manifest import Blob
from overwinter.store.mapping import HUGE_BYTES
from overwinter.store.sealing import CHUNK_BYTES
from tests.store.family import Pipes, base, below, cut, fail_reads, flip_bit, head_variant, missing, names, put, stored

DATA = os.urandom(300_000)
BLOB = Blob(address_of(DATA), len(DATA))


@contextmanager
def opened(host, addresses):
    descriptors = host.open(addresses)
    try:
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def test_loaded_blocks_can_be_mapped_and_are_what_was_deployed(repository, host):
    model = base()
    model.deploy(repository)
    blobs = model.manifest.blobs()
    assert host.load(blobs) == sum(blob.nbytes for blob in blobs)
    with opened(host, [blob.address for blob in blobs]) as descriptors:
        for blob, descriptor in zip(blobs, descriptors, strict=True):
            with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as mapped:
                assert mapped[:] == model.files[blob.address]


def test_descriptors_are_read_only_and_not_inherited(repository, host):
    put(repository, BLOB.address, DATA)
    host.load([BLOB])
    with opened(host, [BLOB.address, BLOB.address]) as (one, other):
        assert one != other
        assert not os.get_inheritable(one)
        with pytest.raises(OSError):
            os.write(one, b"x")
        with pytest.raises(PermissionError):
            mmap.mmap(one, 0, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    assert (host.root / BLOB.address).stat().st_mode & 0o777 == 0o444
    assert host.root.stat().st_mode & 0o777 == 0o700


def test_loading_again_adds_only_what_is_missing(repository, host):
    one, other = base(), head_variant("other", seed=1)
    one.deploy(repository)
    sent = other.deploy(repository)
    host.load(one.manifest.blobs())
    assert host.load(one.manifest.blobs()) == 0
    assert host.load(other.manifest.blobs()) == sent
    assert host.load([*one.manifest.blobs(), *other.manifest.blobs()]) == 0


def test_resident_and_occupied_bytes_agree_with_the_files_in_the_tmpfs(repository, host):
    model = base()
    model.deploy(repository)
    blobs = model.manifest.blobs()
    host.load(blobs)
    assert host.resident() == {blob.address: blob.nbytes for blob in blobs}
    for freed in (blobs[1].nbytes, 0):
        states = [path.stat() for path in below(host.root)]
        assert sum(host.resident().values()) == sum(state.st_size for state in states)
        assert host.occupied_bytes == sum(state.st_blocks * 512 for state in states)
        assert host.drop([blobs[1].address, blobs[1].address]) == freed


def test_dropped_blocks_are_gone_but_open_descriptors_keep_their_bytes(repository, host):
    put(repository, BLOB.address, DATA)
    host.load([BLOB])
    with opened(host, [BLOB.address]) as (descriptor,):
        assert host.drop([BLOB.address]) == len(DATA)
        assert names(host) == set()
        assert not host.holds(BLOB.address)
        assert os.pread(descriptor, len(DATA), 0) == DATA
    with pytest.raises(StoreError, match=f"{BLOB.address} is not in the host store.*load"):
        host.open([BLOB.address])
    assert host.load([BLOB]) == len(DATA)


def test_opening_several_blocks_of_which_one_is_absent_opens_none(repository, host):
    blobs = stored(repository, 3)
    host.load(blobs)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(StoreError):
        host.open([*(blob.address for blob in blobs), BLOB.address])
    with pytest.raises(CallerError, match="not a block address"):
        host.open([*(blob.address for blob in blobs), "../../etc/passwd"])
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("at", [0, 1, 299_999])
def test_a_flipped_bit_on_disk_is_found_when_the_block_is_loaded(repository, host, at):
    put(repository, BLOB.address, DATA)
    flip_bit(repository.path(BLOB.address), at)
    with pytest.raises(StoreError, match=f"block {BLOB.address} is damaged on disk.*deploy"):
        host.load([BLOB])
    assert names(host) == set()
    assert host.resident() == {}
    assert missing(repository, [BLOB.address]) == [BLOB.address]
    put(repository, BLOB.address, DATA)
    assert host.load([BLOB]) == len(DATA)


def test_a_block_that_the_disk_cannot_read_can_be_sent_again_and_loaded(repository, host, monkeypatch):
    put(repository, BLOB.address, DATA)
    with monkeypatch.context() as patch:
        fail_reads(patch, repository.path(BLOB.address))
        with pytest.raises(StoreError, match=f"block {BLOB.address} is damaged on disk.*deploy"):
            host.load([BLOB])
    assert (host.verification.damaged_disk, names(host)) == (1, set())
    assert missing(repository, [BLOB.address]) == [BLOB.address]
    put(repository, BLOB.address, DATA)
    assert host.load([BLOB]) == len(DATA)


def test_a_short_file_on_disk_is_found_when_loaded(repository, host):
    put(repository, BLOB.address, DATA)
    cut(repository.path(BLOB.address), 1000)
    with pytest.raises(StoreError, match="damaged"):
        host.load([BLOB])
    assert names(host) == set()
    assert missing(repository, [BLOB.address]) == [BLOB.address]


def test_a_damaged_block_disturbs_no_other(repository, host):
    blobs = stored(repository, 3)
    flip_bit(repository.path(blobs[1].address))
    with pytest.raises(StoreError, match=blobs[1].address):
        host.load(blobs)
    assert host.load([blobs[0], blobs[2]]) == blobs[2].nbytes
    assert names(host) == {blobs[0].address, blobs[2].address}


def test_a_block_that_is_not_in_the_repository_is_named_in_the_error(host):
    with pytest.raises(StoreError, match=f"{BLOB.address} is not in the repository"):
        host.load([BLOB])
    assert names(host) == set()


def test_a_wrong_size_in_the_manifest_is_refused_and_the_block_kept(repository, host):
    put(repository, BLOB.address, DATA)
    for nbytes in (len(DATA) - 1, len(DATA) + 1):
        with pytest.raises(StoreError, match="wrong size"):
            host.load([Blob(BLOB.address, nbytes)])
    assert names(host) == set()
    assert repository.holds(BLOB.address)


def test_a_block_cut_after_its_sealing_is_never_served(repository, host):
    put(repository, BLOB.address, DATA)
    host.load([BLOB])
    cut(host.root / BLOB.address, 4096)
    with pytest.raises(StoreError, match=f"{BLOB.address}.*was truncated.*load"):
        host.open([BLOB.address])
    assert host.load([BLOB]) == len(DATA)
    with opened(host, [BLOB.address]) as (descriptor,):
        assert os.pread(descriptor, len(DATA), 0) == DATA


def refuse_on_full_disk(path, missing_ok=False):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_truncated_block_that_cannot_be_removed_because_the_disk_is_full_can_be_loaded_again(
    repository, host, monkeypatch
):
    put(repository, BLOB.address, DATA)
    host.load([BLOB])
    cut(host.root / BLOB.address, 4096)
    # Some filesystems need space for a removal.
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse_on_full_disk)
        with pytest.raises(StoreError, match="cannot drop blocks .* No space left"):
            host.open([BLOB.address])
    assert host.load([BLOB]) == len(DATA)
    with opened(host, [BLOB.address]) as (descriptor,):
        assert os.pread(descriptor, len(DATA), 0) == DATA


def test_a_damaged_block_that_cannot_be_removed_is_reported_as_damaged(repository, host, monkeypatch):
    put(repository, BLOB.address, DATA)
    host.load([BLOB])
    flip_bit(host.root / BLOB.address)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse_on_full_disk)
        assert not host.verify(BLOB.address)
    assert host.load([BLOB]) == len(DATA)
    assert host.verify(BLOB.address)


def test_a_block_whose_file_was_removed_can_be_loaded_again(repository, host):
    put(repository, BLOB.address, DATA)
    host.load([BLOB])
    (host.root / BLOB.address).unlink()
    with pytest.raises(StoreError, match="load"):
        host.open([BLOB.address])
    assert host.load([BLOB]) == len(DATA)


def test_one_load_brings_all_of_several_blocks_whose_files_were_removed(repository, host):
    blobs = stored(repository, 3)
    host.load(blobs)
    for blob in blobs[:2]:
        (host.root / blob.address).unlink()
    with pytest.raises(StoreError, match="load"):
        host.open([blob.address for blob in blobs])
    assert set(host.resident()) == {blobs[2].address}
    host.load(blobs)
    with opened(host, [blob.address for blob in blobs]) as descriptors:
        assert len(descriptors) == 3


def test_verification_drops_a_block_with_a_flipped_bit(repository, host):
    put(repository, BLOB.address, DATA)
    host.load([BLOB])
    assert host.verify(BLOB.address)
    flip_bit(host.root / BLOB.address)
    assert not host.verify(BLOB.address)
    assert host.resident() == {}
    assert host.load([BLOB]) == len(DATA)
    assert host.verify(BLOB.address)


def test_a_damaged_block_is_dropped_while_another_file_is_being_removed(repository, host, monkeypatch):
    evicted, damaged = stored(repository, 2)
    host.load([evicted, damaged])
    flip_bit(host.root / damaged.address)
    removing, may_end, unlink = threading.Event(), threading.Event(), Path.unlink

    def slow(path, missing_ok=False):
        if path.name == evicted.address:
            removing.set()
            may_end.wait()
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", slow)
    dropping = threading.Thread(target=host.drop, args=([evicted.address],), daemon=True)
    dropping.start()
    removing.wait()
    verifying = threading.Thread(target=host.verify, args=(damaged.address,), daemon=True)
    verifying.start()
    while host.holds(damaged.address):
        time.sleep(0.001)
    may_end.set()
    for thread in (dropping, verifying):
        thread.join(10)
        assert not thread.is_alive()
    assert (host.resident(), names(host)) == ({}, set())


def test_verification_of_a_damaged_block_leaves_the_good_one_that_took_its_place(repository, host):
    put(repository, BLOB.address, DATA)
    host.load([BLOB])
    flip_bit(host.root / BLOB.address)

    def loaded_anew():
        host.drop([BLOB.address])
        host.load([BLOB])

    with pytest.raises(StoreError, match=f"{BLOB.address}.*left"):
        host.verify(BLOB.address, loaded_anew)
    assert host.verification.damaged_memory == 0
    with opened(host, [BLOB.address]) as (descriptor,):
        assert os.pread(descriptor, len(DATA), 0) == DATA


def test_a_block_that_is_loaded_again_while_its_pages_are_collapsed_is_collapsed_again(repository, host, monkeypatch):
    data = bytes(HUGE_BYTES)
    blob = Blob(address_of(data), len(data))
    put(repository, blob.address, data)
    host.load([blob])
    inodes = []

    def collapse(descriptor, nbytes):
        inodes.append(os.fstat(descriptor).st_ino)
        if len(inodes) == 1:
            host.drop([blob.address])
            host.load([blob])
        return True

    monkeypatch.setattr("overwinter.store.host.collapse_pages", collapse)
    assert [host.collapse_pages([blob]) for _ in range(3)] == [1, 1, 0]
    assert inodes[1] == (host.root / blob.address).stat().st_ino


def test_a_sweep_by_a_new_owner_keeps_complete_needed_blocks_and_removes_all_other_files(repository, host):
    live, cut_short, dead = stored(repository, 3)
    host.load([live, cut_short, dead])
    cut(host.root / cut_short.address, 4096)
    (host.root / f"{live.address}.draft").write_bytes(b"half")
    (host.root / "stranger").write_bytes(b"what")
    (host.root / ("e" * 64)).symlink_to("/etc/passwd")
    after = HostStore(host.root, repository)
    assert after.resident() == {}
    swept = after.sweep([live, cut_short, BLOB, Blob("e" * 64, len("/etc/passwd"))])
    assert (swept.kept, swept.files) == (1, 5)
    assert names(after) == {live.address}
    assert after.resident() == {live.address: live.nbytes}
    assert after.verify(live.address)


def test_unverified_blocks_are_those_of_the_given_list_even_if_it_is_empty(repository, memory):
    put(repository, BLOB.address, DATA)
    HostStore(memory / "host", repository).load([BLOB])
    after = HostStore(memory / "host", repository)
    after.sweep([BLOB])
    assert after.unverified([]) == []
    assert after.unverified() == after.unverified([BLOB.address]) == [BLOB.address]


def test_blocks_of_an_earlier_owner_can_be_opened_only_after_they_were_verified(repository, memory):
    put(repository, BLOB.address, DATA)
    HostStore(memory / "host", repository).load([BLOB])
    after = HostStore(memory / "host", repository)
    after.sweep([BLOB])
    with pytest.raises(StoreError, match=BLOB.address):
        after.open([BLOB.address])
    assert after.holds(BLOB.address)
    assert after.verify(BLOB.address)
    [descriptor] = after.open([BLOB.address])
    os.close(descriptor)


def test_blocks_of_an_earlier_owner_are_copied_again_unless_a_sweep_kept_them(repository, host):
    put(repository, BLOB.address, DATA)
    host.load([BLOB])
    flip_bit(host.root / BLOB.address)
    after = HostStore(host.root, repository)
    assert after.load([BLOB]) == len(DATA)
    assert after.verify(BLOB.address)


def test_a_load_of_more_than_the_free_space_of_the_tmpfs_is_refused_before_anything_is_written(
    repository, memory, monkeypatch
):
    blobs = stored(repository, 4, nbytes=PAGE_BYTES + 1)
    host = HostStore(memory / "host", repository)
    monkeypatch.setattr(host_module, "free_bytes", lambda root: 6 * PAGE_BYTES - host.occupied_bytes)
    with pytest.raises(NoSpaceError, match=rf"4 blocks of {8 * PAGE_BYTES} bytes") as result:
        host.load(blobs)
    assert result.value.totals == f"{6 * PAGE_BYTES} bytes on the tmpfs are free for them"
    assert names(host) == set()
    host.load(blobs[:3])
    assert host.occupied_bytes == 6 * PAGE_BYTES
    with pytest.raises(NoSpaceError) as result:
        host.load(blobs)
    assert result.value.totals.startswith("0 bytes on the tmpfs")
    assert names(host) == {blob.address for blob in blobs[:3]}
    host.drop([blobs[0].address])
    assert host.load(blobs[1:]) == blobs[3].nbytes


def test_a_block_that_several_threads_load_is_copied_only_once(memory):
    source = Pipes()
    host = HostStore(memory / "host", source)
    writer = source.pipe(BLOB.address)  # a second `open` of it would be a KeyError
    added: list[int] = []
    threads = [threading.Thread(target=lambda: added.append(host.load([BLOB])), daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    with open(writer, "wb") as file:
        file.write(DATA)
    for thread in threads:
        thread.join()
    assert sorted(added) == [0, 0, len(DATA)]
    assert names(host) == {BLOB.address}


def test_an_interrupted_load_leaves_no_partial_block_and_the_next_load_continues_from_there(repository, host):
    blobs = stored(repository, 3, nbytes=CHUNK_BYTES + 1)
    pauses = iter([None] * 3)
    with pytest.raises(StopIteration):
        # Each block has two chunks, so the load ends within the second block.
        host.load(blobs, lambda: next(pauses))
    assert names(host) == {blobs[0].address}
    assert not host.is_copying
    assert host.load(blobs) == sum(blob.nbytes for blob in blobs[1:])


def test_a_load_that_ends_does_not_end_the_claim_of_another_load_on_a_block_dropped_meanwhile(repository, host):
    blobs = stored(repository, 2, nbytes=CHUNK_BYTES - 1)
    claimed, may_copy = threading.Event(), threading.Event()
    added: list[int] = []

    def copying() -> None:
        claimed.set()
        assert may_copy.wait(60)

    second = threading.Thread(target=lambda: added.append(host.load(blobs[:1], copying)), daemon=True)

    def drop_the_first() -> None:
        if host.holds(blobs[0].address):
            host.drop([blobs[0].address])
            second.start()
            assert claimed.wait(60)

    assert host.load(blobs, drop_the_first) == sum(blob.nbytes for blob in blobs)
    assert host.is_copying
    may_copy.set()
    second.join()
    assert added == [blobs[0].nbytes]
    assert not host.is_copying


@pytest.mark.parametrize("spare_pages", [0, 1])
def test_room_claimed_by_a_copy_in_progress_is_not_given_twice(memory, monkeypatch, spare_pages):
    source = Pipes()
    host = HostStore(memory / "host", source)
    total = page_bytes(len(DATA)) + spare_pages * PAGE_BYTES

    def free_bytes(root):
        return total - sum(page_bytes(file.stat().st_size) for file in root.iterdir())

    monkeypatch.setattr(host_module, "free_bytes", free_bytes)
    writer = source.pipe(BLOB.address)
    thread = threading.Thread(target=host.load, args=([BLOB],), daemon=True)
    thread.start()
    with open(writer, "wb", buffering=0) as file:
        file.write(DATA[:200_000])
        while host._claimed[BLOB.address] > len(DATA) - 200_000:
            time.sleep(0.001)
        small = Blob(address_of(b"x"), 1)
        if spare_pages:
            with open(source.pipe(small.address), "wb", buffering=0) as other:
                other.write(b"x")
            assert host.load([small]) == 1
        else:
            with pytest.raises(NoSpaceError) as result:
                host.load([small])
            assert result.value.totals.startswith("0 bytes on the tmpfs")
        file.write(DATA[200_000:])
    thread.join()
    assert host.resident() == {BLOB.address: len(DATA)} | ({small.address: 1} if spare_pages else {})


def test_a_thread_that_waited_for_a_failed_copy_tries_again_and_gets_the_error_of_its_own_attempt(memory):
    class FailsOnce(Pipes):
        def open(self, address):
            if address in self.readers:
                return self.readers.pop(address)
            raise StoreError("the second owner finds it gone")

    source = FailsOnce()
    host = HostStore(memory / "host", source)
    writer = source.pipe(BLOB.address)
    said: list[str] = []

    def load() -> None:
        try:
            host.load([BLOB])
        except StoreError as error:
            said.append(str(error))

    threads = [threading.Thread(target=load, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    with open(writer, "wb") as file:
        file.write(DATA[:-1])
    for thread in threads:
        thread.join()
    assert len(said) == 2
    assert any("damaged" in text for text in said)
    assert any("finds it gone" in text for text in said)
    assert names(host) == set()
    assert host.resident() == {}


def test_threads_may_load_overlapping_models_at_the_same_time(repository, host):
    blobs = stored(repository, 30)
    barrier = threading.Barrier(4)
    added: list[int] = []

    def load(offset: int) -> None:
        barrier.wait()
        added.append(host.load(blobs[offset:] + blobs[:offset]))

    threads = [threading.Thread(target=load, args=(offset,), daemon=True) for offset in (0, 7, 15, 29)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(added) == sum(blob.nbytes for blob in blobs)
    assert names(host) == {blob.address for blob in blobs}


def test_a_sweep_spares_what_is_being_copied(memory):
    source = Pipes()
    host = HostStore(memory / "host", source)
    writer = source.pipe(BLOB.address)
    thread = threading.Thread(target=host.load, args=([BLOB],), daemon=True)
    thread.start()
    with open(writer, "wb", buffering=0) as file:
        # More than the capacity of a pipe: when this returns, the copy has begun.
        file.write(DATA[:200_000])
        assert host.sweep([BLOB]).files == 0
        file.write(DATA[200_000:])
    thread.join()
    assert host.resident() == {BLOB.address: len(DATA)}


@pytest.mark.parametrize(("nbytes", "pages"), [(0, 0), (1, 1), (PAGE_BYTES, 1), (PAGE_BYTES + 1, 2)])
def test_a_file_takes_whole_pages(nbytes, pages):
    assert page_bytes(nbytes) == pages * PAGE_BYTES


@pytest.mark.parametrize("name", ["", "ada"])
def test_a_directory_that_somebody_removed_is_made_again(memory, repository, name):
    put(repository, BLOB.address, DATA)
    hosts = HostStores(memory / "host", repository)
    host = hosts.store(name)
    host.load([BLOB])
    shutil.rmtree(hosts.root)
    assert directory_memory(host.root) == {}
    with pytest.raises(StoreError, match=BLOB.address):
        host.open([BLOB.address])
    old = os.umask(0o022)
    try:
        assert host.load([BLOB]) == len(DATA)
    finally:
        os.umask(old)
    with opened(host, [BLOB.address]) as (descriptor,):
        assert os.pread(descriptor, len(DATA), 0) == DATA
    assert {directory.stat().st_mode & 0o777 for directory in (hosts.root, host.root)} == {0o700}
    shutil.rmtree(hosts.root)
    hosts.close()
    assert not hosts.root.exists()


@pytest.mark.parametrize("name", ["", "ada"])
def test_a_link_or_a_directory_of_another_user_is_not_used(memory, repository, name):
    hosts = HostStores(memory / "host", repository)
    root = hosts.store(name).root
    shutil.rmtree(hosts.root)
    target = memory / "target"
    target.mkdir()
    (target / "file").write_bytes(b"kept")
    hosts.root.symlink_to(target)
    for use in (lambda: HostStores(memory / "host", repository), lambda: hosts.store(name).load([BLOB])):
        with pytest.raises(StoreError, match="another user"):
            use()
    assert os.listdir(target) == ["file"]
    hosts.root.unlink()
    root.mkdir(parents=True)
    root.chmod(0o777)
    put(repository, BLOB.address, DATA)
    hosts.store(name).load([BLOB])
    assert root.stat().st_mode & 0o777 == 0o700
    hosts.root.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(hosts.root, 12345, 12345)
        with pytest.raises(StoreError, match="another user"):
            HostStores(memory / "host", repository)


@pytest.mark.parametrize("same", [True, False])
def test_a_load_that_waits_for_a_removal_can_be_ended(repository, host, monkeypatch, same):
    first, second = stored(repository, 2, nbytes=PAGE_BYTES)
    host.load([first])
    host.begin_drop([first.address])
    monkeypatch.setattr(host_module, "free_bytes", lambda root: 0)
    waited = iter([None, None])
    with pytest.raises(StopIteration):
        host.load([first if same else second], lambda: next(waited))
    host.drop([first.address])


def test_a_block_whose_memory_cannot_be_read_is_dropped(repository, host, monkeypatch):
    put(repository, BLOB.address, DATA)
    host.load([BLOB])
    with monkeypatch.context() as patch:
        fail_reads(patch, host.root / BLOB.address)
        assert not host.verify(BLOB.address)
    assert host.resident() == {}
    assert host.verification.damaged_memory == 1
    assert host.load([BLOB]) == len(DATA)

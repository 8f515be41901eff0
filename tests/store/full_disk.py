"""Behaviour on a full disk. test_full_disk.py runs this file where mounting a disk needs no privileges."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from overwinter.core.errors import NoSpaceError
from overwinter.store.blocks import address_of
from overwinter.store.host import HostStore
from overwinter.store.manifest import Blob, Block
from overwinter.store.repository import Repository
from overwinter.store.reserve import Reserve
from tests.store.family import NOW, Pipes, base, blocks_and_drafts, fill_disk, head_variant, names, put, stored

SMALL_DISK_BYTES = 1 << 20
DATA = os.urandom(300_000)
BLOB = Blob(address_of(DATA), len(DATA))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a tmpfs of 1 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    options = f"size={SMALL_DISK_BYTES},mode=700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], check=True)
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_load_into_a_tmpfs_that_is_too_small_is_refused_before_anything_is_written(repository, small_disk):
    blobs = stored(repository, 5, nbytes=400_000)
    host = HostStore(small_disk / "host", repository)
    with pytest.raises(NoSpaceError, match=r"host store .* 5 blocks of \d+ bytes") as result:
        host.load(blobs)
    assert "on the tmpfs are free" in result.value.totals
    assert names(host) == set()
    assert host.load(blobs[:2]) == 800_000


def test_a_load_during_which_the_tmpfs_fills_up_fails_and_leaves_nothing(small_disk):
    class FillsTheDisk(Pipes):
        def open(self, address):
            fill_disk(small_disk)
            return super().open(address)

    source = FillsTheDisk()
    host = HostStore(small_disk / "host", source)
    writer = source.pipe(BLOB.address)
    os.write(writer, DATA[:40_000])
    os.close(writer)
    with pytest.raises(NoSpaceError, match=f"cannot write block {BLOB.address}: the disk of {host.root} is full"):
        host.load([BLOB])
    assert names(host) == set()
    assert host.resident() == {}
    assert host.occupied_bytes == 0


def test_a_put_that_fills_the_disk_names_the_disk_in_its_error_and_leaves_nothing(small_disk):
    repository = Repository(small_disk / "repository")
    large = os.urandom(2 << 20)
    with pytest.raises(NoSpaceError, match=f"{address_of(large)}.*{repository.root}"):
        put(repository, address_of(large), large)
    assert blocks_and_drafts(repository) == set()
    assert put(repository, BLOB.address, DATA)
    assert repository.read(BLOB.address) == DATA
    repository.close()


def test_the_reserve_is_created_again_when_the_last_of_several_operations_has_ended(small_disk):
    path = small_disk / "reserve"
    reserve = Reserve(path)
    with reserve.released():
        assert not path.exists()
    nbytes = path.stat().st_size
    assert nbytes > 0
    fill_disk(small_disk)
    first, second = reserve.released(), reserve.released()
    with first:
        second.__enter__()
    assert not path.exists()
    second.__exit__(None, None, None)
    assert path.stat().st_size == nbytes


def test_a_registration_on_a_full_disk_is_refused_and_can_be_tried_again(small_disk):
    repository = Repository(small_disk / "repository")
    put(repository, BLOB.address, DATA)
    manifest = msgspec.structs.replace(base().manifest, program=BLOB, blocks=(Block(BLOB.address, len(DATA), ()),))
    filler = fill_disk(small_disk)

    def register_often() -> None:  # the first few fit into pages that the catalog already has
        for _ in range(100):
            repository.register(manifest, now=1.0)

    with pytest.raises(NoSpaceError, match=str(small_disk)):
        register_often()
    before = len(repository.deployments())
    filler.unlink()
    assert repository.register(manifest, now=1.0).version == before + 1
    repository.close()


@pytest.mark.parametrize("free_bytes", [0, 4096, 16 << 10, 24 << 10, 40 << 10])
def test_a_new_repository_on_a_full_disk_is_refused(small_disk, free_bytes):
    filler = fill_disk(small_disk)
    os.truncate(filler, filler.stat().st_size - free_bytes)
    with pytest.raises(NoSpaceError, match=str(small_disk)):
        Repository(small_disk / "repository")


def test_a_repository_without_a_reserve_opens_on_a_full_disk_and_its_functions_can_be_removed(small_disk):
    repository = Repository(small_disk / "repository")
    one, other = base(), head_variant("other", seed=1)
    for model in (one, other):
        model.deploy(repository)
    repository.close()
    # As in a repository that is older than reserves.
    (small_disk / "repository" / "reserve").unlink()
    fill_disk(small_disk)
    repository = Repository(small_disk / "repository")
    assert {kept.name for kept in repository.deployments()} == {one.manifest.name, "other"}
    assert repository.read(other.manifest.program.address) == other.files[other.manifest.program.address]
    with pytest.raises(NoSpaceError, match=str(small_disk)):
        put(repository, BLOB.address, DATA)
    repository.remove(one.manifest.name)
    assert repository.collect(2 * NOW, grace_s=1).files == len(one.files.keys() - other.files.keys())
    assert [kept.name for kept in repository.deployments()] == ["other"]
    repository.remove("other")
    repository.collect(2 * NOW, grace_s=1)
    assert put(repository, address_of(DATA[:9]), DATA[:9])
    repository.close()
    # The catalog works with a write-ahead log again.
    assert (small_disk / "repository" / "catalog.sqlite").read_bytes()[18:20] == b"\2\2"


def test_functions_and_unneeded_blocks_can_be_removed_on_a_full_disk(small_disk):
    repository = Repository(small_disk / "repository")
    one, other = base(), head_variant("other", seed=1)
    for model in (one, other):
        model.deploy(repository)
    repository.close()
    fill_disk(small_disk)
    repository = Repository(small_disk / "repository")
    assert repository.remove(one.manifest.name) == (1,)
    assert repository.collect(2 * NOW, grace_s=1).files == len(one.files.keys() - other.files.keys())
    assert [kept.name for kept in repository.deployments()] == ["other"]
    # The freed space suffices for the next start and the next removal, even if others take the rest.
    fill_disk(small_disk)
    repository.close()
    repository = Repository(small_disk / "repository")
    repository.remove(other.manifest.name)
    repository.collect(2 * NOW, grace_s=1)
    assert blocks_and_drafts(repository) == set()
    assert put(repository, address_of(DATA[:9]), DATA[:9])
    repository.close()

"""An address gives no permission: a blob that a tenant has not sent is missing for it, as if no tenant had sent it."""

import errno
import os
import sqlite3
from pathlib import Path

import msgspec
import pytest

from overwinter.core.errors import ConflictError, NoSpaceError
from overwinter.core.ids import FunctionName, TenantId
from overwinter.store import catalog
from overwinter.store.blocks import address_of
from overwinter.store.disk import DISK_PAGE_BYTES
from overwinter.store.manifest import Blob, Handler, encode_manifest
from overwinter.store.repository import Repository
from overwinter.store.sealing import Draft
from overwinter.store.uploads import DiskBounds
from tests.store.family import (
    NOW,
    TENANT,
    base,
    below,
    blocks_and_drafts,
    flip_bit,
    head_variant,
    missing,
    put,
    upload,
)

STRANGER = TenantId("stranger")
DATA = os.urandom(10_000)
ADDRESS = address_of(DATA)


def test_a_blob_is_missing_for_tenants_that_have_not_sent_it(repository):
    absent = address_of(b"absent")
    assert put(repository, ADDRESS, DATA)
    assert missing(repository, [ADDRESS, absent]) == [absent]
    assert missing(repository, [ADDRESS, absent], STRANGER) == [ADDRESS, absent]
    assert put(repository, ADDRESS, DATA, STRANGER)
    assert missing(repository, [ADDRESS, absent], STRANGER) == [absent]
    assert not put(repository, ADDRESS, DATA, STRANGER)
    assert blocks_and_drafts(repository) == {ADDRESS}


@pytest.mark.parametrize("dedicated", [False, True])
@pytest.mark.parametrize("part", ["program", "asset", "source", "block"])
def test_a_manifest_with_a_blob_of_another_tenant_is_refused_like_one_with_an_absent_blob(repository, part, dedicated):
    theirs = base("theirs")
    settings = msgspec.structs.replace(theirs.manifest.settings, dedicated=dedicated)
    theirs._replace(manifest=msgspec.structs.replace(theirs.manifest, settings=settings)).deploy(repository)
    mine = head_variant("mine", seed=3)
    for address, data in mine.files.items():
        if address not in theirs.files:
            put(repository, address, data, STRANGER)
    put(repository, ADDRESS, DATA, STRANGER)
    own = Blob(ADDRESS, len(DATA))

    def refusal(wanted: Blob) -> str:
        blobs = {"program": own, "asset": own, "source": own} | {part: wanted}
        handler = Handler(blobs["source"], {"weights": blobs["asset"]})
        blocks = tuple(block for block in theirs.manifest.blocks if block.address == wanted.address)
        fields = {"tenant": STRANGER, "program": blobs["program"], "handler": handler}
        manifest = msgspec.structs.replace(mine.manifest, blocks=blocks if part == "block" else (), **fields)
        if part == "block" and not blocks:
            block = msgspec.structs.replace(theirs.manifest.blocks[0], address=wanted.address)
            manifest = msgspec.structs.replace(manifest, blocks=(block,))
        with pytest.raises(ConflictError) as refused:
            repository.register(manifest, NOW)
        return str(refused.value).replace(wanted.address, "ADDRESS")

    block = theirs.manifest.blocks[0]
    assert refusal(Blob(block.address, block.nbytes)) == refusal(Blob(address_of(b"absent"), block.nbytes))


def test_what_a_tenant_holds_outlives_the_repository_object(repository):
    put(repository, ADDRESS, DATA)
    again = Repository(repository.root)
    assert missing(again, [ADDRESS]) == []
    assert missing(again, [ADDRESS], STRANGER) == [ADDRESS]
    again.close()


def test_the_function_of_one_tenant_keeps_no_blob_for_another(repository):
    model = base()
    model.deploy(repository)
    for address, data in model.files.items():
        put(repository, address, data, STRANGER)
    addresses = list(model.files)
    repository.collect(NOW + 100, grace_s=60)
    assert missing(repository, addresses, now=NOW + 100) == []
    assert missing(repository, addresses, STRANGER, NOW + 100) == addresses
    assert blocks_and_drafts(repository) == set(addresses)
    repository.remove(FunctionName("base"))
    repository.collect(NOW + 200, grace_s=60)
    assert blocks_and_drafts(repository) == set()


def test_an_older_repository_derives_the_holders_of_blobs_from_manifests(tmp_path):
    model = base()
    with_blocks = Repository(tmp_path)
    model.deploy(with_blocks)
    with_blocks.close()
    for path in tmp_path.glob("catalog.*"):
        path.unlink()
    db = sqlite3.connect(tmp_path / "catalog.sqlite")
    for statement in (statement for schema in catalog._SCHEMAS[:3] for statement in schema):
        db.execute(statement)
    db.execute("INSERT INTO node VALUES ('me')")
    db.execute("INSERT INTO names VALUES ('base', 1)")
    db.execute("INSERT INTO functions VALUES ('base', 1, ?, ?, 1)", (encode_manifest(model.manifest), NOW))
    stages = b'{"first": {"function": "base", "inputs": {"x": "input:x"}}}'
    pipeline = b'{"name": "line", "inputs": ["x"], "stages": ' + stages + b', "outputs": {"y": "first:y"}}'
    db.execute("INSERT INTO pipelines VALUES ('line', 1, ?, 1.0)", (pipeline,))
    db.execute("PRAGMA user_version = 3")
    db.commit()
    db.close()
    repository = Repository(tmp_path)
    assert repository.collect(NOW + 1e6, grace_s=60).files == 0
    assert missing(repository, model.files) == []
    assert missing(repository, model.files, STRANGER) == list(model.files)
    assert [kept.tenant for kept in repository.pipelines()] == [TENANT]
    repository.close()


def test_a_tenant_holds_no_more_than_it_may(tmp_path):
    repository = Repository(tmp_path, DiskBounds(tenant_bytes=3 * DISK_PAGE_BYTES))
    blobs = [os.urandom(DISK_PAGE_BYTES), b"x", b"y"]
    for data in blobs:
        put(repository, address_of(data), data)
    before = blocks_and_drafts(repository)
    with pytest.raises(NoSpaceError, match=f"'{TENANT}'.*{3 * DISK_PAGE_BYTES} bytes"):
        put(repository, address_of(b"z"), b"z")
    with pytest.raises(NoSpaceError), upload(repository, ADDRESS) as begun:
        begun.write(DATA)
    assert blocks_and_drafts(repository) == before
    assert not put(repository, address_of(b"x"), b"x")
    assert put(repository, address_of(b"z"), b"z", STRANGER)
    repository.close()


def test_uploads_in_progress_count_together_for_their_tenant(tmp_path):
    repository = Repository(tmp_path, DiskBounds(tenant_bytes=3 * DISK_PAGE_BYTES))
    put(repository, address_of(b"x"), b"x")
    with upload(repository, ADDRESS) as first:
        first.write(DATA[:1])
        with upload(repository, address_of(b"yz")) as second:
            second.write(b"y")
            for other in (b"", DATA):
                with pytest.raises(NoSpaceError, match=f"'{TENANT}'"), upload(repository, ADDRESS) as third:
                    third.write(other)
            second.write(b"z")
            # The tenant holds this blob, so a second upload takes no further space.
            assert not put(repository, address_of(b"x"), b"x")
            assert put(repository, address_of(b"x"), b"x", STRANGER)
            second.commit(NOW)
    assert put(repository, address_of(b"v"), b"v")
    repository.close()


def test_puts_and_registrations_are_refused_when_too_little_of_the_disk_would_stay_free(tmp_path):
    repository = Repository(tmp_path, DiskBounds(free_min_bytes=1 << 60))
    with pytest.raises(NoSpaceError, match=str(tmp_path)) as result:
        put(repository, ADDRESS, DATA)
    assert f"{1 << 60} bytes must stay free" in result.value.totals
    with pytest.raises(NoSpaceError):
        repository.register(base().manifest, NOW)
    assert blocks_and_drafts(repository) == set()
    repository.close()


def test_drafts_that_a_crash_left_are_removed(repository):
    begun = upload(repository, ADDRESS)
    begun.write(DATA)
    assert len(list(below(repository.root / "incoming"))) == 1
    repository.forget_drafts()
    assert list(below(repository.root / "incoming")) == []
    begun.__exit__(None, None, None)


def test_an_upload_that_ends_is_not_counted_twice(tmp_path, monkeypatch):
    repository = Repository(tmp_path, DiskBounds(tenant_bytes=3 * DISK_PAGE_BYTES))
    seal, large = Draft.seal, os.urandom(2 * DISK_PAGE_BYTES)

    def beside_another(draft, directory, *, durable):
        monkeypatch.setattr(Draft, "seal", seal)
        assert put(repository, address_of(b"x"), b"x")
        seal(draft, directory, durable=durable)

    monkeypatch.setattr(Draft, "seal", beside_another)
    assert put(repository, address_of(large), large)
    repository.close()


def test_an_upload_counts_until_its_bytes_are_on_the_disk(tmp_path, monkeypatch):
    repository = Repository(tmp_path, DiskBounds(tenant_bytes=3 * DISK_PAGE_BYTES))
    sync, first, second = Draft.sync, os.urandom(2 * DISK_PAGE_BYTES), os.urandom(3 * DISK_PAGE_BYTES)

    def beside_another(draft):
        monkeypatch.setattr(Draft, "sync", sync)
        with pytest.raises(NoSpaceError):
            put(repository, address_of(second), second)
        sync(draft)

    monkeypatch.setattr(Draft, "sync", beside_another)
    assert put(repository, address_of(first), first)
    repository.close()


def test_an_upload_whose_draft_cannot_be_removed_from_a_full_disk_is_refused_and_not_counted_any_more(
    tmp_path, monkeypatch
):
    repository = Repository(tmp_path, DiskBounds(tenant_bytes=3 * DISK_PAGE_BYTES))

    def refuse(*of, **named):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    begun = upload(repository, ADDRESS)
    begun.write(DATA[:DISK_PAGE_BYTES])
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        patch.setattr(Path, "unlink", refuse)
        with pytest.raises(NoSpaceError, match="the disk .* is full"), begun:
            begun.write(DATA[DISK_PAGE_BYTES:])
    assert put(repository, ADDRESS, DATA)
    repository.close()


def test_a_tenant_above_its_limit_may_send_a_damaged_block_again(tmp_path):
    repository = Repository(tmp_path)
    put(repository, ADDRESS, DATA)
    put(repository, address_of(b"x"), b"x")
    repository.close()
    repository = Repository(tmp_path, DiskBounds(tenant_bytes=DISK_PAGE_BYTES))
    flip_bit(repository.path(ADDRESS))
    assert repository.set_aside(ADDRESS)
    assert put(repository, ADDRESS, DATA)
    with pytest.raises(NoSpaceError):
        put(repository, address_of(b"y"), b"y")
    repository.close()

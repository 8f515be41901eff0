import errno
import json
import os
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import msgspec
import pytest

from overwinter.core.errors import CallerError, ConflictError, NotFoundError, StoreError
from overwinter.core.function import Settings
from overwinter.core.ids import FunctionName
from overwinter.core.pipeline import Pipeline
from overwinter.core.profile import Point, Profile
from overwinter.store import collection
from overwinter.store.blocks import address_of
from overwinter.store.compatibility import stored_manifest
from overwinter.store.layouts import check_weights
from overwinter.store.manifest import Block, Piece
from overwinter.store.repository import Repository
from tests.store.family import (
    NOW,
    Model,
    Shape,
    base,
    below,
    blocks_and_drafts,
    cut,
    fail_reads,
    flip_bit,
    head_variant,
    missing,
    put,
    stored,
    upload,
)

DATA = os.urandom(300_000)
ADDRESS = address_of(DATA)
BASE = FunctionName("base")
LATER = 1e12


@pytest.mark.parametrize(
    "body", [DATA, memoryview(DATA), [DATA[:7], b"", DATA[7:]], (DATA[i : i + 999] for i in range(0, 300_000, 999))]
)
def test_a_blob_is_stored_under_its_address(repository, body):
    assert missing(repository, [ADDRESS]) == [ADDRESS]
    assert not repository.holds(ADDRESS)
    assert put(repository, ADDRESS, body)
    assert repository.holds(ADDRESS)
    assert missing(repository, [ADDRESS]) == []
    assert repository.read(ADDRESS) == DATA
    path = repository.path(ADDRESS)
    assert path == repository.root / "blocks" / ADDRESS[:2] / ADDRESS
    assert path.stat().st_mode & 0o777 == 0o444
    assert not put(repository, ADDRESS, DATA)
    assert blocks_and_drafts(repository) == {ADDRESS}


def test_an_empty_blob_can_be_stored_and_read(repository):
    empty = address_of(b"")
    assert put(repository, empty, b"")
    assert repository.read(empty) == b""


def test_only_this_user_has_access_to_the_directories(repository):
    for path in [repository.root, *(path for path in repository.root.rglob("*") if path.is_dir())]:
        assert path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("body", [DATA[:-1], DATA + b"x", b"", b"\0" + DATA[1:]])
def test_a_body_with_another_address_is_refused_and_leaves_nothing(repository, body):
    with pytest.raises(CallerError, match=f"{len(body)} bytes sent for block {ADDRESS}"):
        put(repository, ADDRESS, body)
    assert missing(repository, [ADDRESS]) == [ADDRESS]
    assert blocks_and_drafts(repository) == set()


def test_a_body_that_breaks_off_leaves_nothing(repository):
    def body():
        yield DATA[:1000]
        raise ConnectionResetError("the deployer went away")

    with pytest.raises(ConnectionResetError):
        put(repository, ADDRESS, body())
    with upload(repository, ADDRESS) as begun:
        begun.write(DATA[:1000])
    assert blocks_and_drafts(repository) == set()


@pytest.mark.parametrize("address", ["", "../" * 20 + "etc/passwd", "A" * 64, ADDRESS + "\n"])
@pytest.mark.parametrize("method", ["path", "holds", "open", "read", "set_aside"])
def test_an_invalid_address_is_refused_by_every_method(repository, method, address):
    with pytest.raises(CallerError, match="not a block address"):
        getattr(repository, method)(address)
    with pytest.raises(CallerError, match="not a block address"):
        upload(repository, address)
    with pytest.raises(CallerError, match="not a block address"):
        missing(repository, [ADDRESS, address])


def test_missing_names_each_once_in_order(repository):
    put(repository, ADDRESS, DATA)
    others = [address_of(bytes([n])) for n in range(3)]
    assert missing(repository, [others[1], ADDRESS, others[0], others[1]]) == [others[1], others[0]]


def test_a_function_is_registered_only_when_its_blobs_are_there(repository):
    model = base()
    with pytest.raises(ConflictError, match=r"blobs of 'base' are not in the repository: [0-9a-f]{64}"):
        repository.register(model.manifest, now=5.0)
    assert repository.deployments() == []
    model.deploy(repository, now=6.0)
    (found,) = repository.deployments()
    assert (found.name, found.version, found.manifest, found.created) == ("base", 1, model.manifest, 6.0)
    assert repository.deployment(BASE) == repository.deployment(BASE, 1) == found
    assert repository.register(model.manifest, now=7.0).version == 2
    assert repository.deployment(BASE).version == 2


def test_functions_outlive_the_repository_object(repository):
    model = base()
    model.deploy(repository)
    again = Repository(repository.root)
    assert again.deployments() == repository.deployments()
    assert again.node_identity == repository.node_identity
    again.close()


def test_stored_settings_out_of_bounds_are_limited_and_reported(repository):
    base().deploy(repository)
    old = {"slo_ms": 5e-324, "memory_mib": 1 << 24}
    with sqlite3.connect(repository.root / "catalog.sqlite") as catalog:
        [[data]] = catalog.execute("SELECT manifest FROM functions")
        manifest = json.loads(data)
        manifest["settings"] |= old
        catalog.execute("UPDATE functions SET manifest = ?", (json.dumps(manifest).encode(),))
    [deployment] = repository.deployments()
    assert deployment.manifest.settings == Settings(slo_ms=0.1, memory_mib=1 << 20)
    assert [line.split()[:2] for line in deployment.limited] == [["slo_ms", "5e-324"], ["memory_mib", "16777216"]]
    repository.collect(LATER, 0)
    assert repository.deployment(BASE).limited == deployment.limited


def test_settings_kept_under_older_names_are_read(repository):
    base().deploy(repository)
    with sqlite3.connect(repository.root / "catalog.sqlite") as catalog:
        [[data]] = catalog.execute("SELECT manifest FROM functions")
        manifest = json.loads(data)
        del manifest["settings"]["max_workers"]
        manifest["settings"] |= {"max_bodies": 5000, "threads": 3}
        catalog.execute("UPDATE functions SET manifest = ?", (json.dumps(manifest).encode(),))
    [deployment] = repository.deployments()
    assert deployment.manifest.settings == Settings(max_workers=4096, threads=3)
    assert [line.split()[:2] for line in deployment.limited] == [["max_workers", "5000"]]


def test_entries_that_cannot_be_read_are_skipped_and_their_blocks_stay(repository):
    other = head_variant("other", seed=1)
    for model in (base(), other):
        model.deploy(repository)
    pipeline = Pipeline(name="p", inputs=("x",), stages={}, outputs={})
    repository.put_pipeline(pipeline, other.manifest.tenant, 1.0)
    with sqlite3.connect(repository.root / "catalog.sqlite") as catalog:
        [[data]] = catalog.execute("SELECT manifest FROM functions WHERE name = 'other'")
        manifest = json.loads(data)
        manifest["settings"]["of_a_newer_version"] = 1
        changed = json.dumps(manifest, separators=(",", ":")).encode()
        catalog.execute("UPDATE functions SET manifest = ? WHERE name = 'other'", (changed,))
        catalog.execute("UPDATE pipelines SET pipeline = ?", (b"{}",))
    errors: list[StoreError] = []
    assert [kept.name for kept in repository.deployments(errors.append)] == ["base"]
    assert repository.pipelines(errors.append) == []
    assert ["other@1" in str(errors[0]), "pipeline 'p'" in str(errors[1])] == [True, True]
    for read in (repository.deployments, repository.pipelines):
        with pytest.raises(StoreError, match="newer version"):
            read()
    repository.collect(LATER, 0)
    assert missing(repository, [blob.address for blob in other.manifest.blobs()]) == []
    assert repository.remove("other") == (1,)
    repository.collect(LATER, 0)
    assert blocks_and_drafts(repository) == set(base().files)


def test_a_block_whose_bytes_the_disk_cannot_read_is_missing_and_can_be_sent_again(repository, monkeypatch):
    put(repository, ADDRESS, DATA)
    with monkeypatch.context() as patch:
        fail_reads(patch, repository.path(ADDRESS))
        with pytest.raises(StoreError, match=f"block {ADDRESS} is damaged.*deploy"):
            repository.read(ADDRESS)
    assert missing(repository, [ADDRESS]) == [ADDRESS]
    put(repository, ADDRESS, DATA)
    assert repository.read(ADDRESS) == DATA


def test_an_impossible_profile_is_not_read(repository):
    sound = Profile(weight_bytes=1, macs=1, points=(Point(1, 1, 1, 1, 0.1),))
    repository.put_profile("here", "sound", sound, 1.0)
    repository.put_profile("here", "absurd", msgspec.structs.replace(sound, wake_s=float("nan")), 1.0)
    assert repository.profile("here", "sound") == sound
    assert repository.profile("here", "absurd") is None


def test_a_variant_sends_only_what_is_new(repository):
    one, other = base(), head_variant("other", seed=1)
    everything = one.deploy(repository)
    assert everything == sum(map(len, one.files.values()))
    sent = other.deploy(repository)
    assert 0 < sent < everything / 4
    assert base("again").deploy(repository) == 0


def test_a_manifest_that_is_not_valid_is_refused(repository):
    model = base()
    model.deploy(repository)
    with pytest.raises(CallerError, match="name"):
        repository.register(msgspec.structs.replace(model.manifest, name="Not A Name"), now=1.0)


def test_a_manifest_with_a_wrong_size_is_refused_and_the_block_kept(repository):
    model = base()
    model.deploy(repository)
    lying = msgspec.structs.replace(model.manifest.blocks[0], nbytes=10**6)
    manifest = msgspec.structs.replace(model.manifest, blocks=(lying, *model.manifest.blocks[1:]))
    with pytest.raises(CallerError, match=f"{lying.address} 1000000 bytes; it has {model.manifest.blocks[0].nbytes}"):
        repository.register(manifest, now=1.0)
    assert repository.holds(lying.address)


def test_a_short_file_is_found_at_registration_and_can_be_sent_again(repository):
    model = base()
    model.deploy(repository)
    short = model.manifest.blocks[0].address
    cut(repository.path(short), 1000)
    with pytest.raises(ConflictError, match=short):
        repository.register(model.manifest, now=1.0)
    assert missing(repository, model.files) == [short]
    assert model.deploy(repository) == len(model.files[short])
    assert repository.read(short) == model.files[short]


def test_a_flipped_bit_is_found_and_the_block_can_be_sent_again(repository):
    put(repository, ADDRESS, DATA)
    flip_bit(repository.path(ADDRESS))
    with pytest.raises(StoreError, match=f"block {ADDRESS} is damaged.*deploy"):
        repository.read(ADDRESS)
    assert missing(repository, [ADDRESS]) == [ADDRESS]
    with pytest.raises(StoreError, match=f"{ADDRESS} is not in the repository.*deploy"):
        repository.read(ADDRESS)
    assert put(repository, ADDRESS, DATA)
    assert repository.read(ADDRESS) == DATA


def test_a_damaged_block_is_set_aside_although_the_directory_for_it_was_removed(repository):
    put(repository, ADDRESS, DATA)
    (repository.root / "damaged").rmdir()
    assert repository.collect(NOW, grace_s=60).files == 0
    flip_bit(repository.path(ADDRESS))
    assert repository.set_aside(ADDRESS)
    assert missing(repository, [ADDRESS]) == [ADDRESS]
    assert [path.name for path in below(repository.root / "damaged")] == [f"{ADDRESS}.damaged"]


def test_a_put_repairs_a_damaged_block_that_was_not_detected(repository):
    put(repository, ADDRESS, DATA)
    flip_bit(repository.path(ADDRESS))
    assert not put(repository, ADDRESS, DATA)
    assert repository.read(ADDRESS) == DATA


def test_a_sound_block_is_not_set_aside(repository):
    put(repository, ADDRESS, DATA)
    assert not repository.set_aside(ADDRESS)
    assert repository.read(ADDRESS) == DATA


def test_removal_frees_what_no_other_function_needs(repository):
    one, other = base(), head_variant("other", seed=1)
    one.deploy(repository)
    other.deploy(repository)
    assert repository.remove(BASE) == (1,)
    with pytest.raises(NotFoundError, match="'base'"):
        repository.remove(BASE)
    collected = repository.collect(LATER, grace_s=60)
    only_ours = one.files.keys() - other.files.keys()
    assert blocks_and_drafts(repository) == set(other.files)
    assert (collected.files, collected.nbytes) == (len(only_ours), sum(len(one.files[name]) for name in only_ours))
    assert repository.register(other.manifest, now=1.0).version == 2


def test_collections_read_each_manifest_once(repository, monkeypatch):
    read = []
    monkeypatch.setattr(
        "overwinter.store.repository.stored_manifest", lambda data: (read.append(data), stored_manifest(data))[1]
    )
    for model in (base(), head_variant("other", seed=1)):
        model.deploy(repository)
    for _ in range(3):
        repository.collect(LATER, grace_s=60)
    assert len(read) == 2
    repository.remove(BASE)
    assert repository.collect(LATER, grace_s=60).files
    assert repository.register(head_variant("other", seed=1).manifest, now=LATER).version == 2
    repository.collect(LATER, grace_s=60)
    assert len(read) == 3


def test_a_collection_spares_what_a_deploy_in_progress_counts_on(repository):
    model = base()
    model.deploy(repository)
    repository.remove(BASE)
    kept = list(model.files)[:3]
    assert missing(repository, kept, now=NOW + 100) == []
    put_again = list(model.files)[3]
    put(repository, put_again, model.files[put_again], now=NOW + 100)
    repository.collect(NOW + 100, grace_s=60)
    assert blocks_and_drafts(repository) == {*kept, put_again}
    repository.collect(NOW + 161, grace_s=60)
    assert blocks_and_drafts(repository) == set()


def test_a_collection_removes_drafts_and_damaged_blocks_only_when_they_are_old(repository):
    put(repository, ADDRESS, DATA)
    flip_bit(repository.path(ADDRESS))
    os.utime(repository.path(ADDRESS), (0, 0))
    assert repository.set_aside(ADDRESS)
    with upload(repository, ADDRESS) as begun:
        begun.write(DATA)
        (draft,) = below(repository.root / "incoming")
        assert repository.collect(draft.stat().st_mtime, grace_s=60).files == 0
        assert repository.collect(draft.stat().st_mtime + 61, grace_s=60).files == 2
        with pytest.raises(StoreError, match=ADDRESS):
            begun.commit(NOW)
    assert blocks_and_drafts(repository) == set()


def test_a_collection_continues_when_an_upload_ends_meanwhile(repository, monkeypatch):
    scandir = os.scandir

    def ended(place):
        entries = list(scandir(place))
        for entry in entries if place == repository.root / "incoming" else ():
            os.unlink(entry.path)
        return entries

    with upload(repository, ADDRESS) as begun:
        begun.write(DATA)
        (draft,) = below(repository.root / "incoming")
        after = draft.stat().st_mtime + 61
        monkeypatch.setattr(os, "scandir", ended)
        assert repository.collect(after, grace_s=60).files == 0


def weights_of(model: Model) -> list[Shape]:
    return model.weights


def test_weights_that_agree_with_the_layouts_of_their_blocks_are_accepted(repository):
    model = base()
    model.deploy(repository)
    check_weights(repository, model.manifest, weights_of(model))


def test_a_difference_of_weights_from_the_layouts_of_their_blocks_is_named_in_the_error(repository):
    model = base()
    model.deploy(repository)
    weights = weights_of(model)
    with pytest.raises(CallerError, match=f"{len(weights) - 1} weights, its blocks {len(weights)}"):
        check_weights(repository, model.manifest, weights[:-1])
    with pytest.raises(CallerError, match=r"weight 0 of 'base' should be int32 .* has float32"):
        check_weights(repository, model.manifest, [Shape("int32", weights[0].shape), *weights[1:]])
    with pytest.raises(CallerError, match=r"weight 0 of 'base' should be float32 \[160, 64\]"):
        check_weights(repository, model.manifest, [Shape("float32", (160, 64)), *weights[1:]])
    blocks = list(model.manifest.blocks)
    at = next(number for number, block in enumerate(blocks) if len(block.pieces) > 1)
    first, second, *rest = blocks[at].pieces
    swapped = (Piece(second.weight, first.offset, first.nbytes), Piece(first.weight, second.offset, second.nbytes))
    blocks[at] = Block(blocks[at].address, blocks[at].nbytes, (*swapped, *rest))
    manifest = msgspec.structs.replace(model.manifest, blocks=tuple(blocks))
    check_weights(repository, manifest, weights)  # norms are of one shape: only the deployer knows which is which
    blocks[at] = Block(blocks[at].address, blocks[at].nbytes, blocks[at].pieces[1:])
    with pytest.raises(CallerError, match="its blocks"):
        check_weights(repository, msgspec.structs.replace(model.manifest, blocks=tuple(blocks)), weights)


def test_the_layout_of_a_blob_that_is_not_a_block_is_an_error(repository):
    put(repository, ADDRESS, DATA)
    with pytest.raises(CallerError, match="block"):
        repository.layout(ADDRESS)
    put(repository, address_of(b""), b"")
    with pytest.raises(CallerError, match="not a block"):
        repository.layout(address_of(b""))


def test_threads_may_deploy_one_model_at_the_same_time(repository):
    model = base()
    barrier = threading.Barrier(4)

    def deploy(_: int) -> int:
        barrier.wait()
        for address, data in model.files.items():
            put(repository, address, data)
        return repository.register(model.manifest, now=1.0).version

    with ThreadPoolExecutor(4) as threads:
        assert sorted(threads.map(deploy, range(4))) == [1, 2, 3, 4]
    assert [found.version for found in repository.deployments()] == [1, 2, 3, 4]
    assert blocks_and_drafts(repository) == set(model.files)
    assert all(repository.read(address) == data for address, data in model.files.items())


def test_a_collection_of_a_removed_function_leaves_everything_else(repository):
    one, other = base(), head_variant("other", seed=1)
    one.deploy(repository)
    other.deploy(repository)
    put(repository, ADDRESS, DATA)
    repository.remove(BASE)
    assert repository.collect(LATER, 60, set(one.files)).files == len(one.files.keys() - other.files.keys())
    assert blocks_and_drafts(repository) == {*other.files, ADDRESS}
    assert missing(repository, one.files, now=LATER) == [each for each in one.files if each not in other.files]
    assert missing(repository, [ADDRESS], now=LATER) == []


def test_many_blocks_are_removed_in_steps_that_uploads_and_deploys_can_come_between(repository, monkeypatch):
    """What is registered after the collection has begun keeps its blocks."""
    monkeypatch.setattr(collection, "AT_ONCE", 3)
    model = base()
    model.deploy(repository)
    repository.remove(BASE)
    blobs = stored(repository, 20, nbytes=100)
    exclusive, steps = repository._lock.exclusive, []

    @contextmanager
    def counted():
        if not steps:
            # Before the first step the function is registered again, at a time before the grace period.
            repository.register(model.manifest, now=NOW)
        steps.append(1)
        with exclusive():
            yield

    monkeypatch.setattr(repository._lock, "exclusive", counted)
    assert repository.collect(LATER, grace_s=0).files == len(blobs)
    assert len(steps) >= len(blobs) / 3
    assert blocks_and_drafts(repository) == set(model.files)
    assert missing(repository, model.files, now=LATER) == []


@pytest.mark.parametrize("damage", ["cut", "layout", "unreadable"])
def test_a_damaged_block_that_a_deploy_needs_is_to_be_sent_again(repository, monkeypatch, damage):
    model = base()
    model.deploy(repository)
    block = model.manifest.blocks[0]
    path, pread = repository.path(block.address), os.pread
    inode = path.stat().st_ino

    def failing(descriptor, nbytes, at):
        if os.fstat(descriptor).st_ino == inode:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(descriptor, nbytes, at)

    if damage == "cut":
        cut(path, 4096)
    elif damage == "layout":
        flip_bit(path, block.nbytes - 6)
    else:
        fail_reads(monkeypatch, path)
        monkeypatch.setattr(os, "pread", failing)
    with pytest.raises(ConflictError, match=f"{block.address} of 'base'"):
        check_weights(repository, model.manifest, weights_of(model))
    assert missing(repository, [block.address]) == [block.address]
    put(repository, block.address, model.files[block.address])
    check_weights(repository, model.manifest, weights_of(model))

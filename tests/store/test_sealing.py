import os
import resource

import pytest

from overwinter.core.errors import NoSpaceError, StoreError
from overwinter.store.blocks import address_of
from overwinter.store.disk import disk_errors, private_directory
from overwinter.store.sealing import CHUNK_BYTES, Draft, digest_of, read_chunks
from tests.store.family import below

DATA = os.urandom(2 * CHUNK_BYTES + 17)


def test_a_sealed_file_lies_under_its_own_digest_and_is_read_only(tmp_path):
    with Draft(tmp_path, address_of(DATA)) as draft:
        draft.write(DATA[:5])
        draft.write(b"")
        draft.write(memoryview(DATA)[5:])
        assert (draft.digest, draft.nbytes) == (address_of(DATA), len(DATA))
        draft.seal(tmp_path, durable=True)
    (path,) = below(tmp_path)
    assert path.name == address_of(DATA)
    assert path.read_bytes() == DATA
    assert path.stat().st_mode & 0o777 == 0o444


def test_a_draft_that_is_not_sealed_leaves_nothing(tmp_path):
    with Draft(tmp_path, address_of(DATA)) as draft:
        draft.write(DATA)
        assert len(list(below(tmp_path))) == 1
    assert not list(below(tmp_path))


def test_a_file_never_gets_a_name_other_than_its_digest(tmp_path):
    with Draft(tmp_path, address_of(b"something else")) as draft:
        draft.write(DATA)
        draft.seal(tmp_path, durable=False)
    assert [path.name for path in below(tmp_path)] == [address_of(DATA)]


def test_a_limit_on_file_sizes_counts_as_a_full_disk(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Draft(tmp_path, address_of(DATA)) as draft:
        resource.setrlimit(resource.RLIMIT_FSIZE, (CHUNK_BYTES, hard))
        try:
            with pytest.raises(NoSpaceError, match=str(tmp_path)):
                draft.write(DATA)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(below(tmp_path))


def test_a_missing_directory_is_named_in_the_error(tmp_path):
    with pytest.raises(StoreError, match="gone"):
        Draft(tmp_path / "gone", address_of(DATA))


def test_a_full_disk_is_reported_with_its_free_bytes_even_for_a_directory_that_does_not_exist_yet(tmp_path):
    with pytest.raises(NoSpaceError) as result, disk_errors("make a room", tmp_path / "a" / "b"):
        raise OSError(28, "No space left on device")
    assert "bytes free" in result.value.totals


def test_reading_in_chunks_gives_the_digest(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(DATA)
    with path.open("rb") as file:
        assert digest_of(file.fileno()) == address_of(DATA)
        file.seek(0)
        assert b"".join(bytes(chunk) for chunk in read_chunks(file.fileno())) == DATA


def test_a_private_directory_is_closed_to_others(tmp_path):
    path = tmp_path / "a" / "b"
    private_directory(path)
    assert path.stat().st_mode & 0o777 == 0o700


def test_an_existing_directory_keeps_its_permissions(tmp_path):
    path = tmp_path / "shared"
    path.mkdir()
    path.chmod(0o1777)
    private_directory(path)
    assert path.stat().st_mode & 0o7777 == 0o1777

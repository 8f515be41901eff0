"""Tokens and quotas survive a restart, their file contains no secret, and revoked tokens are no longer found."""

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from overwinter.core.errors import CallerError, NotFoundError, StoreError
from overwinter.store.tokens import FILE, LOCK, NO_TOKENS, Quota, TokenFile


def test_a_token_is_found_only_by_its_whole_text(tmp_path: Path) -> None:
    file = TokenFile(tmp_path)
    made, text = file.create("acme", ("deploy", "infer"), "ci", 12.5)
    other, _ = file.create("acme", ("infer",), "", 13.0)
    known = TokenFile(tmp_path).read()
    assert known.find(text.encode()) == made
    assert (made.tenant, made.scopes, made.label, made.created) == ("acme", ("infer", "deploy"), "ci", 12.5)
    wrong = [
        text[:-1],
        text + "x",
        text.upper(),
        text.replace(made.id, other.id),
        made.id,
        f"ow_{made.id}_",
        "",
        "a_b_c",
    ]
    assert [known.find(each.encode()) for each in wrong] == [None] * len(wrong)
    assert known.find(b"ow_\xff_\xff") is None


def test_the_file_contains_no_token(tmp_path: Path) -> None:
    _, text = TokenFile(tmp_path).create("acme", ("admin",), "", 0.0)
    kept = (tmp_path / FILE).read_text()
    assert text not in kept
    assert text.rpartition("_")[2] not in kept
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600


def test_a_revoked_token_is_gone_and_the_others_stay(tmp_path: Path) -> None:
    file = TokenFile(tmp_path)
    assert (file.read(), file.version()) == (NO_TOKENS, None)
    first, text = file.create("acme", ("infer",), "", 0.0)
    second, other = file.create("acme", ("infer",), "", 0.0)
    before = file.version()
    assert file.revoke(first.id) == first
    assert file.version() != before
    assert file.read().find(text.encode()) is None
    assert file.read().find(other.encode()) == second
    with pytest.raises(NotFoundError, match=first.id):
        file.revoke(first.id)
    file.revoke(second.id)
    assert file.read().required


def test_a_new_quota_replaces_the_previous_one(tmp_path: Path) -> None:
    file = TokenFile(tmp_path)
    file.limit("acme", Quota(functions=3, requests_per_s=1.5))
    file.limit("acme", Quota(nbytes=4096))
    assert file.read().quotas == {"acme": Quota(nbytes=4096)}
    assert not file.read().required


@pytest.mark.parametrize("tenant", ["", "Acme", "a..b", "a.", ".a", "a/b", "a" * 64, "a\n"])
def test_an_invalid_tenant_name_is_refused(tmp_path: Path, tenant: str) -> None:
    file = TokenFile(tmp_path)
    with pytest.raises(CallerError, match="tenant"):
        file.create(tenant, ("infer",), "", 0.0)
    with pytest.raises(CallerError, match="tenant"):
        file.limit(tenant, Quota())
    assert file.version() is None


def test_a_damaged_file_is_an_error_and_is_not_overwritten(tmp_path: Path) -> None:
    file = TokenFile(tmp_path)
    (tmp_path / FILE).write_text('{"tokens": {')
    with pytest.raises(StoreError, match="damaged"):
        file.read()
    with pytest.raises(StoreError, match="damaged"):
        file.create("acme", ("infer",), "", 0.0)
    assert (tmp_path / FILE).read_text() == '{"tokens": {'


def test_no_token_is_lost_when_many_are_created_at_the_same_time(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = [
            each[0].id for each in pool.map(lambda _: TokenFile(tmp_path).create("a", ("infer",), "", 0.0), range(24))
        ]
    assert sorted(TokenFile(tmp_path).read().tokens) == sorted(made)


@pytest.mark.parametrize("name", [LOCK, f"{FILE}.draft"])
def test_root_follows_no_link_that_the_node_s_user_made(tmp_path: Path, name: str) -> None:
    victim, data = tmp_path / "shadow", tmp_path / "data"
    victim.write_text("root's")
    data.mkdir()
    (data / name).symlink_to(victim)
    with pytest.raises(StoreError):
        TokenFile(data).create("acme", ("infer",), "", 0.0)
    assert victim.read_text() == "root's"

"""The audit log is bounded, and a tenant that writes much hides no records of others."""

import json
import resource
from pathlib import Path

import pytest

from overwinter.api import audit
from overwinter.api.audit import FILE, RECORDS_PER_S, UPLOADS_PER_S, Audit, AuditRecord


def record(tenant: str, path: str = "/x", method: str = "DELETE") -> AuditRecord:
    return AuditRecord(at="now", by="1", tenant=tenant, method=method, path=path, status=200)


def records(root: Path) -> list[dict]:
    return [json.loads(text) for text in (root / FILE).read_text().splitlines()]


def test_a_tenant_that_writes_too_much_hides_no_records_of_others(tmp_path: Path) -> None:
    kept = Audit(tmp_path, print)
    for _ in range(500):
        kept.add(record("noisy"), 10.0)
    kept.add(record("quiet", "/y"), 10.0)
    kept.add(record("noisy", "/z"), 12.0)
    most = int(RECORDS_PER_S)
    assert [each["tenant"] for each in records(tmp_path)] == ["noisy"] * most + ["quiet", "noisy"]
    assert records(tmp_path)[-1]["left_out"] == 500 - most


def test_a_deploy_of_many_blocks_does_not_hide_its_own_record(tmp_path: Path) -> None:
    kept = Audit(tmp_path, print)
    for number in range(500):
        kept.add(record("a", f"/overwinter/v1/blocks/{number:064x}", "PUT"), 10.0)
    kept.add(record("a", "/overwinter/v1/functions", "POST"), 10.0)
    most = int(UPLOADS_PER_S)
    assert [each["method"] for each in records(tmp_path)] == ["PUT"] * most + ["POST"]
    assert records(tmp_path)[-1]["left_out"] == 500 - most


def test_a_full_file_is_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "BYTES_MAX", 2000)
    kept = Audit(tmp_path, print)
    for number in range(200):
        kept.add(record("a", f"/{number}"), float(number))
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [FILE, f"{FILE}.1"]
    assert all(path.stat().st_size < 2200 for path in tmp_path.iterdir())
    assert records(tmp_path)[-1]["path"] == "/199"


def test_a_long_path_is_cut(tmp_path: Path) -> None:
    Audit(tmp_path, print).add(record("a", "/" + "x" * 8000), 0.0)
    assert len(records(tmp_path)[0]["path"]) == audit.PATH_MAX
    Audit(tmp_path, print).add(record("a", "/" + "\x01" * 8000), 0.0)
    first, second = (tmp_path / FILE).read_bytes().splitlines()
    assert len(second) <= len(first)


def test_records_that_cannot_be_written_are_logged_once_and_counted(tmp_path: Path) -> None:
    said: list[str] = []
    kept = Audit(tmp_path / "absent", said.append)
    for _ in range(3):
        kept.add(record("a"), 1.0)
    assert len(said) == 1
    (tmp_path / "absent").mkdir()
    kept.add(record("a"), 1.0)
    assert records(tmp_path / "absent")[0]["left_out"] == 3


def test_no_link_is_followed(tmp_path: Path) -> None:
    said: list[str] = []
    other = tmp_path / "other"
    other.write_text("")
    (tmp_path / FILE).symlink_to(other)
    Audit(tmp_path, said.append).add(record("a"), 0.0)
    assert (other.read_text(), len(said)) == ("", 1)


def test_a_record_of_which_only_a_part_fits_on_the_disk_is_left_out(tmp_path: Path) -> None:
    said: list[str] = []
    kept = Audit(tmp_path, said.append)
    kept.add(record("a", "/0"), 0.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / FILE).stat().st_size + 40, hard))
        kept.add(record("a", "/1"), 1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(said) == 1
    kept.add(record("a", "/2"), 2.0)
    assert [(each["path"], each.get("left_out", 0)) for each in records(tmp_path)] == [("/0", 0), ("/2", 1)]

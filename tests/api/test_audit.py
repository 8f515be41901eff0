"""The audit log keeps lines up to its limit."""

import json
from pathlib import Path

import pytest

from overwinter.api import audit
from overwinter.api.audit import FILE, LINES_PER_S, Audit, Line


def line(tenant: str, path: str = "/x") -> Line:
    return Line(at="now", by="1", tenant=tenant, method="DELETE", path=path, status=200)


def lines(root: Path) -> list[dict]:
    return [json.loads(text) for text in (root / FILE).read_text().splitlines()]


def test_a_tenant_that_writes_too_much_hides_no_lines_of_others(tmp_path: Path) -> None:
    kept = Audit(tmp_path, print)
    for _ in range(500):
        kept.add(line("noisy"), 10.0)
    kept.add(line("quiet", "/y"), 10.0)
    kept.add(line("noisy", "/z"), 12.0)
    most = int(LINES_PER_S)
    assert [each["tenant"] for each in lines(tmp_path)] == ["noisy"] * most + ["quiet", "noisy"]
    assert lines(tmp_path)[-1]["left_out"] == 500 - most


def test_a_full_file_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "BYTES_MAX", 2000)
    kept = Audit(tmp_path, print)
    for number in range(200):
        kept.add(line("a", f"/{number}"), float(number))
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [FILE, f"{FILE}.1"]
    assert all(path.stat().st_size < 2200 for path in tmp_path.iterdir())
    assert lines(tmp_path)[-1]["path"] == "/199"


def test_a_path_is_cut(tmp_path: Path) -> None:
    Audit(tmp_path, print).add(line("a", "/" + "x" * 8000), 0.0)
    assert len(lines(tmp_path)[0]["path"]) == audit.PATH_MAX


def test_lines_that_cannot_be_written_are_logged_once_and_counted(tmp_path: Path) -> None:
    said: list[str] = []
    kept = Audit(tmp_path / "absent", said.append)
    for _ in range(3):
        kept.add(line("a"), 1.0)
    assert len(said) == 1
    (tmp_path / "absent").mkdir()
    kept.add(line("a"), 1.0)
    assert lines(tmp_path / "absent")[0]["left_out"] == 3


def test_no_link_is_followed(tmp_path: Path) -> None:
    said: list[str] = []
    other = tmp_path / "other"
    other.write_text("")
    (tmp_path / FILE).symlink_to(other)
    Audit(tmp_path, said.append).add(line("a"), 0.0)
    assert (other.read_text(), len(said)) == ("", 1)

"""Usage is added up by day, tenant and function, and survives a restart of the node."""

import sqlite3

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overwinter.core.errors import StoreError
from overwinter.store.usage import MERGED, REMOVED_MAX, Amounts, UsageFile

AMOUNTS = st.builds(Amounts, st.integers(0, 9), *[st.integers(0, 99).map(float)] * 9)


def test_amounts_add_up_over_restarts(tmp_path):
    for _ in range(3):
        usage_file = UsageFile(tmp_path / "usage.sqlite")
        usage_file.add("2025-01-02", {("t", "f"): Amounts(1, 2.0, 3.0, 4.0, 5.0, 6.0)})
        usage_file.close()
    usage_file = UsageFile(tmp_path / "usage.sqlite")
    usage_file.add("2025-01-01", {("t", "f"): Amounts(1), ("u", "g"): Amounts(2)})
    assert usage_file.entries() == [
        ("2025-01-01", "t", "f", Amounts(4, 6.0, 9.0, 12.0, 15.0, 18.0)),
        ("2025-01-01", "u", "g", Amounts(2)),
    ]
    assert [entry.function for entry in usage_file.entries("u")] == ["g"]
    usage_file.close()


def test_the_oldest_removed_functions_of_a_tenant_are_merged_and_all_totals_stay(tmp_path):
    usage_file = UsageFile(tmp_path / "usage.sqlite")
    days = [f"2025-01-{day:02}" for day in range(1, 31)]

    def totals():
        with sqlite3.connect(tmp_path / "usage.sqlite") as db:
            return db.execute("SELECT day, tenant, sum(requests), sum(core_s) FROM usage GROUP BY 1, 2").fetchall()

    for number, day in enumerate(days):
        removed = {("t", f"r{number}-{place}"): Amounts(1, 2.0) for place in range(50)}
        usage_file.add(day, removed | {("t", "deployed"): Amounts(3, 4.0), ("u", f"g{number}"): Amounts(5)})
    usage_file.add(days[0], {("t", "first"): Amounts(7)})
    before = totals()
    for _ in range(2):
        usage_file.merge_removed(["deployed", "first"])
        entries = usage_file.entries("t")
        assert len(entries) == REMOVED_MAX + 3
        # The last 20 days have 1000 removed functions.
        assert entries[0] == (days[0], "t", MERGED, Amounts(10 * 50, 2.0 * 10 * 50))
        assert {entry.since for entry in entries[3:]} == set(days[10:])
        assert entries[1:3] == [
            ("2025-01-01", "t", "deployed", Amounts(90, 120.0)),
            (days[0], "t", "first", Amounts(7)),
        ]
        assert len(usage_file.entries("u")) == len(days)
        assert totals() == before
    usage_file.merge_removed([])
    assert len(usage_file.entries("t")) == REMOVED_MAX + 1
    assert totals() == before
    usage_file.close()


@given(AMOUNTS, AMOUNTS)
def test_what_is_added_can_be_taken_away(one, other):
    assert one.plus(other).plus(other, -1) == one


def test_a_file_of_an_older_version_is_read_and_continued(tmp_path):
    columns = "requests, core_s, idle_core_s, disk_byte_s, host_byte_s, private_byte_s"
    with sqlite3.connect(tmp_path / "usage.sqlite") as db:
        db.execute(f"CREATE TABLE usage (day, tenant, function, {columns}, PRIMARY KEY (day, tenant, function))")
        db.execute("INSERT INTO usage VALUES ('2025-01-02', 't', 'f', 1, 2, 3, 4, 5, 6)")
    db.close()
    usage_file = UsageFile(tmp_path / "usage.sqlite")
    usage_file.add("2025-01-02", {("t", "f"): Amounts(device_s=7.0)})
    [entry] = usage_file.entries()
    assert entry.amounts == Amounts(1, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
    usage_file.close()


def test_a_file_that_is_not_a_database_is_named_in_the_error_and_kept(tmp_path):
    (tmp_path / "usage.sqlite").write_bytes(b"not a database, but long enough to be read as one" * 99)
    with pytest.raises(StoreError, match="usage.sqlite"):
        UsageFile(tmp_path / "usage.sqlite")
    assert (tmp_path / "usage.sqlite").read_bytes().startswith(b"not a database")

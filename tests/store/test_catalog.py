import sqlite3
import uuid

import pytest

from overwinter.core.errors import ConflictError, ForbiddenError, NotFoundError, StoreError
from overwinter.core.ids import FunctionName, TenantId
from overwinter.store import catalog as catalog_module
from overwinter.store.catalog import _SCHEMAS, SCHEMA_VERSION, Catalog

NAME = FunctionName("one")
TENANT = TenantId("tests")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "catalog.sqlite"


@pytest.fixture
def catalog(path):
    opened = Catalog(path)
    yield opened
    opened.close()


def test_versions_count_up_for_each_name(catalog):
    assert [catalog.add(NAME, TENANT, b"a", 1.0), catalog.add(NAME, TENANT, b"b", 2.0)] == [1, 2]
    assert catalog.add(FunctionName("two"), TENANT, b"c", 3.0) == 1
    assert [(row.name, row.version, row.manifest, row.created) for row in catalog.rows()] == [
        ("one", 1, b"a", 1.0),
        ("one", 2, b"b", 2.0),
        ("two", 1, b"c", 3.0),
    ]


def test_the_number_of_a_removed_version_is_not_reused_even_after_a_restart(catalog, path):
    catalog.add(NAME, TENANT, b"a", 1.0)
    catalog.add(NAME, TENANT, b"b", 1.0)
    assert catalog.remove(NAME, 2) == (2,)
    assert catalog.add(NAME, TENANT, b"c", 1.0) == 3
    assert catalog.remove(NAME, None) == (1, 3)
    catalog.close()
    again = Catalog(path)
    assert again.add(NAME, TENANT, b"d", 1.0) == 4
    again.close()


def test_old_unused_names_are_dropped_and_their_version_numbers_are_not_reused(catalog, monkeypatch):
    monkeypatch.setattr(catalog_module, "NAMES_MAX", 3)
    names = [FunctionName(f"n{number}") for number in range(8)]
    catalog.add(FunctionName("kept"), TENANT, b"k", 0.0)
    catalog.put_pipeline(FunctionName("kept-too"), TENANT, b"p", 0.5)
    catalog.add(FunctionName("other"), TenantId("other"), b"o", 0.0)
    for number, name in enumerate(names):
        for _ in range(3 if number == 1 else 1):
            last = catalog.add(name, TENANT, b"n", 1.0 + number)
        catalog.remove(name, None)
    with catalog.file.reading() as db:
        known = {name for (name,) in db.execute("SELECT name FROM names")}
    assert known == {"kept", "kept-too", "other", *names[-3:]}
    assert catalog.add(names[1], TENANT, b"n", 20.0) > 3
    assert catalog.add(names[7], TENANT, b"n", 21.0) == last + 1
    assert catalog.add(FunctionName("kept"), TENANT, b"k", 22.0) == 2
    assert catalog.add(FunctionName("new"), TenantId("other"), b"o", 23.0) == 1


def test_a_version_number_is_not_reused_after_another_tenant_used_the_name(catalog, monkeypatch):
    monkeypatch.setattr(catalog_module, "NAMES_MAX", 1)
    other = TenantId("other")

    def use(tenant, name=NAME):
        version = catalog.add(FunctionName(name), tenant, b"m", next(times))
        catalog.remove(FunctionName(name), None)
        return version

    times = iter(range(100))
    assert [use(TENANT) for _ in range(3)] == [1, 2, 3]
    # The tenant's newer name displaces this one from the catalog, then the other tenant takes it.
    use(TENANT, "newer")
    assert use(other) == 1
    assert use(TENANT) > 3


def test_the_newest_or_a_given_version_is_found(catalog):
    for manifest in (b"a", b"b"):
        catalog.add(NAME, TENANT, manifest, 1.0)
    assert catalog.get(NAME, None).manifest == b"b"
    assert catalog.get(NAME, 1).manifest == b"a"


@pytest.mark.parametrize("method", ["get", "remove"])
def test_a_missing_function_or_version_is_named_in_the_error(catalog, method):
    with pytest.raises(NotFoundError, match="no function 'one'"):
        getattr(catalog, method)(NAME, None)
    catalog.add(NAME, TENANT, b"a", 1.0)
    with pytest.raises(NotFoundError, match="'one' has no version 7; it has 1"):
        getattr(catalog, method)(NAME, 7)


def test_the_identity_of_a_node_lasts(catalog, path):
    other = Catalog(path)
    assert other.node_identity == catalog.node_identity == str(uuid.UUID(catalog.node_identity))
    other.close()


def test_a_catalog_with_a_newer_schema_is_refused(catalog, path):
    catalog.close()
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    db.close()
    with pytest.raises(StoreError, match="newer Overwinter"):
        Catalog(path)


def test_a_damaged_catalog_is_named_in_the_error(path):
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(StoreError, match=r"catalog\.sqlite"):
        Catalog(path)


def test_a_failed_transaction_uses_up_no_version_number(catalog):
    catalog.add(NAME, TENANT, b"a", 1.0)
    with pytest.raises(StoreError):
        catalog.add(NAME, TENANT, None, 1.0)  # type: ignore[arg-type]
    assert catalog.add(NAME, TENANT, b"b", 1.0) == 2


def test_a_new_version_of_a_pipeline_replaces_the_previous_one(catalog):
    assert [catalog.put_pipeline(NAME, TENANT, b"a", 1.0), catalog.put_pipeline(NAME, TENANT, b"b", 2.0)] == [1, 2]
    assert [tuple(row) for row in catalog.pipelines()] == [("one", 2, b"b", 2.0, TENANT)]
    catalog.remove_pipeline(NAME)
    assert catalog.pipelines() == []
    with pytest.raises(NotFoundError, match="no pipeline 'one'"):
        catalog.remove_pipeline(NAME)


def test_functions_and_pipelines_share_one_namespace(catalog):
    catalog.add(NAME, TENANT, b"a", 1.0, proven=False)
    with pytest.raises(ConflictError, match="'one' is a function"):
        catalog.put_pipeline(NAME, TENANT, b"p", 1.0)
    catalog.remove(NAME, None)
    assert catalog.put_pipeline(NAME, TENANT, b"p", 1.0) == 2
    with pytest.raises(ConflictError, match="'one' is a pipeline"):
        catalog.add(NAME, TENANT, b"a", 1.0)


def test_beyond_the_limit_of_a_tenant_only_its_own_oldest_profiles_are_dropped(catalog, monkeypatch):
    monkeypatch.setattr(catalog_module, "TENANT_PROFILES_MAX", 2)
    for at, subject in enumerate(("b/1", "a/1", "a0/1", "a/2", "a/3")):
        catalog.put_profile("m", subject, subject.encode(), float(at))
    subjects = ("a/1", "a/2", "a/3", "b/1", "a0/1")
    assert [catalog.profile("m", each) for each in subjects] == [None, b"a/2", b"a/3", b"b/1", b"a0/1"]


def test_an_old_catalog_is_brought_up_to_date(path):
    db = sqlite3.connect(path)
    for statement in (*_SCHEMAS[0], "PRAGMA user_version = 1"):
        db.execute(statement)
    db.execute("INSERT INTO node VALUES ('me')")
    db.execute("INSERT INTO names VALUES ('one', 1)")
    db.execute("INSERT INTO functions VALUES ('one', 1, x'00', 1.0, 1)")
    db.commit()
    db.close()
    for name in ("two", "three"):
        catalog = Catalog(path)
        assert catalog.node_identity == "me"
        assert [row.name for row in catalog.rows()] == ["one"]
        assert catalog.put_pipeline(FunctionName(name), TENANT, b"p", 1.0) == 1
        catalog.close()


def test_a_name_belongs_to_its_first_tenant_until_all_its_versions_are_removed(catalog):
    stranger = TenantId("stranger")
    catalog.add(NAME, TENANT, b"a", 1.0)
    with pytest.raises(ForbiddenError, match="'one'"):
        catalog.add(NAME, stranger, b"b", 1.0)
    assert catalog.add(NAME, TENANT, b"c", 1.0) == 2
    catalog.remove(NAME, None)
    assert catalog.put_pipeline(NAME, stranger, b"p", 1.0) == 3
    with pytest.raises(ForbiddenError, match="'one'"):
        catalog.put_pipeline(NAME, TENANT, b"q", 1.0)

import sqlite3
from contextlib import closing

from overwinter.core.profile import LayerPoint, Point, Profile
from overwinter.store import catalog
from overwinter.store.catalog import Catalog
from overwinter.store.repository import Repository

PROFILE = Profile(
    weight_bytes=5,
    macs=7,
    points=(Point(1, 100, 2, 1, 0.25),),
    layers=(LayerPoint(path="a", macs=7, weight_bytes=5, output_bytes=3, latency_s={1: 0.1, 8: 0.4}),),
    wake_s=0.02,
)


def test_a_profile_outlives_the_repository_object_and_belongs_to_one_machine(tmp_path):
    with closing(Repository(tmp_path)) as repository:
        assert repository.profile("here", "program") is None
        repository.put_profile("here", "program", PROFILE, 1.0)
    with closing(Repository(tmp_path)) as repository:
        assert repository.profile("here", "program") == PROFILE
        assert repository.profile("there", "program") is None
        repository.put_profile("here", "program", Profile(weight_bytes=5, macs=7), 2.0)
        assert repository.profile("here", "program") == Profile(weight_bytes=5, macs=7)


def test_a_stored_profile_that_cannot_be_decoded_counts_as_none(tmp_path):
    with closing(Repository(tmp_path)) as repository:
        repository._catalog.put_profile("here", "program", b"\xc1", 1.0)
        assert repository.profile("here", "program") is None


def test_the_oldest_profiles_beyond_the_limit_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(catalog, "PROFILES_MAX", 2)
    kept = Catalog(tmp_path / "catalog.sqlite")
    for number in range(4):
        kept.put_profile("here", f"program-{number}", b"%d" % number, float(number))
    assert [kept.profile("here", f"program-{number}") for number in range(4)] == [None, None, b"2", b"3"]
    kept.close()


def test_an_older_catalog_gets_a_table_for_profiles(tmp_path):
    path = tmp_path / "catalog.sqlite"
    db = sqlite3.connect(path)
    for statement in (*catalog._SCHEMAS[0], *catalog._SCHEMAS[1], "INSERT INTO node VALUES ('me')"):
        db.execute(statement)
    db.execute("PRAGMA user_version = 2")
    db.commit()
    db.close()
    kept = Catalog(path)
    kept.put_profile("here", "program", b"p", 1.0)
    assert kept.profile("here", "program") == b"p"
    kept.close()

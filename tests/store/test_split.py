"""Promotions and splits are stored with the functions, and never name a removed version."""

import pytest

from overwinter.core.errors import ConflictError, NotFoundError
from overwinter.core.ids import FunctionName, TenantId
from overwinter.core.versions import Share
from overwinter.store.catalog import Catalog
from overwinter.store.traffic import StoredTraffic

F, T = FunctionName("f"), TenantId("t")


@pytest.fixture
def catalog(tmp_path):
    catalog = Catalog(tmp_path / "catalog.sqlite")
    for _ in range(3):
        catalog.add(F, T, b"{}", 0.0)
    yield catalog
    catalog.close()


@pytest.fixture
def traffic(catalog):
    return StoredTraffic(catalog.file)


def test_shares_survive_a_restart_and_can_be_removed(tmp_path, catalog, traffic):
    traffic.put(F, (Share(1, 90), Share(2, 10)))
    traffic.put(F, (Share(3, 100),))
    again = Catalog(tmp_path / "catalog.sqlite")
    assert StoredTraffic(again.file).all() == {F: (Share(3, 100),)}
    again.close()
    traffic.put(F, ())
    assert traffic.all() == {}


def test_a_version_that_is_absent_or_on_trial_gets_no_share(catalog, traffic):
    catalog.add(F, T, b"{}", 0.0, proven=False)
    for version in (4, 9):
        with pytest.raises(NotFoundError, match=f"no version {version}; it has 1, 2, 3"):
            traffic.put(F, (Share(version, 100),))
    with pytest.raises(NotFoundError, match="'g'"):
        traffic.put(FunctionName("g"), (Share(1, 100),))
    assert traffic.all() == {}


def test_a_version_with_a_share_is_removed_only_with_all_others_that_passed_their_trial(catalog, traffic):
    traffic.put(F, (Share(1, 90), Share(2, 10)))
    with pytest.raises(ConflictError, match="version 2 of 'f' gets 10 per cent"):
        catalog.remove(F, 2)
    assert len(catalog.rows()) == 3
    catalog.remove(F, 3)
    catalog.add(F, T, b"{}", 0.0, proven=False)
    with pytest.raises(ConflictError):
        catalog.remove(F, 2)
    assert catalog.remove(F, None) == (1, 2, 4)
    assert traffic.all() == {}


def test_the_only_answering_version_can_be_removed_while_another_is_on_trial(catalog, traffic):
    for version in (1, 2):
        catalog.remove(F, version)
    traffic.put(F, (Share(3, 100),))
    on_trial = catalog.add(F, T, b"{}", 0.0, proven=False)
    assert catalog.remove(F, 3) == (3,)
    catalog.prove(F, on_trial)
    assert traffic.all() == {}
    assert [row.version for row in catalog.rows()] == [on_trial]

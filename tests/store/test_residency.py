from hypothesis import given
from hypothesis import strategies as st

from overwinter.core.ids import Address
from overwinter.store.manifest import Blob
from overwinter.store.residency import missing_bytes
from tests.store.family import base, head_variant

blobs = st.lists(st.integers(0, 9).map(lambda n: Blob(Address(f"{n:064x}"), 10 * n)), max_size=12)


class Held:
    def __init__(self, held):
        self.addresses = {blob.address for blob in held}

    def holds(self, address):
        return address in self.addresses


@given(blobs, blobs)
def test_missing_counts_each_absent_address_once(needed, held):
    absent = {blob.address: blob.nbytes for blob in needed if blob not in held}
    assert missing_bytes(needed, Held(held)) == sum(absent.values())


@given(blobs, blobs)
def test_nothing_is_missing_where_all_that_is_needed_is_held(needed, held):
    assert missing_bytes(needed, Held([*held, *needed])) == 0


def test_missing_bytes_are_computed_alike_for_a_repository_and_a_host_store(repository, host):
    model, sibling = base(), head_variant("sibling", seed=1)
    needed, wanted = model.manifest.blobs(), sibling.manifest.blobs()
    everything = sum(blob.nbytes for blob in needed)
    for place in (repository, host):
        assert missing_bytes(needed, place) == everything
    assert model.deploy(repository) == everything
    assert missing_bytes(needed, repository) == 0
    assert missing_bytes(needed, host) == everything
    assert host.load(needed) == everything
    assert missing_bytes(needed, host) == 0
    delta = sum({blob.address: blob.nbytes for blob in wanted if blob not in needed}.values())
    assert 0 < delta < everything / 4
    for place in (repository, host):
        assert missing_bytes(wanted, place) == delta
    assert sibling.deploy(repository) == delta
    assert host.load(wanted) == delta
    assert sum(host.resident().values()) == everything + delta

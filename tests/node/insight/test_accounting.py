"""A difference counts when it lasts, once; what settles meanwhile does not."""

import asyncio
import os

import pytest

from overwinter.node.insight.accounting import SLACK_BYTES, Accounting, Mismatch, WeighedBody
from overwinter.node.insight.memory import ProcessMemory
from overwinter.node.insight.statistics import Statistics
from overwinter.store.blocks import address_of
from overwinter.store.hosts import HostStores
from tests.scheduler.world import World, spec
from tests.store.source import Source

CONTENTS = {address_of(data): data for data in (b"a" * 5000, b"b" * 70_000)}


class NoProcesses:
    """A node whose processes are all gone."""

    def zygote_smaps(self):
        return []

    def body_smaps(self):
        return {}


class House:
    """A mind, a host store with what it holds, and the accounts of both."""

    def __init__(self, root) -> None:
        self.world, self.said = World(), []
        self.hosts = HostStores(root / "store", Source(CONTENTS))
        self.function = spec("f", blobs=tuple((address, len(data)) for address, data in CONTENTS.items()))
        self.world.deploy(self.function)
        self.world.arrive()
        self.store = self.hosts.store("")
        self.store.stage(self.function.blobs)
        self.accounting = Accounting(self.world.state, self.hosts, NoProcesses, Statistics(), self.said.append)

    def stage(self) -> None:
        """Tell the mind what has come."""
        self.world.stage()

    def compare(self, times: int = 1) -> None:
        for _ in range(times):
            asyncio.run(self.accounting.compare())


@pytest.fixture
def house(tmp_path):
    return House(tmp_path)


def test_what_is_on_its_way_is_no_difference(house):
    house.compare(3)
    house.stage()
    house.compare(3)
    assert house.accounting.mismatches.total() == 0
    assert (house.said, house.accounting.passes) == ([], 6)


def test_a_block_that_lost_its_file_is_told_once(house):
    house.stage()
    house.compare()
    (house.store.root / min(CONTENTS)).unlink()
    house.compare()
    assert house.accounting.mismatches["files"] == 0
    house.compare(3)
    assert house.accounting.mismatches == {"files": 1, "blocks": 0, "bodies": 0}
    assert len(house.said) == 1
    assert f"block {min(CONTENTS)} in the shared store has no file" in house.said[0]


@pytest.mark.parametrize("harm", ["cut", "hole", "stranger"])
def test_every_harm_to_a_file_is_seen(house, harm):
    house.stage()
    path = house.store.root / max(CONTENTS, key=lambda address: len(CONTENTS[address]))
    path.chmod(0o600)
    if harm == "cut":
        os.truncate(path, 100)
    elif harm == "hole":
        size = path.stat().st_size
        path.write_bytes(b"")
        os.truncate(path, size)
    else:
        (path.parent / ("e" * 64)).write_bytes(b"x")
    house.compare(3)
    assert house.accounting.mismatches["files"] == 1


def test_blocks_that_the_mind_let_go_and_the_store_kept_are_told_together(house):
    house.stage()
    house.world.state.functions.clear()
    house.world.state.stores.clear()
    house.compare(2)
    assert house.accounting.mismatches["blocks"] == 2
    assert house.said[0].endswith("is held for no function, and 1 more")


def test_what_comes_and_goes_between_two_passes_is_not_told(house):
    house.stage()
    stranger = house.store.root / ("e" * 64)
    for _ in range(3):
        stranger.write_bytes(b"x")
        house.compare()
        stranger.unlink()
        house.compare()
    assert house.accounting.mismatches.total() == 0


def test_a_difference_that_comes_back_counts_again(house):
    one = Mismatch("files", "e" * 64, "is wrong")
    for found in ({one}, {one}, {one}, set(), {one}, {one}):
        house.accounting._judge(found)
    assert house.accounting.mismatches["files"] == 2


@pytest.mark.parametrize(
    ("expected", "private", "told"), [(100, 200, 0), (100, 200 + SLACK_BYTES, 1), (None, 1 << 40, 0)]
)
def test_a_body_may_have_a_little_more_than_its_profile_says(house, expected, private, told):
    house.stage()
    assert list(house.world.state.workers) == [1]
    house.accounting.bodies[1] = WeighedBody("f@1", ProcessMemory(private, private, 0), expected, 0.0)
    house.compare(3)
    assert house.accounting.mismatches["bodies"] == told
    assert len(house.said) == told
    house.world.state.workers.clear()
    house.compare()
    assert house.accounting.bodies == {}

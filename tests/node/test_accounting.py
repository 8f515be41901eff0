"""A lasting difference between two counts of bytes is reported once; a temporary one is not."""

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from overwinter.node.accounting import SLACK_BYTES, Accounting, Mismatch
from overwinter.scheduler.published import Published
from overwinter.store.blocks import address_of
from overwinter.store.hosts import HostStores
from overwinter.telemetry.accounts import MeasuredWorkerMemory, ProcessMemory
from overwinter.telemetry.statistics import Statistics
from tests.scheduler.world import World, spec
from tests.store.source import Source

CONTENTS = {address_of(data): data for data in (b"a" * 5000, b"b" * 70_000)}


class NoProcesses:
    """The processes of a node without workers; `zygotes`: the smaps files of its zygotes."""

    def __init__(self) -> None:
        self.zygotes = []

    def zygote_smaps(self):
        return self.zygotes

    def worker_smaps(self):
        return {}


class Parts:
    """A scheduler, a host store with its content, and the accounts of both."""

    def __init__(self, root) -> None:
        self.world, self.said = World(), []
        self.hosts = HostStores(root / "store", Source(CONTENTS))
        self.function = spec("f", blobs=tuple((address, len(data)) for address, data in CONTENTS.items()))
        self.world.deploy(self.function)
        self.world.arrive()
        self.store = self.hosts.store("")
        self.store.load(self.function.blobs)
        self.processes = NoProcesses()
        self.accounting = Accounting(
            Published(self.world.scheduler.cycle), self.hosts, self.processes, Statistics(), self.said.append
        )

    def load(self) -> None:
        """Tell the scheduler which blocks are loaded."""
        self.world.load_blocks()

    def compare(self, times: int = 1) -> None:
        for _ in range(times):
            asyncio.run(self.accounting.compare())


@pytest.fixture
def parts(tmp_path):
    return Parts(tmp_path)


def test_a_node_that_stops_before_a_pass_begins_closes_the_files_opened_for_it(parts):
    async def scene():
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        free = threading.Event()
        asyncio.get_running_loop().run_in_executor(None, free.wait)
        try:
            before = len(os.listdir("/proc/self/fd"))
            comparing = asyncio.create_task(parts.accounting.compare())
            await asyncio.sleep(0)
            assert len(os.listdir("/proc/self/fd")) == before + 1
            comparing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await comparing
            assert len(os.listdir("/proc/self/fd")) == before
        finally:
            free.set()

    with open("/proc/self/smaps", "rb") as smaps:
        parts.processes.zygotes.append(smaps.fileno())
        asyncio.run(scene())


def test_blocks_being_loaded_are_no_mismatch(parts):
    parts.compare(3)
    parts.load()
    parts.compare(3)
    assert parts.accounting.accounts.mismatches.total() == 0
    assert (parts.said, parts.accounting.accounts.passes) == ([], 6)


def test_a_block_without_its_file_is_reported_once(parts):
    parts.load()
    parts.compare()
    (parts.store.root / min(CONTENTS)).unlink()
    parts.compare()
    assert parts.accounting.accounts.mismatches["files"] == 0
    parts.compare(3)
    assert parts.accounting.accounts.mismatches == {"files": 1, "blocks": 0, "workers": 0}
    assert len(parts.said) == 1
    assert f"block {min(CONTENTS)} in the shared store has no file" in parts.said[0]


@pytest.mark.parametrize("harm", ["cut", "hole", "stranger"])
def test_a_truncated_file_a_hole_and_an_unknown_file_are_detected(parts, harm):
    parts.load()
    path = parts.store.root / max(CONTENTS, key=lambda address: len(CONTENTS[address]))
    path.chmod(0o600)
    if harm == "cut":
        os.truncate(path, 100)
    elif harm == "hole":
        size = path.stat().st_size
        path.write_bytes(b"")
        os.truncate(path, size)
    else:
        (path.parent / ("e" * 64)).write_bytes(b"x")
    parts.compare(3)
    assert parts.accounting.accounts.mismatches["files"] == 1


def test_blocks_that_only_the_store_still_has_are_reported_together(parts):
    parts.load()
    parts.world.state.functions.clear()
    parts.world.state.stores.clear()
    parts.compare(2)
    assert parts.accounting.accounts.mismatches["blocks"] == 2
    assert parts.said[0].endswith("is held for no function, and 1 more")


def test_a_mismatch_in_only_one_pass_is_not_reported(parts):
    parts.load()
    stranger = parts.store.root / ("e" * 64)
    for _ in range(3):
        stranger.write_bytes(b"x")
        parts.compare()
        stranger.unlink()
        parts.compare()
    assert parts.accounting.accounts.mismatches.total() == 0


def test_a_mismatch_that_returns_is_counted_again(parts):
    one = Mismatch("files", "e" * 64, "is wrong")
    for found in ({one}, {one}, {one}, set(), {one}, {one}):
        parts.accounting._count_lasting(found)
    assert parts.accounting.accounts.mismatches["files"] == 2


@pytest.mark.parametrize(
    ("expected", "private", "result"), [(100, 200, 0), (100, 200 + SLACK_BYTES, 1), (None, 1 << 40, 0)]
)
def test_a_worker_may_use_slightly_more_memory_than_its_profile(parts, expected, private, result):
    parts.load()
    assert list(parts.world.state.workers) == [1]
    parts.accounting.accounts.workers[1] = MeasuredWorkerMemory(
        "f@1", ProcessMemory(private, private, 0, 0, 0, 1), expected, 0.0
    )
    parts.compare(3)
    assert parts.accounting.accounts.mismatches["workers"] == result
    assert len(parts.said) == result
    parts.world.state.workers.clear()
    parts.compare()
    assert parts.accounting.accounts.workers == {}

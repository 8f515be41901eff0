"""One collection of unneeded blocks runs at a time, and occupies no thread that requests need."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from overwinter.node.upkeep import UnneededBlocks
from overwinter.store.collection import Collected
from tests.node.rig import until

ASKING = 5


class Locked:
    """A repository each of whose collections lasts until it is released."""

    def __init__(self):
        self.begun = self.at_once = 0
        self.released = threading.Semaphore(0)

    def collect(self, now, grace_s, only):
        self.begun += 1
        self.at_once += 1
        assert self.at_once == 1
        assert self.released.acquire(timeout=60)
        self.at_once -= 1
        return Collected(self.begun, 0)


def test_removals_during_a_collection_share_the_next_one_and_leave_the_threads_free():
    repository = Locked()

    async def scene():
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        unneeded = UnneededBlocks(repository, 60.0)
        first = asyncio.create_task(unneeded.collect(["a"]))
        await until(lambda: repository.begun)
        others = [asyncio.create_task(unneeded.collect(["b"])) for _ in range(ASKING)]
        # The only thread of the loop's executor is free.
        assert await asyncio.to_thread(partial(repository.released.release, 2)) is None
        assert (await first).files == 1
        assert [each.files for each in await asyncio.gather(*others)] == [2] * ASKING
        assert repository.begun == 2

    asyncio.run(scene())
